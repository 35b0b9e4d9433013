"""Checkpoints of TDEN's authors, in their layout as documented, and BERT's weights, converted to TDEN."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from public_tden import PUBLIC, public_layout, public_task_layout
from safetensors.torch import save_file
from torch import Tensor

from vlp_models.common.state_dicts import read_state_dict
from vlp_models.contrib.public_weights.tden import convert_bert, convert_xmodaler
from vlp_models.data.batch import Batch
from vlp_models.errors import CheckpointError
from vlp_models.models import DataFacts, build_model
from vlp_models.models.layers.attention import padding_mask
from vlp_models.models.layers.packing import Packing
from vlp_models.models.tden.model import GENERATION, TDEN
from vlp_models.objectives.masked_modeling import Corruption

VOCAB, FEATURES, CLASSES = 30, 6, 5
SMALL = {"hidden": 16, "heads": 4, "intermediate": 24, "object_layers": 2, "sentence_layers": 3, "encoder_layers": 2}
SMALL |= {"decoder_layers": 2, "max_positions": 20}


def build(**config: Any) -> TDEN:
    torch.manual_seed(3)
    facts = DataFacts(vocab_size=VOCAB, mask_id=4, feature_dim=FEATURES, num_classes=CLASSES)
    model = build_model("tden", {**SMALL, "init_std": 0.3, **config}, facts)
    assert isinstance(model, TDEN)
    with torch.no_grad():  # so that norms and biases are distinct
        for tensor in [*model.parameters(), *(b for n, b in model.named_buffers() if "running" in n)]:
            tensor.add_(torch.rand_like(tensor) * 0.1)
    return model.eval()


def rebuilt(state: dict[str, Tensor]) -> TDEN:
    converted = convert_xmodaler(state, heads=4)
    facts = DataFacts(vocab_size=VOCAB, mask_id=4, feature_dim=FEATURES, num_classes=CLASSES)
    torch.manual_seed(9)
    model = build_model("tden", converted.config, facts)
    result = model.load_state_dict(converted.weights, strict=False)
    assert not result.unexpected_keys
    assert isinstance(model, TDEN)
    return model.eval()


def outputs(model: TDEN, batch: Batch) -> dict[str, Tensor]:
    """Return all that pretraining trains."""
    model = model.double()
    every, text = dict.fromkeys(model.objectives), batch.text
    seen = Corruption(ids_BT=text.ids_BT, words_BT=text.mask_BT & (text.ids_BT > 10), regions_BR=batch.image.mask_BR)
    output = model.masked_pass(batch, seen, model.encode_corrupted(batch, seen), every)
    losses = model.pretraining_losses(
        batch, objectives=every, generator=torch.Generator().manual_seed(0), mask_probability=0.3
    )
    return {
        "mlm": output.word_logits["encoder"],
        "moc": output.losses["moc"].mean,
        "msg": output.word_logits["decoder"],
        "image": model.embed_image(batch.image),
        "text": model.embed_text(batch.text),
        "caption": model.generation_logits(batch.image, batch.text),
        **{f"loss of {name}": loss.mean for name, loss in losses.items()},
    }


@pytest.mark.parametrize("batch_norm", [True, False])
@pytest.mark.parametrize("wrapped", [False, True])
def test_pretraining_checkpoint_gives_the_same_outputs(
    tmp_path: Path, make_batch: Callable[..., Batch], wrapped: bool, batch_norm: bool
) -> None:
    model = build(**PUBLIC | {"pooler_batch_norm": True})
    state = public_layout(model)
    if not batch_norm:
        state = {name: tensor for name, tensor in state.items() if ".bn." not in name}
        for pool in (model.text_pooler, *model.image_poolers):
            pool.norm = torch.nn.Identity()
    file = tmp_path / "model.pth"
    whole = {"model": {f"module.{k}": v for k, v in state.items()}, "iteration": 7, "optimizer": {"state": {}}}
    torch.save(whole if wrapped else state, file)
    own, imported = outputs(model, make_batch()), outputs(rebuilt(read_state_dict(file)), make_batch())
    assert len(own) == 10
    for name, tensor in own.items():
        torch.testing.assert_close(imported[name], tensor, rtol=0, atol=1e-12, msg=name)


def test_checkpoint_of_one_task_fills_its_part_of_the_model(tmp_path: Path, make_batch: Callable[..., Batch]) -> None:
    model, batch = build(**PUBLIC), make_batch()
    state = public_layout(model)
    common = ("token_embed.", "visual_embed.", "encoder.")
    captioning = {k: v for k, v in state.items() if k.startswith((*common, "decoder.g_layers.", "predictor."))}
    assert convert_xmodaler(captioning, heads=4).task == "captioning"
    logits = rebuilt(captioning).double().generation_logits(batch.image, batch.text)
    torch.testing.assert_close(logits, model.double().generation_logits(batch.image, batch.text), rtol=0, atol=1e-12)
    retrieval = {k: v for k, v in state.items() if k.startswith((*common, "similarity_predictor."))}
    assert convert_xmodaler(retrieval, heads=4).task == "retrieval"
    torch.testing.assert_close(
        rebuilt(retrieval).double().embed_image(batch.image), model.embed_image(batch.image), rtol=0, atol=1e-12
    )


def public_pooler(state: dict[str, Tensor], name: str, x: Tensor, mask: Tensor) -> Tensor:
    """Pool by the documented formula: score, softmax over tokens, weighted sum, `embed`."""
    w = {key: state[f"predictor.{name}.{key}"].double() for key in ("att.0.weight", "att.0.bias", "att.3.weight")}
    w |= {key: state[f"predictor.{name}.{key}"].double() for key in ("att.3.bias", "embed.weight", "embed.bias")}
    score = (x @ w["att.0.weight"].T + w["att.0.bias"]).relu() @ w["att.3.weight"].T + w["att.3.bias"]
    weight = (score[..., 0] - 10000.0 * (~mask)).softmax(-1)
    return (weight[..., None] * x).sum(1) @ w["embed.weight"].T + w["embed.bias"]


def public_logits(state: dict[str, Tensor], letter: str, x: Tensor) -> Tensor:
    w = {f"{i}.{p}": state[f"predictor.{letter}_logits.{i}.{p}"].double() for i in (0, 1) for p in ("weight", "bias")}
    x = torch.nn.functional.layer_norm(x, x.shape[-1:], w["0.weight"], w["0.bias"], eps=1e-5)
    return x @ w["1.weight"].T + w["1.bias"]


@pytest.mark.parametrize("kind", ["vqa", "vcr"])
def test_vqa_and_vcr_features_equal_the_documented_formulas(make_batch: Callable[..., Batch], kind: str) -> None:
    """The product of image poolers after each cross-modal layer and the text pooler; VQA adds a separate decoder
    feature with a bidirectional mask, VCR a token type for the last segment."""
    special = {"use_decoder_in_fusion": False, "segment_types": True} if kind == "vcr" else {}
    model, batch = build(**PUBLIC | special, fusion_dim=20), make_batch()
    torch.manual_seed(5)
    linear = torch.nn.Linear
    head = torch.nn.ModuleDict({"fused": linear(20, 7), "decoder": linear(20, 7)}) if kind == "vqa" else linear(20, 1)
    state = public_task_layout(model, head)
    converted = convert_xmodaler(state, heads=4)
    assert converted.task == kind
    assert {name: tuple(t.shape) for name, t in converted.head.items()} == {
        name: tuple(t.shape) for name, t in head.state_dict().items()
    }

    last = batch.text.mask_BT.clone()
    last[:, :2] = False
    text = replace(batch.text, last_segment_BT=last)
    imported = rebuilt(state).double()
    fused = imported.fuse(batch.image, text)
    weights = {name: tensor.double() for name, tensor in converted.head.items()}
    got = fused.pooled_BP @ weights.get("fused.weight", weights.get("weight")).T
    got = got + weights.get("fused.bias", weights.get("bias"))

    model = model.double()
    visual, mask, packing = model.encode_image(batch.image), text.mask_BT, Packing.of(text.mask_BT)
    types = last.long() if kind == "vcr" else torch.zeros_like(text.ids_BT)
    words = model.text_embedding(text.ids_BT, types, torch.arange(text.ids_BT.shape[1]))
    for block in model.sentence_encoder:
        words = block(words, padding_mask(mask))
    understood, images = model.cross_encode(packing.pack(words), packing, visual)
    regions = visual.packing
    pooled = sum(public_pooler(state, f"v_pooler.{i}", regions.pad(x), regions.mask_BT) for i, x in enumerate(images))
    expected = public_logits(state, "u", pooled * public_pooler(state, "u_pooler", packing.pad(understood), mask))
    torch.testing.assert_close(got, expected, rtol=0, atol=1e-10)
    if kind == "vcr":
        assert fused.decoder_BP is None
        plain = imported.fuse(batch.image, batch.text)
        assert not torch.allclose(plain.pooled_BP, fused.pooled_BP), "the segments' types have an effect"
        assert "cross_decoder.0.attention.qkv.weight" not in converted.weights
        return
    memory = model.project_memory(images[-1], regions, None)
    decoded = packing.pad(model.decode(packing.pack(words), packing, memory, padding_mask(mask)))
    got = fused.decoder_BP @ weights["decoder.weight"].T + weights["decoder.bias"]
    expected = public_logits(state, "g", public_pooler(state, "g_pooler", decoded, mask))
    torch.testing.assert_close(got, expected, rtol=0, atol=1e-10)
    assert not torch.allclose(model.encode_text(text.ids_BT, packing, GENERATION), packing.pack(words))


def vqa_and_vcr() -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """A VQA model of 7 answers with its decoder; a VCR model, which has none."""
    linear = torch.nn.Linear
    vqa = public_task_layout(
        build(**PUBLIC, fusion_dim=20), torch.nn.ModuleDict({"fused": linear(20, 7), "decoder": linear(20, 7)})
    )
    special = {"use_decoder_in_fusion": False, "segment_types": True, "fusion_dim": 20}
    return vqa, public_task_layout(build(**PUBLIC | special), linear(20, 1))


def test_rows_of_the_classifier_distinguish_vqa_from_vcr(make_batch: Callable[..., Batch]) -> None:
    """The presence of a decoder does not: the authors' code has both tasks with and without one."""
    vqa, vcr = vqa_and_vcr()
    decoders = ("decoder.g_layers.", "predictor.g_")
    without = {name: tensor for name, tensor in vqa.items() if not name.startswith(decoders)}
    found = convert_xmodaler(without, heads=4)
    assert found.task == "vqa" and not found.config["segment_types"] and not found.config["use_decoder_in_fusion"]
    assert {name: tuple(t.shape) for name, t in found.head.items()} == {"weight": (7, 20), "bias": (7,)}
    batch = make_batch()
    assert rebuilt(without).double().fuse(batch.image, batch.text).decoder_BP is None

    with_decoder = vcr | {name: tensor for name, tensor in vqa.items() if name.startswith(decoders)}
    for name in ("predictor.g_logits.1.weight", "predictor.g_logits.1.bias"):
        with_decoder[name] = with_decoder[name][:1]
    with pytest.raises(CheckpointError, match="VQA with a single answer, or VCR"):
        convert_xmodaler(with_decoder, heads=4)
    assert convert_xmodaler(with_decoder, heads=4, task="vqa").task == "vqa"
    with pytest.raises(CheckpointError, match="one classifier here"):
        convert_xmodaler(with_decoder, heads=4, task="vcr")
    with pytest.raises(CheckpointError, match="of a vqa model, not of a vcr model"):
        convert_xmodaler(vqa, heads=4, task="vcr")


def test_differences_from_the_layout_are_listed() -> None:
    state = public_layout(build(**PUBLIC))
    changed = dict(state)
    del changed["encoder.v_layers.1.attention.self.key.bias"]
    changed["decoder.x_layers.0.weight"] = torch.zeros(1)
    changed["visual_embed.embeddings_norm.bias"] = torch.zeros(3)
    with pytest.raises(CheckpointError) as caught:
        convert_xmodaler(changed, heads=4)
    message = str(caught.value)
    assert "1 missing: encoder.v_layers.1.attention.self.key.bias" in message
    assert "1 unexpected: decoder.x_layers.0.weight" in message
    assert "1 of another shape: visual_embed.embeddings_norm.bias [3] instead of [16]" in message

    gap = {k.replace("encoder.layers.1.", "encoder.layers.9."): v for k, v in state.items()}
    with pytest.raises(CheckpointError, match=r"missing: encoder\.layers\.1\."):
        convert_xmodaler(gap, heads=4)
    with pytest.raises(CheckpointError, match="missing: token_embed"):
        convert_xmodaler({"a.weight": torch.zeros(2, 2)})
    with pytest.raises(CheckpointError, match=r"predictor\.bias differ"):
        convert_xmodaler(state | {"predictor.bias": state["predictor.bias"] + 1}, heads=4)
    with pytest.raises(CheckpointError, match="5 attention heads"):
        convert_xmodaler(state, heads=5)
    with pytest.raises(CheckpointError, match=r"not a vqa checkpoint.*\n.*missing: predictor\.u_pooler"):
        convert_xmodaler(
            {k: v for k, v in state.items() if "predictor" not in k} | {"predictor.g_pooler.bias": torch.zeros(1)},
            heads=4,
        )


class Hostile:
    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (Path("executed"),)


def test_hostile_files_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import zipfile

    monkeypatch.chdir(tmp_path)
    torch.save({"model": {"a": torch.zeros(1)}, "extra": Hostile()}, "code.pth")
    with pytest.raises(CheckpointError, match="more than tensors"):
        read_state_dict(Path("code.pth"))
    assert not Path("executed").exists()
    torch.save({"a": torch.zeros(1).expand(2**40)}, "view.pth")
    with pytest.raises(CheckpointError, match=r"declares .* bytes of tensors in a"):
        read_state_dict(Path("view.pth"))
    with zipfile.ZipFile("bomb.pth", "w", zipfile.ZIP_DEFLATED) as archive, archive.open("data", "w") as member:
        for _ in range(17 * 16):
            member.write(bytes(2**20))
    monkeypatch.setattr("vlp_models.common.state_dicts.MAX_BYTES", 2**24)
    with pytest.raises(CheckpointError, match="the limit"):
        read_state_dict(Path("bomb.pth"))
    Path("text.pth").write_text("hello")
    Path("text.safetensors").write_text("hello")
    torch.save([torch.zeros(1)], "list.pth")
    for name in ("text.pth", "text.safetensors", "list.pth", "absent.pth"):
        with pytest.raises(CheckpointError, match=name):
            read_state_dict(Path(name))


@pytest.mark.parametrize("old_names", [False, True])
def test_sentence_encoder_equals_bert(tmp_path: Path, old_names: bool) -> None:
    from transformers import BertConfig, BertForPreTraining

    torch.manual_seed(0)
    bert_config = BertConfig(
        vocab_size=VOCAB,
        hidden_size=16,
        num_hidden_layers=3,
        num_attention_heads=4,
        intermediate_size=24,
        max_position_embeddings=20,
        initializer_range=0.3,
    )
    bert = BertForPreTraining(bert_config).eval()
    with torch.no_grad():
        for parameter in bert.parameters():
            parameter.add_(torch.rand_like(parameter) * 0.1)
    state = {name: tensor.clone() for name, tensor in bert.state_dict().items()}
    if old_names:
        state = {
            k.replace("LayerNorm.weight", "LayerNorm.gamma").replace("LayerNorm.bias", "LayerNorm.beta"): v
            for k, v in state.items()
        }
    save_file(state, tmp_path / "model.safetensors")

    model = build(embedding_norm_eps=1e-12)
    weights = convert_bert(read_state_dict(tmp_path / "model.safetensors"), bert_config.to_dict(), model.config).weights
    fresh = {name.partition(".")[0] for name in model.load_state_dict(weights, strict=False).missing_keys}
    assert fresh.isdisjoint({"text_embedding", "sentence_encoder", "word_head"})
    ids = torch.randint(5, VOCAB, (3, 7))
    mask = torch.arange(7) < torch.tensor([[7], [4], [2]])
    wanted = bert(input_ids=ids, attention_mask=mask.long(), output_hidden_states=True)
    encoded = model.encode_text(ids, Packing.of(mask))
    torch.testing.assert_close(encoded, wanted.hidden_states[-1][mask], rtol=0, atol=1e-5)
    torch.testing.assert_close(model.predict_words(encoded), wanted.prediction_logits[mask], rtol=0, atol=1e-4)


def test_bert_of_other_sizes_is_refused() -> None:
    with pytest.raises(CheckpointError, match=r"sentence_layers 3, BERT's num_hidden_layers 2, which is less"):
        convert_bert({}, {"num_hidden_layers": 2}, build().config)
