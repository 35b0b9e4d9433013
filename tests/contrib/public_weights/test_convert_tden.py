"""Checkpoints of TDEN's authors, in their layout as documented, converted to TDEN."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from public_tden import PUBLIC, public_layout, public_task_layout
from torch import Tensor

from vlp_models.contrib.public_weights.tden import convert_xmodaler
from vlp_models.data.batch import Batch
from vlp_models.errors import CheckpointError
from vlp_models.models import DataFacts, build_model
from vlp_models.models.tden.model import TDEN

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


def test_poolers_without_batch_norm_give_the_same_embeddings(make_batch: Callable[..., Batch]) -> None:
    """The authors' numbers (test_authors_tden.py) are of poolers with batch norm."""
    model, batch = build(**PUBLIC | {"pooler_batch_norm": True}), make_batch()
    state = {name: tensor for name, tensor in public_layout(model).items() if ".bn." not in name}
    for pool in (model.text_pooler, *model.image_poolers):
        pool.norm = torch.nn.Identity()
    imported, model = rebuilt(state).double(), model.double()
    torch.testing.assert_close(imported.embed_image(batch.image), model.embed_image(batch.image), rtol=0, atol=1e-12)
    torch.testing.assert_close(imported.embed_text(batch.text), model.embed_text(batch.text), rtol=0, atol=1e-12)


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
