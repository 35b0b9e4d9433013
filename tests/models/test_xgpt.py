"""XGPT: shared weights, the paper's formulas in NumPy, and its objectives on some samples, in turns, in two passes."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from slow_xgpt import SlowXGPT
from tiny_xgpt import STRUCTURES, VARIANTS, tiny_xgpt, toy_xgpt
from toy_dataset import Toy, make_toy
from two_pass_toys import two_pass

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
from vlp_models.models.xgpt.state import SpanCorruption
from vlp_models.objectives.generation import region_generation
from vlp_models.objectives.loss import Loss
from vlp_models.objectives.masked_modeling import word_positions
from vlp_models.objectives.span_masking import replace_spans
from vlp_models.params import to_plain


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


# ---- The formulas of the paper ----


SPANS = [[(2, 3), (6, 1)], [(1, 1)], [(1, 1)], [(1, 1)]]


def corruption(batch: Batch) -> SpanCorruption:
    """Corrupt words 3 to 5 (IMLM) and two spans (IDA) of the first caption, and the first word of the others."""
    words = torch.zeros_like(batch.text.mask_BT)
    words[0, 3:6], words[1:, 1] = True, True
    ids, mask = replace_spans(batch.text.ids_BT, batch.text.mask_BT, SPANS, how="single", mask_id=4)
    read = batch.text.ids_BT.masked_fill(words, 4)
    return SpanCorruption(ids_BT=read, words_BT=words, infilled_BU=ids, infilled_mask_BU=mask)


def slow(model: XGPT) -> SlowXGPT:
    return SlowXGPT({name: tensor.numpy() for name, tensor in model.state_dict().items()}, model.config)


def sample(batch: Batch, row: int) -> tuple[list[int], np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """Return the words, features and boxes of one sample, without padding."""
    seen = batch.image.mask_BR[row]
    ids = batch.text.ids_BT[row][batch.text.mask_BT[row]].tolist()
    return ids, batch.image.features_BRF[row][seen].numpy(), batch.image.boxes_BR4[row][seen].numpy()


def nll(logits: np.ndarray[Any, Any], targets: list[int]) -> float:
    shifted = logits - logits.max(-1, keepdims=True)
    return float(np.sum(np.log(np.exp(shifted).sum(-1)) - shifted[range(len(targets)), targets]))


@pytest.mark.parametrize("name", STRUCTURES)
def test_objectives_equal_the_papers_formulas(make_batch: Any, name: str) -> None:
    """The first third of the matching's W has no effect."""
    model, batch = tiny_xgpt(**VARIANTS[name]), make_batch()
    reference, hidden = slow(model), corruption(batch)
    assert hidden.infilled_BU is not None and hidden.infilled_mask_BU is not None
    with torch.no_grad():
        image = model.encode_corrupted(batch, hidden)
        done = model.masked_pass(batch, hidden, image, dict.fromkeys(model.objectives))
        logits = model.generation_logits(batch.image, batch.text)
    expected, counts = dict.fromkeys(model.objectives, 0.0), dict.fromkeys(model.objectives, 0)
    generator = np.random.default_rng(0)
    for row in range(len(batch)):
        ids, features, boxes = sample(batch, row)
        own = reference.ic(ids, features, boxes)
        np.testing.assert_allclose(logits[row, : len(ids)].numpy(), own, rtol=1e-9, atol=1e-9)
        places = hidden.words_BT[row].nonzero().flatten().tolist()
        start, end = places[0], places[-1] + 1
        read = hidden.ids_BT[row][: len(ids)].tolist()
        fragment = reference.imlm(ids, read, start, end, features, boxes)
        infilled = hidden.infilled_BU[row][hidden.infilled_mask_BU[row]].tolist()
        anything = generator.normal(size=model.config.hidden) * 10
        denoised = reference.ida(ids, infilled, features, boxes, anything)
        expected["ic"] += nll(own[:-1], ids[1:])
        expected["imlm"] += nll(fragment, ids[start:end])
        expected["ida"] += nll(denoised[:-1], ids[1:])
        expected["tifg"] += reference.tifg(ids, features, boxes)
        for key, n in (("ic", len(ids) - 1), ("imlm", end - start), ("ida", len(ids) - 1), ("tifg", len(features))):
            counts[key] += n
    for key, loss in done.losses.items():
        assert loss.sum.item() == pytest.approx(expected[key], rel=1e-9), key
        assert loss.count == counts[key], key


def test_objectives_with_other_settings(make_batch: Any) -> None:
    batch = make_batch()
    model = tiny_xgpt(ida_residual=True, tifg_target="raw", tifg_reduction="sum", imlm_reads="caption")
    reference, hidden = slow(model), corruption(batch)
    with torch.no_grad():
        image = model.encode_corrupted(batch, hidden)
        done = model.masked_pass(batch, hidden, image, dict.fromkeys(("imlm", "ida", "tifg")))
    expected = dict.fromkeys(done.losses, 0.0)
    for row in range(len(batch)):
        ids, features, boxes = sample(batch, row)
        embedded, regions = reference.regions(features, boxes)
        assert hidden.infilled_BU is not None and hidden.infilled_mask_BU is not None
        read = hidden.infilled_BU[row][hidden.infilled_mask_BU[row]].tolist()
        found = reference.matched(reference.words(read), regions, np.zeros(model.config.hidden))
        words = reference.place(found + reference.w["text_embedding.words.weight"][read])
        states = reference.encode(np.concatenate([words, regions]))
        expected["ida"] += nll(reference.logits(reference.decode(reference.words(ids), states))[:-1], ids[1:])
        masked = hidden.ids_BT[row][: len(ids)].tolist()
        states = reference.encode(np.concatenate([reference.words(masked), regions]))
        places = hidden.words_BT[row].nonzero().flatten().tolist()
        logits = reference.logits(reference.decode(reference.words(ids), states))
        expected["imlm"] += nll(logits[[p - 1 for p in places]], [ids[p] for p in places])
        before = np.concatenate([reference.w["first_region"], embedded[:-1]])
        head = reference.decode(before, reference.encode(reference.words(ids)))
        out = head @ reference.w["region_head.weight"].T + reference.w["region_head.bias"]
        expected["tifg"] += float(((out - features) ** 2).sum())
    for key, loss in done.losses.items():
        assert loss.sum.item() == pytest.approx(expected[key], rel=1e-9), key
    parts = done.losses["tifg"].parts
    assert parts["tifg_squared"].sum.item() == pytest.approx(parts["tifg"].sum.item() * 6)


# ---- Objectives ----


ALL = ("ic", "imlm", "ida", "tifg")
TURNS = dict.fromkeys(ALL, 1.0)


def losses(model: XGPT, batch: Batch, objectives: Any = ALL, seed: int = 0) -> dict[str, Loss]:
    """objectives: names, or the samples that train each."""
    asked = objectives if isinstance(objectives, dict) else dict.fromkeys(objectives)
    generator = torch.Generator().manual_seed(seed)
    return model.pretraining_losses(batch, objectives=asked, generator=generator, mask_probability=0.15)


@pytest.fixture(scope="module")
def toy(tmp_path_factory: pytest.TempPathFactory) -> Toy:
    return make_toy(tmp_path_factory.mktemp("toy"))


@pytest.mark.parametrize(
    ("name", "reached", "not_reached"),
    [
        ("ic", {"refiner"}, {"matching", "first_region", "region_head"}),
        ("imlm", {"refiner"}, {"matching", "first_region", "region_head"}),
        ("ida", {"refiner", "matching"}, {"first_region", "region_head"}),
        # The regions are a target and a given: nothing teaches the model to make them easier.
        ("tifg", {"first_region", "region_head"}, {"matching", "refiner", "region_embedding", "word_bias"}),
    ],
)
def test_single_objective_reaches_its_own_modules(
    make_batch: Any, name: str, reached: set[str], not_reached: set[str]
) -> None:
    model = tiny_xgpt()
    losses(model, make_batch(), [name])[name].mean.backward()
    found = {n.split(".")[0] for n, p in model.named_parameters() if p.grad is not None and bool(p.grad.any())}
    assert reached | {"layers", "text_embedding"} <= found and not not_reached & found


def test_all_objectives_together_train_every_weight(make_batch: Any) -> None:
    """Including all of the matching, whose first third is left out because it has no effect."""
    model = tiny_xgpt()
    torch.stack([loss.mean for loss in losses(model, make_batch()).values()]).sum().backward()
    untouched = {name for name, p in model.named_parameters() if p.grad is None or not p.grad.abs().max() > 1e-9}
    assert untouched == set(), untouched


def test_tifg_target_has_no_feature_dropout(make_batch: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """TIFG's target is the same in training and validation, and belongs to each text's image."""
    targets: list[torch.Tensor] = []

    def seen(generated: torch.Tensor, target: torch.Tensor, **more: Any) -> Loss:
        targets.append(target)
        return region_generation(generated, target, **more)

    monkeypatch.setattr("vlp_models.models.xgpt.model.region_generation", seen)
    model, batch = tiny_xgpt(feature_dropout=0.5), make_batch()
    for mode in (True, False):
        losses(model.train(mode), batch, ["tifg"])
    assert torch.equal(*targets) and not targets[0].requires_grad
    dropped = model.train().region_embedding(batch.image)[0]
    assert not torch.equal(dropped, model.region_embedding(batch.image, drop=False)[0])


def test_predictions_do_not_depend_on_hidden_words(make_batch: Any) -> None:
    """Another word in the fragment, or in a span, changes targets and what the decoder has read, not the predictions of
    the first hidden word; nor does the encoder of IDA see how many words a span hid."""
    model, batch = tiny_xgpt(), make_batch()
    found = model.corrupt(batch, objectives=dict.fromkeys(ALL), generator=torch.Generator(), mask_probability=0.0)
    words, ids = found.words_BT, batch.text.ids_BT
    first = words & (words.cumsum(1) == 1)
    assert (words.sum(1) > 0).all() and not (words & ~word_positions(batch.text.mask_BT)).any()
    masked = ids.masked_fill(words, 4)
    other = torch.where(words, (ids + 1 - 5) % 25 + 5, ids)
    image = model.encode_image(batch.image)
    logits = [
        model.predict_fragment(masked, words, dataclasses.replace(batch.text, ids_BT=read), image)[first[words]]
        for read in (ids, other)
    ]
    assert torch.equal(*logits)
    assert found.infilled_BU is not None and found.infilled_mask_BU is not None
    assert (found.infilled_BU == 4).any(1).all()
    assert (found.infilled_mask_BU.sum(1) <= batch.text.mask_BT.sum(1)).all()


def test_random_words_are_no_special_tokens(make_batch: Any) -> None:
    model, batch = tiny_xgpt(imlm_fragment=1.0), make_batch()
    seen, places = set(), 0
    for seed in range(60):
        generator = torch.Generator().manual_seed(seed)
        found = model.corrupt(batch, objectives={"imlm": None}, generator=generator, mask_probability=0.0)
        seen |= set(found.ids_BT[found.words_BT].tolist())
        places += int((found.ids_BT == 4).sum())
        assert torch.equal(found.ids_BT[~found.words_BT], batch.text.ids_BT[~found.words_BT])
    assert min(seen) == 4 and max(seen) == 29
    assert places / (60 * int(word_positions(batch.text.mask_BT).sum())) == pytest.approx(0.8, abs=0.03)


@pytest.mark.parametrize("name", ALL)
def test_other_samples_have_no_effect(make_batch: Any, name: str) -> None:
    model, batch = tiny_xgpt(), make_batch()
    learners = torch.tensor([True, False, True, False])
    some = losses(model, batch, {name: learners})[name]
    none = losses(model, batch, {name: torch.zeros(4, dtype=torch.bool)})[name]
    assert none.count == 0 and none.sum.item() == 0 and none.sum.requires_grad
    none.sum.backward()
    # A sample's corruption does not depend on which other samples train, so these are the rows of the whole loss.
    everybody = losses(model, batch, {name: torch.ones(4, dtype=torch.bool)})[name]
    others = losses(model, batch, {name: ~learners})[name]
    assert some.count + others.count == everybody.count == losses(model, batch, [name])[name].count
    torch.testing.assert_close(some.sum + others.sum, everybody.sum)
    assert losses(model, batch.empty(), [name])[name].count == 0


def test_imlm_on_texts_is_mass(make_batch: Any) -> None:
    model, batch = tiny_xgpt(), make_batch()
    alone = losses(model, dataclasses.replace(batch, image=None), ["imlm"])["imlm"]
    assert alone.count == losses(model, batch, ["imlm"])["imlm"].count and alone.mean > 0
    alone.mean.backward()
    assert model.region_embedding.features.weight.grad is None


def test_two_passes(make_batch: Any) -> None:
    """The second pass's encoder reads the first one's predictions of the fragment; other objectives run once."""
    model, batch = tiny_xgpt(), make_batch()
    made = two_pass(model, "a", weights={"ic": 1.0, "imlm": 0.5}, sample="argmax")
    loss = made(batch, update=0, generator=torch.Generator().manual_seed(4))
    assert set(loss.losses) == {"ic", "imlm", "imlm_pass2"} and loss.weights["imlm_pass2"] == 0.5
    corruption = model.corrupt(
        batch,
        objectives=dict.fromkeys(("ic", "imlm")),
        generator=torch.Generator().manual_seed(4),
        mask_probability=0.0,
    )
    words, image = corruption.words_BT, model.encode_image(batch.image)
    first = model.predict_fragment(corruption.ids_BT, words, batch.text, image)
    read = corruption.ids_BT.clone()
    read[words] = first.argmax(-1)
    second = model.predict_fragment(read, words, batch.text, image)
    expected = torch.nn.functional.cross_entropy(second, batch.text.ids_BT[words])
    torch.testing.assert_close(loss.losses["imlm_pass2"].mean, expected)
    assert not torch.allclose(first, second)


def test_alternating_updates_use_one_objective_and_one_batch(toy: Toy, tmp_path: Path) -> None:
    model = toy_xgpt(toy.tokenizer.vocab_size, dropout=0.0, attention_dropout=0.0)
    _, result = toy.fit(tmp_path, model, objectives=TURNS, mix="alternate", reuse_batch=True, max_epochs=1)
    rows = [{key for key in row if key in ALL} for row in result.rows]
    assert rows[:8] == [{name} for name in ALL] * 2 and result.steps == 24  # six batches, four turns each
    assert {"val_ic", "val_imlm", "val_ida", "val_tifg", "val_tifg_squared"} <= set(result.rows[-1])
