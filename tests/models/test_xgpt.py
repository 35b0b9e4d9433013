"""XGPT's structure: which outputs depend on which inputs, cached decoding, and shared weights."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from tiny_xgpt import VARIANTS, tiny_xgpt

from vlp_models.data.batch import Batch
from vlp_models.errors import CheckpointError, DataError
from vlp_models.models import DataFacts, build_model
from vlp_models.models.decoding.search import beam_search
from vlp_models.models.layers.attention import MultiHeadAttention, causal_mask
from vlp_models.models.layers.cache import KeyValues
from vlp_models.models.layers.packing import Packing
from vlp_models.models.partial_load import load_partial
from vlp_models.models.xgpt.layers import ENCODED
from vlp_models.models.xgpt.model import XGPT
from vlp_models.objectives.loss import Loss
from vlp_models.params import to_plain


def losses(model: XGPT, batch: Batch, asked: Any = None, seed: int = 0) -> dict[str, Loss]:
    objectives = asked or dict.fromkeys(model.objectives)
    generator = torch.Generator().manual_seed(seed)
    return model.pretraining_losses(batch, objectives=objectives, generator=generator, mask_probability=0.15)


def test_keys_of_an_image_are_projected_once(make_batch: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Four images and two layers: eight rows are projected, however many hypotheses and steps follow."""
    model, batch, seen = tiny_xgpt(), make_batch(), []
    plain = MultiHeadAttention.project

    def counted(self: MultiHeadAttention, context: torch.Tensor, packing: Any = None) -> Any:
        if packing is not None:
            seen.append(packing.shape)
        return plain(self, context, packing)

    monkeypatch.setattr(MultiHeadAttention, "project", counted)
    found = beam_search(model, batch.image, max_len=6, bos_id=2, eos_id=3, beam_size=3)
    assert len(found) == 4 and seen == [(4, 5), (4, 5)]


def test_shared_weights() -> None:
    """Table 3's structures: the decoder shares all of the encoder's weights except one LayerNorm per layer."""

    def count(**config: object) -> int:
        with torch.device("meta"):
            model = build_model("xgpt", config, DataFacts(vocab_size=100, mask_id=4, feature_dim=2048))
        return sum(p.numel() for p in model.parameters())

    hidden, layers = 768, 12
    attention = 4 * (hidden * hidden + hidden)
    block = attention + 2 * 2 * hidden + 2 * hidden * 3072 + 3072 + hidden
    share = count()
    assert count(structure="enc") == share - layers * 2 * hidden  # no second attention, so no norm behind it
    assert count(cross_norm="shared") == share - layers * 2 * hidden
    assert count(structure="enc_dec") == share + layers * (block + attention)
    assert count(cross_attention="separate") == share + layers * attention
    assert count(signal="kv") == share + layers * 2 * hidden


@pytest.mark.parametrize(("name", "matters"), [("signal to keys and values", False), ("merged", True)])
def test_signal_on_keys_has_no_effect_with_two_attentions_in_a_row(make_batch: Any, name: str, matters: bool) -> None:
    """A constant in all keys of an attention moves a query's scores alike, and the softmax takes that away: so of
    `signal: kv` only what reaches the values can matter or learn, unless both sources share one softmax."""
    model, batch = tiny_xgpt(**VARIANTS[name]), make_batch()
    block, image = model.decoder_layers()[0], model.encode_image(batch.image)
    assert block.signal is not None
    words = Packing.of(batch.text.mask_BT)
    x_MD, causal = model.embed_text(batch.text.ids_BT, words), causal_mask(words.shape[1])
    memory = model.encode(image.refined_KD, image.packing)

    signaled = block.project(image.refined_KD, image.packing)
    plain = block.attention.project(image.refined_KD, image.packing)
    assert not torch.allclose(signaled.keys, plain.keys)
    in_keys, nowhere = (
        block.decode(x_MD, causal, words, KeyValues(keys, plain.values), memory) for keys in (signaled.keys, plain.keys)
    )
    assert torch.allclose(in_keys, nowhere, rtol=0, atol=1e-12) is not matters
    weights = torch.linspace(-1, 1, in_keys.numel(), dtype=torch.float64).reshape(in_keys.shape)
    (of_keys,) = torch.autograd.grad((in_keys * weights).sum(), block.signal, retain_graph=True)
    assert bool(of_keys[ENCODED].abs().max() > 1e-9) is matters
    both = block.decode(x_MD, causal, words, signaled, memory)
    (of_both,) = torch.autograd.grad((both * weights).sum(), block.signal)
    assert of_both[ENCODED].abs().max() > 1e-3  # through the values it learns in either


def test_wrong_inputs_are_explained(make_batch: Any) -> None:
    model, batch = tiny_xgpt(), make_batch()
    with pytest.raises(DataError, match="set `view: captions`"):
        losses(model, dataclasses.replace(batch, image=None), {"ida": None})


def test_partial_load() -> None:
    model = tiny_xgpt()
    longer = tiny_xgpt(1, max_positions=70, structure="enc_dec")
    report = load_partial(longer, model.state_dict(), to_plain(model.config))
    assert torch.equal(longer.text_embedding.positions.weight[:60], model.text_embedding.positions.weight)
    assert "text_embedding.positions.weight" in report.missing and "decoder.0.ffn.0.weight" in report.missing
    assert report.left_out == [
        f"layers.{layer}.cross_end.norm.{part}" for layer in range(2) for part in ("bias", "weight")
    ]
    signalled = tiny_xgpt(2, signal="query", tifg_target="raw")
    report = load_partial(tiny_xgpt(3, signal="kv"), signalled.state_dict(), to_plain(signalled.config))
    meant_otherwise = [*(f"layers.{layer}.signal" for layer in range(2)), "region_head.bias", "region_head.weight"]
    assert report.left_out == report.missing == meant_otherwise
    same = tiny_xgpt(3, signal="query", tifg_target="raw")
    assert not load_partial(same, signalled.state_dict(), to_plain(signalled.config)).left_out
    with pytest.raises(CheckpointError, match="refiner_gate: projected in the model, raw in the weights"):
        load_partial(model, {}, {"refiner_gate": "raw"})
