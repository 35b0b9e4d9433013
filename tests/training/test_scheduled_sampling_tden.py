"""Two-pass scheduled sampling on TDEN: a slow reference, gradients, causality, cost, edges, exact resume."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny_tden as tiny
import torch
from torch import nn
from toy_dataset import Toy, check_resume
from two_pass_toys import ALL, generator, recipe_of, two_pass

from vlp_models.data.batch import Regions
from vlp_models.models.layers.packing import Packing
from vlp_models.params import RampParams, ScheduledSamplingParams
from vlp_models.training.scheduled_sampling import make_loss

EVERYBODY = dict.fromkeys(ALL)  # every sample learns every objective


def slow_cross_entropy(logits: np.ndarray, target: int) -> float:
    shifted = logits - logits.max()
    return float(np.log(np.exp(shifted).sum()) - shifted[target])


@pytest.mark.parametrize("scheme", ["a", "b"])
def test_second_pass_matches_a_slow_reference(scheme: str) -> None:
    """One sample at a time, without padding, through the model's full logits; means in NumPy."""
    model, batch = tiny.build_tiny(), tiny.random_batch()
    parts = two_pass(model, scheme, sample="argmax")(batch, update=0, generator=generator(3)).parts
    corruption = model.corrupt(batch, objectives=EVERYBODY, generator=generator(3), mask_probability=0.4)
    assert corruption.words_BT.any() and corruption.regions_BR.any()

    words, moc, msg = [], [], []
    for i in range(len(batch)):
        length, regions = int(batch.text.mask_BT[i].sum()), int(batch.image.mask_BR[i].sum())
        image = Regions(
            **{n: x[i : i + 1, :regions] for n, x in vars(batch.image).items() if x is not None}  # no padding
        )
        gold = batch.text.ids_BT[i, :length].tolist()
        masked = corruption.ids_BT[i : i + 1, :length]
        real = torch.ones_like(masked, dtype=torch.bool)
        visual = model.encode_image(image, corruption.hidden_BR[i : i + 1, :regions])

        def predict(
            encoder_ids: torch.Tensor, decoder_ids: torch.Tensor, visual=visual, real=real
        ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
            """Logits of words at every position of the encoder, of regions, of words at every decoder position."""
            rows = Packing.of(real)  # one sentence, without padding: its rows are its tokens
            text, layers = model.cross_encode(model.encode_text(encoder_ids, rows, 0), rows, visual)
            memory = model.project_memory(visual.last_KD, visual.packing, None)
            decoded = model.decode(model.encode_text(decoder_ids, rows, 1), rows, memory)
            logits = model.predict_words(text), model.object_head(layers[-1][1:]), model.predict_words(decoded)
            return tuple(x.detach().numpy() for x in logits)

        by_encoder, _, by_decoder = predict(masked, masked)
        s_e, s_d = masked.clone(), masked.clone()
        positions = [p for p in range(length) if bool(corruption.words_BT[i, p])]
        for p in positions:
            s_e[0, p], s_d[0, p] = int(by_encoder[p].argmax()), int(by_decoder[p - 1].argmax())
        encoder_logits, region_logits, decoder_logits = predict(*((s_e, s_d) if scheme == "a" else (s_d, s_e)))
        words += [slow_cross_entropy(encoder_logits[p], gold[p]) for p in positions]
        msg += [slow_cross_entropy(decoder_logits[p], gold[p + 1]) for p in range(length - 1)]
        for r in range(regions):
            if bool(corruption.regions_BR[i, r]):
                target = batch.image.class_probs_BRC[i, r].numpy()
                log_p = -np.array([slow_cross_entropy(region_logits[r], c) for c in range(len(target))])
                moc.append(float((target * (np.log(target) - log_p)).sum()))
    for name, values in (("mlm", words), ("moc", moc), ("msg", msg)):
        assert parts[f"{name}_pass2"].mean.item() == pytest.approx(np.mean(values), rel=1e-9), name


@pytest.mark.parametrize("structure", ["decoupled", "two_stream", "single_stream"])
@pytest.mark.parametrize("scheme", ["a", "b", "c"])
def test_second_pass_is_causal(scheme: str, structure: str) -> None:
    """The decoder's logits of a word are bitwise equal in both passes, whatever follows the word."""
    model, batch = tiny.build_tiny(structure=structure), tiny.random_batch()
    logits: list[torch.Tensor] = []
    generation_pass = model.generation_pass

    def recorded(*args: Any, **kwargs: Any) -> Any:
        generated = generation_pass(*args, **kwargs)
        logits.append(generated.logits_MV[:5].detach())  # words 1 to 5 of the first sentence
        return generated

    model.generation_pass = recorded
    ids = batch.text.ids_BT.clone()
    ids[0, 6:8] = (ids[0, 6:8] + 1) % 30
    other = replace(batch, text=replace(batch.text, ids_BT=ids))
    # Scheme A with argmax: the decoder reads its own words. In B and C the encoder, which reads the whole sentence,
    # predicts the words: with none replaced, only the decoder path could leak.
    ramp = RampParams() if scheme == "a" else RampParams(start=0.0, end=0.0)
    for b in (batch, other):
        two_pass(model, scheme, sample="argmax", ramp=ramp)(b, update=0, generator=generator(3))
    assert len(logits) == (2 if scheme == "c" else 4)
    for before, after in zip(logits[: len(logits) // 2], logits[len(logits) // 2 :], strict=True):
        assert torch.equal(before, after)


@pytest.mark.parametrize("scheme", ["a", "b", "c"])
def test_update_encodes_image_and_shared_prefix_once(scheme: str) -> None:
    model, batch = tiny.build_tiny(), tiny.random_batch()
    words_BT = model.corrupt(batch, objectives=EVERYBODY, generator=generator(), mask_probability=0.4).words_BT
    encoded: list[tuple[int, ...]] = []
    decoded: list[tuple[int, ...]] = []
    model.object_encoder[0].register_forward_hook(lambda _m, _i, out: encoded.append(tuple(out.shape)))
    model.cross_decoder[0].register_forward_hook(lambda _m, _i, out: decoded.append(tuple(out.shape)))
    two_pass(model, scheme)(batch, update=0, generator=generator()).mean.backward()
    assert len(encoded) == 1
    assert decoded[0] == (int(batch.text.has_next_BT.sum()), model.config.hidden), "of each sentence all but the end"
    if scheme == "c":
        assert len(decoded) == 1
    else:  # at most from the first masked word to the last one that another follows: a sampled word may be [MASK]
        rest = 0
        for words, real in zip(words_BT.tolist(), batch.text.mask_BT.tolist(), strict=True):
            rest += sum(real) - 1 - words.index(True) if True in words else 0
        assert decoded[1][0] <= rest < decoded[0][0]


def test_pass_after_another_equals_a_separate_pass() -> None:
    """The same losses and gradients, in float64; also after a second one, and where nothing or everything differs."""
    model, batch = tiny.build_tiny(), tiny.random_batch()
    corruption = model.corrupt(batch, objectives=EVERYBODY, generator=generator(), mask_probability=0.4)
    draws = torch.Generator().manual_seed(5)
    image = model.encode_corrupted(batch, corruption)
    after = model.masked_pass(batch, corruption, image, EVERYBODY)
    earlier = after.losses["msg"].mean
    for again in ("words", "nothing", "everything"):
        ids_BT = after.output.ids_BT.clone()
        if again == "words":
            ids_BT[corruption.words_BT] = torch.randint(5, 30, (int(corruption.words_BT.sum()),), generator=draws)
        elif again == "everything":
            ids_BT[:, 0] = 7
        read = {"encoder": ids_BT, "decoder": ids_BT}
        found = []
        after_it = model.masked_pass(batch, corruption, image, EVERYBODY, read, after)
        assert (len(after_it.output.packing) == 0) is (again == "nothing")
        for passed in (after_it, model.masked_pass(batch, corruption, image, EVERYBODY, read)):
            model.zero_grad()
            total = earlier + sum(passed.losses[name].mean for name in ("mlm", "moc", "msg"))
            total.backward(retain_graph=True)
            gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
            found.append((total.detach(), passed.word_logits["decoder"], gradients))
        torch.testing.assert_close(*found, rtol=1e-9, atol=1e-12)
        after = after_it


def test_no_state_is_reused_across_images() -> None:
    """ISM lets the encoder run in the first pass, so that the decoder attends to its output; then MSG is alone."""
    model, batch = tiny.build_tiny(decoder_visual_source="cross_encoder"), tiny.random_batch()
    corruption = model.corrupt(batch, objectives=EVERYBODY, generator=generator(), mask_probability=0.4)
    image = model.encode_corrupted(batch, corruption)
    first = model.masked_pass(batch, corruption, image, {"ism": None, "msg": None})
    read = {"decoder": batch.text.ids_BT}
    after, alone = (
        model.masked_pass(batch, corruption, image, {"msg": None}, read, before) for before in (first, None)
    )
    assert torch.equal(after.losses["msg"].mean, alone.losses["msg"].mean)


@pytest.mark.parametrize("source", ["object_encoder", "cross_encoder"])
def test_dropout_is_redrawn_where_words_differ(source: str) -> None:
    """What both passes have in common they drop in common, unless the decoder's memory differs as well."""
    config = {"dropout": 0.5, "attention_dropout": 0.5, "decoder_visual_source": source}
    model, batch = tiny.build_tiny(**config).train(), tiny.random_batch()
    words_BT = torch.zeros_like(batch.text.mask_BT)
    words_BT[:, 3] = batch.text.mask_BT[:, 3]
    corruption = replace(
        model.corrupt(batch, objectives=EVERYBODY, generator=generator(), mask_probability=0.4),
        ids_BT=batch.text.ids_BT.masked_fill(words_BT, model.config.mask_id),
        words_BT=words_BT,
    )
    image = model.encode_corrupted(batch, corruption)
    first = model.masked_pass(batch, corruption, image, EVERYBODY)
    second = model.masked_pass(batch, corruption, image, EVERYBODY, {"decoder": batch.text.ids_BT}, first)
    one, two = first.output.logits_MV[:5], second.output.logits_MV[:5]  # after the tokens 0 to 4 of the first
    assert torch.equal(one[:3], two[:3]) is (source == "object_encoder")
    assert not torch.isclose(one[3:], two[3:]).any()


@pytest.mark.parametrize("scheme", ["a", "b", "c"])
@pytest.mark.parametrize(("size", "probability"), [(4, 0.0), (1, 0.4), (1, 0.0)])
def test_no_nan_without_masked_words_or_with_a_batch_of_one(scheme: str, size: int, probability: float) -> None:
    model, batch = tiny.build_tiny(), tiny.random_batch(size)
    for seed in range(4):
        model.zero_grad()
        loss = two_pass(model, scheme, probability=probability)(batch, update=0, generator=generator(seed))
        loss.mean.backward()
        assert loss.mean.isfinite()
        assert all(p.grad is None or bool(p.grad.isfinite().all()) for p in model.parameters())


def test_zero_ramp_equals_a_single_pass() -> None:
    model, batch = tiny.build_tiny(), tiny.random_batch()
    single = make_loss(model, recipe_of(ALL, mask_probability=0.4), ScheduledSamplingParams(), name="tden")(
        batch, update=0, generator=generator(2)
    )
    off = RampParams(start=0.0, end=0.0)
    for scheme in ("a", "b"):
        both = two_pass(model, scheme, ramp=off)(batch, update=0, generator=generator(2)).parts
        for name in ("mlm", "moc", "msg"):
            assert torch.equal(both[name].sum, single.parts[name].sum)
            assert torch.equal(both[f"{name}_pass2"].sum, single.parts[name].sum)
        on = two_pass(model, scheme)(batch, update=0, generator=generator(2)).parts
        assert not torch.equal(on["msg_pass2"].sum, single.parts["msg"].sum)
    once = two_pass(model, "c", ramp=off)(batch, update=0, generator=generator(2))
    assert once.mean.item() == pytest.approx(single.mean.item(), rel=1e-12)


@pytest.mark.slow
@pytest.mark.parametrize(("scheme", "accumulate"), [("a", 1), ("c", 2)])
def test_resume_after_kill_is_bitwise_equal(toy: Toy, tmp_path: Path, scheme: str, accumulate: int) -> None:
    """Dropout, masking, sampling, C's coin and the ramp: all of them functions of the update."""
    ramp = RampParams(start=0.3, end=0.9, steps=5)

    def fit(work: Path, **more: Any) -> tuple[nn.Module, Any]:
        model = toy.model()
        loss = two_pass(model, scheme, ramp=ramp)
        return toy.fit(work, model, loss=loss, accumulate=accumulate, checkpoint_every_steps=1, **more)

    last = 12 // accumulate  # two epochs of six batches
    _, result = check_resume(fit, tmp_path, 2, last)
    assert result.steps == last
