"""The public code's checkpoints, ResNets of timm and torchvision, and BERT as SOHO's weights."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
import timm
import torch
from authors_soho import checkpoint
from public_soho import bert_layout
from safetensors.torch import save_file
from soho_toys import FACTS, TINY, VOCAB, build

from vlp_models.contrib.public_weights.soho import convert_backbone, convert_bert, convert_soho, read_parts
from vlp_models.errors import CheckpointError
from vlp_models.models.convert import ImportRequest

GOLDEN = Path(__file__).parents[2] / "golden" / "authors_soho.json"


def randomized(**config):
    """Return a model without zero weights, which would hide mistakes."""
    model = build(**config).float()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.02 * torch.randn_like(parameter))
        for name, buffer in model.named_buffers():
            if name in ("dictionary.counts", "dictionary.sums"):
                buffer.uniform_(0.1, 1.0)
    return model


def test_unexpected_layout_is_reported_by_name() -> None:
    """Of the authors' checkpoints, whose outputs test_authors_soho.py compares."""
    layout = checkpoint(json.loads(GOLDEN.read_text())["pretraining layout"])["state_dict"]
    imported = convert_soho(layout, heads=3)
    assert imported.task is None and not imported.reads_regions
    sizes = {"vocab_size": 37, "hidden": 24, "heads": 3, "intermediate": 40, "layers": 2, "max_positions": 20}
    switches = dict.fromkeys(("pool_first", "square_mask", "tight_canvas", "plain_heads", "gate"), True)
    switches |= {"padding_in_dictionary": True, "dictionary_update": "released", "code_scores": "cosine"}
    switches |= {"masked_code": "of_one_place", "masked_pairs": "all", "mvm_probability": 0.015}
    assert imported.config == {**sizes, **switches, "backbone": "resnet18", "dictionary_size": 20}
    with pytest.raises(CheckpointError, match=r"1 missing: neck.ln.bias") as error:
        convert_soho({**{n: t for n, t in layout.items() if n != "neck.ln.bias"}, "neck.new": torch.zeros(1)}, heads=3)
    assert "1 unexpected: neck.new" in str(error.value)
    with pytest.raises(CheckpointError, match="should be tied"):
        convert_soho({**layout, "mask_l_fc.weight": layout["mask_l_fc.weight"] + 1}, heads=3)
    with pytest.raises(CheckpointError, match="blocks"):
        convert_soho({n: t for n, t in layout.items() if not n.startswith("backbone.layer2.1.")}, heads=3)
    with pytest.raises(CheckpointError, match="do not divide"):
        convert_soho(layout, heads=5)


def test_timm_or_torchvision_resnet_becomes_the_cnn(tmp_path: Path) -> None:
    import torchvision

    config = build(backbone_options={}, backbone_stage=3).config
    theirs = torchvision.models.resnet18(weights=None)
    ours = timm.create_model("resnet18", pretrained=False)
    ours.load_state_dict(theirs.state_dict())
    model = build(backbone_options={}, backbone_stage=3)
    for state in (theirs.state_dict(), ours.state_dict()):
        old = {name: tensor for name, tensor in state.items() if not name.endswith("num_batches_tracked")}
        for given in (state, old):
            weights = convert_backbone(given, config)
            left = model.load_state_dict(weights, strict=False)
            assert not left.unexpected_keys
            assert not [name for name in left.missing_keys if name.startswith("backbone.")]
    model = model.float().eval()
    image = torch.randn(1, 3, 64, 64)
    theirs.eval()
    x = theirs.maxpool(theirs.relu(theirs.bn1(theirs.conv1(image))))
    wanted = theirs.layer3(theirs.layer2(theirs.layer1(x)))
    torch.testing.assert_close(model.backbone(image), wanted)
    with pytest.raises(CheckpointError, match="not a resnet18"):
        convert_backbone(torchvision.models.resnet50(weights=None).state_dict(), config)
    asked = ImportRequest(facts=FACTS, family="soho", config={**TINY, "backbone_stage": 3, "backbone_options": {}})
    save_file(theirs.state_dict(), tmp_path / "resnet18.safetensors")
    assert read_parts(tmp_path / "resnet18.safetensors", asked).origin == "a CNN's"
    with pytest.raises(CheckpointError, match="`--name` must be a model of family"):
        read_parts(tmp_path / "resnet18.safetensors", ImportRequest(facts=FACTS, config=asked.config, family="vlmo"))
    with pytest.raises(CheckpointError, match="not a resnet101"):  # a model that leaves its config to the defaults
        read_parts(tmp_path / "resnet18.safetensors", ImportRequest(facts=FACTS, config={}, family="soho"))


def test_berts_first_layers_become_the_transformer_next_to_a_cnn(tmp_path: Path) -> None:
    deep = randomized(layers=4)
    state = {name: tensor.float() for name, tensor in deep.state_dict().items()}
    layout = bert_layout(state, "bert.", 4)
    for part in ("weight", "bias"):
        layout[f"cls.predictions.transform.dense.{part}"] = state[f"word_head.dense.{part}"]
        layout[f"cls.predictions.transform.LayerNorm.{part}"] = state[f"word_head.norm.{part}"]
        layout[f"bert.pooler.dense.{part}"] = torch.zeros(16)
    layout["cls.predictions.bias"] = state["word_head.bias"]
    bert = {"vocab_size": VOCAB, "hidden_size": 16, "num_attention_heads": 2, "intermediate_size": 32}
    bert |= {"num_hidden_layers": 4, "max_position_embeddings": 512}
    shallow = build(layers=2).float()
    weights = convert_bert(layout, bert, shallow.config).weights
    assert not shallow.load_state_dict(weights, strict=False).unexpected_keys
    for name in ("transformer.1.ffn.0.weight", "text_embedding.types.weight", "word_head.bias"):
        assert torch.equal(shallow.state_dict()[name], state[name])
    for wrong in ({"num_hidden_layers": 1}, {"hidden_size": 24}):
        with pytest.raises(CheckpointError, match="BERT's"):
            convert_bert(layout, {**bert, **wrong}, shallow.config)

    words = [f"w{i}" for i in range(VOCAB - 5)]
    vocabulary = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *words]
    (tmp_path / "vocab.txt").write_text("\n".join(vocabulary) + "\n")
    (tmp_path / "config.json").write_text(json.dumps(bert))
    save_file({name: tensor.contiguous() for name, tensor in layout.items()}, tmp_path / "model.safetensors")
    cnn = timm.create_model("resnet18", pretrained=False, **TINY["backbone_options"]).state_dict()
    save_file(cnn, tmp_path / "backbone.safetensors")
    asked = ImportRequest(facts=FACTS, family="soho", config=TINY, vocabulary=tuple(vocabulary))
    imported = read_parts(tmp_path, asked)
    assert imported.origin == "a CNN's and BERT's"
    left = shallow.load_state_dict(dict(imported.weights), strict=False)
    assert {name.partition(".")[0] for name in left.missing_keys} == {
        "hidden_cell",
        "neck",
        "visual_norm",
        "code_head",
        "match_head",
        "dictionary",
    }
    with pytest.raises(CheckpointError, match="its vocabulary lacks"):
        read_parts(tmp_path, dataclasses.replace(asked, vocabulary=("a",)))
