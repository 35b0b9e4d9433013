"""The three schemes: what each pass reads and learns, on a model of hand-made predictions and on TDEN."""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from toy_world import KilledAt, Toy, same_weights, untimed

from vlp_models.data.batch import Batch, Regions, Text
from vlp_models.errors import ParamsError
from vlp_models.models.protocols import MaskedPass
from vlp_models.objectives.loss import Loss
from vlp_models.objectives.masking import Corruption
from vlp_models.params import RampParams
from vlp_models.training.recipe import PretrainingLoss, make_recipe
from vlp_models.training.scheduled_sampling import make_two_pass_loss, schedule

# The tiny TDEN in float64 of the models' tests
_spec = importlib.util.spec_from_file_location("tiny", Path(__file__).parent.parent / "models" / "conftest.py")
assert _spec and _spec.loader
tiny = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(tiny)

ALL = {"mlm": 1.0, "moc": 1.0, "ism": 1.0, "msg": 1.0}
MASK = 4


def two_pass(model: nn.Module, scheme: str, *, weights=None, sample="multinomial", ramp=None, probability=0.4) -> Any:
    recipe = make_recipe("sum", weights or ALL, known=model.objectives, seed=0)
    return make_two_pass_loss(
        model,
        recipe,
        name="tden",
        mask_probability=probability,
        scheme=scheme,
        sample=sample,
        ramp=ramp or RampParams(),
    )


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def seed_where(coin: bool, model: nn.Module, batch: Batch, weights=None) -> int:
    """A seed with which C's coin falls so."""
    for seed in range(20):
        parts = two_pass(model, "c", weights=weights)(batch, update=0, generator=generator(seed)).parts
        if ("mlm" in parts) is coin:
            return seed
    raise AssertionError("a coin that always falls the same")


# ---- The equations, on predictions made by hand ------------------------------------------------------------------


@dataclass
class Scripted(nn.Module):
    """The encoder predicts 20, 21, ... at the masked words; the decoder predicts 10 + p + 1 after position p."""

    objectives: tuple[str, ...] = ("mlm", "moc", "ism", "msg")
    word_paths: dict[str, tuple[str, ...]] = field(
        default_factory=lambda: {"encoder": ("mlm", "moc"), "decoder": ("msg",)}
    )
    calls: list[tuple[set[str], dict[str, list[list[int]]]]] = field(default_factory=list)
    encoded: int = 0

    def __post_init__(self) -> None:
        super().__init__()

    __hash__ = nn.Module.__hash__

    def pretraining_losses(self, batch, *, objectives, generator, mask_probability):
        raise NotImplementedError

    def corrupt(self, batch, *, objectives, generator, mask_probability):
        words = torch.zeros_like(batch.text.mask_BT)
        words[0, 1] = words[0, 3] = words[1, 2] = True
        return Corruption(ids_BT=batch.text.ids_BT.masked_fill(words, MASK), words_BT=words)

    def encode_corrupted(self, batch, corruption):
        self.encoded += 1
        return "image"

    def masked_pass(self, batch, corruption, image, objectives, ids=None):
        assert image == "image"
        read = {path: (ids or {}).get(path, corruption.ids_BT).tolist() for path in self.word_paths}
        self.calls.append((set(objectives), read))
        # at position p the decoder says what follows p: for a masked word at p, look at p - 1
        after_BTV = torch.full((2, 5, 40), -50.0)
        for p in range(5):
            after_BTV[:, p, 10 + p + 1] = 50.0
        decoder = after_BTV[:, :-1][corruption.words_BT[:, 1:]]
        encoder = torch.full((3, 40), -50.0)
        encoder[range(3), [20, 21, 22]] = 50.0
        one = torch.ones((), requires_grad=True)
        losses = {name: Loss(total=one * 1.0, parts={name: one.detach()}) for name in objectives}
        return MaskedPass(losses=losses, word_logits={"encoder": encoder, "decoder": decoder})


def sentences() -> Batch:
    ids = torch.tensor([[2, 31, 32, 33, 3], [2, 34, 35, 3, 0]])
    return Batch(sample_ids=("a", "b"), image_ids=("a", "b"), image=None, text=Text(ids_BT=ids, mask_BT=ids > 0))  # type: ignore[arg-type]


S = [[2, MASK, 32, MASK, 3], [2, 34, MASK, 3, 0]]
S_E = [[2, 20, 32, 21, 3], [2, 34, 22, 3, 0]]
S_D = [[2, 11, 32, 13, 3], [2, 34, 12, 3, 0]]  # at p what the decoder said at p - 1


@pytest.mark.parametrize("sample", ["multinomial", "argmax"])
@pytest.mark.parametrize(
    ("scheme", "encoder_reads", "decoder_reads"), [("a", S_E, S_D), ("b", S_D, S_E)], ids=["eq. 1", "eq. 2"]
)
def test_a_and_b_learn_everything_then_everything_but_matching(scheme, encoder_reads, decoder_reads, sample) -> None:
    model = Scripted()
    loss = two_pass(model, scheme, sample=sample)(sentences(), update=0, generator=generator())
    assert model.calls == [
        ({"mlm", "moc", "ism", "msg"}, {"encoder": S, "decoder": S}),
        ({"mlm", "moc", "msg"}, {"encoder": encoder_reads, "decoder": decoder_reads}),
    ]
    assert model.encoded == 1
    assert loss.total.item() == 7.0
    assert set(loss.parts) == {"mlm", "moc", "ism", "msg", "mlm_pass2", "moc_pass2", "msg_pass2"}


def test_c_learns_each_objective_once_along_one_path_a_pass() -> None:
    seen = []
    for seed in range(200):
        model = Scripted()
        loss = two_pass(model, "c")(sentences(), update=0, generator=generator(seed))
        assert loss.total.item() == 4.0 and model.encoded == 1
        seen.append(model.calls)
    encoder_first = [({"mlm", "moc", "ism"}, {"encoder": S, "decoder": S}), ({"msg"}, {"encoder": S, "decoder": S_E})]
    decoder_first = [({"msg", "ism"}, {"encoder": S, "decoder": S}), ({"mlm", "moc"}, {"encoder": S_D, "decoder": S})]
    assert seen.count(encoder_first) + seen.count(decoder_first) == 200
    assert 70 < seen.count(encoder_first) < 130


def test_weights_hold_in_both_passes() -> None:
    weights = {"mlm": 2.0, "moc": 0.0, "ism": 5.0, "msg": 3.0}
    loss = two_pass(Scripted(), "a", weights=weights)(sentences(), update=0, generator=generator())
    assert loss.total.item() == 2 * (2 + 3) + 5


def test_a_works_along_one_path_alone() -> None:
    model = Scripted()
    two_pass(model, "a", weights={"msg": 1.0, "ism": 1.0})(sentences(), update=0, generator=generator())
    assert [names for names, _ in model.calls] == [{"msg", "ism"}, {"msg"}]
    assert model.calls[1][1] == {"encoder": S, "decoder": S_D}


def test_the_ramp_is_a_share_of_the_masked_words() -> None:
    ramp = RampParams(start=0.0, end=1.0, steps=100)
    replaced = {}
    for update in (0, 50, 100, None):
        counts = []
        for seed in range(150):
            model = Scripted()
            two_pass(model, "a", ramp=ramp)(sentences(), update=update, generator=generator(seed))
            counts.append((np.array(model.calls[1][1]["encoder"]) != np.array(S)).sum())
        replaced[update] = np.mean(counts) / 3
    assert replaced[0] == 0.0 and replaced[100] == replaced[None] == 1.0
    assert abs(replaced[50] - 0.5) < 0.1


# ---- On TDEN -----------------------------------------------------------------------------------------------------


def slow_cross_entropy(logits: np.ndarray, target: int) -> float:
    shifted = logits - logits.max()
    return float(np.log(np.exp(shifted).sum()) - shifted[target])


@pytest.mark.parametrize("scheme", ["a", "b"])
def test_second_pass_equals_a_slow_reference(scheme: str) -> None:
    """One sample at a time, without padding, through the model's full logits; means in NumPy."""
    model, batch = tiny.build_tiny(), tiny.random_batch()
    parts = two_pass(model, scheme, sample="argmax")(batch, update=0, generator=generator(3)).parts
    corruption = model.corrupt(batch, objectives=ALL, generator=generator(3), mask_probability=0.4)
    assert corruption.words_BT.any() and corruption.regions_BR.any()

    words, moc, msg = [], [], []
    for i in range(len(batch)):
        length, regions = int(batch.text.mask_BT[i].sum()), int(batch.image.mask_BR[i].sum())
        image = Regions(
            **{name: getattr(batch.image, name)[i : i + 1, :regions] for name in vars(batch.image)}  # no padding
        )
        gold = batch.text.ids_BT[i, :length].tolist()
        masked = corruption.ids_BT[i : i + 1, :length]
        real = torch.ones_like(masked, dtype=torch.bool)
        visual = model.encode_image(image, corruption.hidden_BR[i : i + 1, :regions])

        def predict(
            encoder_ids: torch.Tensor, decoder_ids: torch.Tensor, visual=visual, real=real
        ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
            """Logits of words at every position of the encoder, of regions, of words at every decoder position."""
            states = model.encode_text({0: encoder_ids, 1: decoder_ids}, real)
            text, layers = model.cross_encode(states[0], real, visual)
            causal = torch.ones(1, 1, real.shape[1], real.shape[1], dtype=torch.bool).tril()
            decoded = model.decode(states[1], causal, visual.last_BSD, visual.mask_BS)
            logits = model.predict_words(text), model.object_head(layers[-1][:, 1:]), model.predict_words(decoded)
            return tuple(x[0].detach().numpy() for x in logits)

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
        assert parts[f"{name}_pass2"].item() == pytest.approx(np.mean(values), rel=1e-9), name


@pytest.mark.parametrize("scheme", ["a", "b", "c"])
def test_gradients_of_the_joint_loss(scheme: str) -> None:
    """Central differences in float64; the sampled ids are constants, so the same words are drawn at each point."""
    config = {"object_layers": 1, "sentence_layers": 1, "encoder_layers": 1, "decoder_layers": 1, "hidden": 8}
    model, batch = tiny.build_tiny(**config), tiny.random_batch(3)
    learnt = two_pass(model, scheme)
    learnt(batch, update=0, generator=generator(1)).total.backward()
    step, picked = 1e-5, np.random.default_rng(0)
    for name, parameter in model.named_parameters():
        if parameter.grad is None:
            assert name.startswith("fusion_"), name
            continue
        flat, gradient = parameter.data.view(-1), parameter.grad.view(-1)
        place = int(picked.choice(gradient.abs().topk(min(3, len(gradient))).indices.numpy()))
        values = []
        for sign in (1, -1):
            flat[place] += sign * step
            values.append(learnt(batch, update=0, generator=generator(1)).total.item())
            flat[place] -= sign * step
        numeric = (values[0] - values[1]) / (2 * step)
        assert gradient[place].item() == pytest.approx(numeric, rel=1e-4, abs=1e-6), name


@pytest.mark.parametrize("structure", ["decoupled", "two_stream", "single_stream"])
@pytest.mark.parametrize("scheme", ["a", "b", "c"])
def test_the_second_pass_never_sees_later_words(scheme: str, structure: str) -> None:
    """What the decoder of either pass says of a word is bitwise the same whatever follows that word."""
    model, batch = tiny.build_tiny(structure=structure), tiny.random_batch()
    said: list[torch.Tensor] = []
    run_pass = model.run_pass

    def recorded(*args: Any, **kwargs: Any) -> Any:
        output = run_pass(*args, **kwargs)
        if output.msg_logits_NV is not None:
            said.append(output.msg_logits_NV[:5].detach())  # of the first sentence, the words 1 to 5
        return output

    model.run_pass = recorded
    ids = batch.text.ids_BT.clone()
    ids[0, 6:8] = (ids[0, 6:8] + 1) % 30
    other = replace(batch, text=replace(batch.text, ids_BT=ids))
    # argmax, A: the decoder's own words. In B and C the encoder, which sees the whole sentence, chooses the words: with
    # none replaced, only the decoder's own path could leak.
    ramp = RampParams() if scheme == "a" else RampParams(start=0.0, end=0.0)
    for b in (batch, other):
        two_pass(model, scheme, sample="argmax", ramp=ramp)(b, update=0, generator=generator(3))
    assert len(said) == (2 if scheme == "c" else 4)
    for before, after in zip(said[: len(said) // 2], said[len(said) // 2 :], strict=True):
        assert torch.equal(before, after)


@pytest.mark.parametrize("structure", ["two_stream", "single_stream"])
def test_other_structures_learn_in_two_passes(structure: str) -> None:
    model, batch = tiny.build_tiny(structure=structure), tiny.random_batch()
    for scheme in ("a", "b", "c"):
        two_pass(model, scheme)(batch, update=0, generator=generator()).total.backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.cross_encoder.parameters())


@pytest.mark.parametrize("scheme", ["a", "b", "c"])
def test_the_image_is_encoded_once_an_update(scheme: str) -> None:
    model, batch = tiny.build_tiny(), tiny.random_batch()
    calls = {"object": 0, "sentence": 0}
    model.object_encoder[0].register_forward_hook(lambda *_: calls.update(object=calls["object"] + 1))
    model.sentence_encoder[0].register_forward_hook(lambda *_: calls.update(sentence=calls["sentence"] + 1))
    two_pass(model, scheme)(batch, update=0, generator=generator()).total.backward()
    assert calls == {"object": 1, "sentence": 2}, "sentences: one batch of all streams a pass"


@pytest.mark.parametrize("scheme", ["a", "b", "c"])
@pytest.mark.parametrize(("size", "probability"), [(4, 0.0), (1, 0.4), (1, 0.0)])
def test_nothing_masked_and_a_batch_of_one_are_no_nan(scheme: str, size: int, probability: float) -> None:
    model, batch = tiny.build_tiny(), tiny.random_batch(size)
    for seed in range(4):
        model.zero_grad()
        loss = two_pass(model, scheme, probability=probability)(batch, update=0, generator=generator(seed))
        loss.total.backward()
        assert loss.total.isfinite()
        assert all(p.grad is None or bool(p.grad.isfinite().all()) for p in model.parameters())


def test_a_ramp_of_nothing_reads_what_a_single_pass_reads() -> None:
    model, batch = tiny.build_tiny(), tiny.random_batch()
    recipe = make_recipe("sum", ALL, known=model.objectives, seed=0)
    single = PretrainingLoss(model=model, recipe=recipe, mask_probability=0.4)(batch, update=0, generator=generator(2))
    off = RampParams(start=0.0, end=0.0)
    for scheme in ("a", "b"):
        both = two_pass(model, scheme, ramp=off)(batch, update=0, generator=generator(2)).parts
        for name in ("mlm", "moc", "msg"):
            assert torch.equal(both[name], single.parts[name])
            assert torch.equal(both[f"{name}_pass2"], single.parts[name])
        on = two_pass(model, scheme)(batch, update=0, generator=generator(2)).parts
        assert not torch.equal(on["msg_pass2"], single.parts["msg"])
    once = two_pass(model, "c", ramp=off)(batch, update=0, generator=generator(2))
    assert once.total.item() == pytest.approx(single.total.item(), rel=1e-12)


def test_c_goes_both_ways_on_tden() -> None:
    model, batch = tiny.build_tiny(), tiny.random_batch()
    for coin, first, second in ((True, "mlm", "msg"), (False, "msg", "mlm")):
        loss = two_pass(model, "c")(batch, update=0, generator=generator(seed_where(coin, model, batch)))
        assert {first, "ism", f"{second}_pass2"} <= set(loss.parts)
        assert not {second, f"{first}_pass2", "ism_pass2"} & set(loss.parts)


def test_the_generator_alone_decides() -> None:
    model, batch = tiny.build_tiny(dropout=0.0), tiny.random_batch()
    totals = []
    for state, seed in ((1, 5), (2, 5), (1, 6)):
        torch.manual_seed(state)
        totals.append(two_pass(model, "a")(batch, update=0, generator=generator(seed)).total)
    assert torch.equal(totals[0], totals[1]) and not torch.equal(totals[0], totals[2])


@pytest.mark.parametrize(("scheme", "accumulate"), [("a", 1), ("c", 2)])
def test_killed_after_any_update_it_ends_the_same(toy: Toy, tmp_path: Path, scheme: str, accumulate: int) -> None:
    """Dropout, masking, sampling, C's coin and the ramp: all of them functions of the update."""
    ramp = RampParams(start=0.3, end=0.9, steps=5)

    def fit(work: Path, **more: Any) -> tuple[nn.Module, Any]:
        model = toy.model()
        loss = two_pass(model, scheme, ramp=ramp)
        return toy.fit(work, model, loss=loss, accumulate=accumulate, checkpoint_every_steps=1, **more)

    whole, result = fit(tmp_path / "whole")
    for step in (2, result.steps):
        work = tmp_path / f"killed-{step}"
        with pytest.raises(InterruptedError):
            fit(work, tracker=KilledAt(work, step))
        torch.manual_seed(step)  # the state of the process must not matter
        resumed, after = fit(work)
        assert after.resumed_from == step
        assert same_weights(whole, resumed) and untimed(after.rows) == untimed(result.rows), f"killed after {step}"


# ---- What can't be -----------------------------------------------------------------------------------------------


class MatchesOnly(nn.Module):
    objectives = ("itc",)

    def pretraining_losses(self, *_: Any, **__: Any) -> dict[str, Loss]:
        return {}


def test_what_can_not_be_is_explained() -> None:
    with pytest.raises(ParamsError, match=r"scheme: b`: the model `tden` does not predict masked words by the pass"):
        two_pass(MatchesOnly(), "b", weights={"itc": 1.0})
    with pytest.raises(ParamsError, match=r"scheme: c`: the decoder of `tden` needs `msg`"):
        two_pass(Scripted(), "c", weights={"mlm": 1.0})
    with pytest.raises(ParamsError, match=r"scheme: a`: the encoder of `tden` needs `mlm`"):
        two_pass(Scripted(), "a", weights={"moc": 1.0, "msg": 1.0})
    with pytest.raises(ParamsError, match="names none that predicts masked words"):
        two_pass(Scripted(), "a", weights={"ism": 1.0})
    with pytest.raises(ParamsError, match="along 1: decoder; `scheme: a` fits"):
        two_pass(Scripted(word_paths={"decoder": ("msg",)}), "b", weights={"msg": 1.0})
    with pytest.raises(ParamsError, match=r"ramp\.end: 1\.5` must be a share"):
        two_pass(Scripted(), "a", ramp=RampParams(end=1.5))
    recipe = replace(make_recipe("sum", ALL, known=ALL, seed=0), mix="draw")
    with pytest.raises(ParamsError, match="it needs `mix: sum`, not draw"):
        make_two_pass_loss(
            Scripted(), recipe, name="x", mask_probability=0.1, scheme="a", sample="argmax", ramp=RampParams()
        )


def test_schedule_of_c_by_hand() -> None:
    paths = {"encoder": ("mlm", "moc"), "decoder": ("msg",)}
    plan = schedule("c", paths, ALL, coin=False)
    assert (plan.first, plan.second, plan.source) == ({"msg", "ism"}, {"mlm", "moc"}, {"encoder": "decoder"})
