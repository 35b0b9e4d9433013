"""The three schemes on a model of hand-made predictions: what each pass reads and learns."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from two_pass_toys import ALL, generator, recipe_of, two_pass

from vlp_models.data.batch import Batch, Text
from vlp_models.errors import ParamsError
from vlp_models.models.protocols import MaskedPass
from vlp_models.objectives.loss import Loss
from vlp_models.objectives.masked_modeling import Corruption
from vlp_models.params import RampParams, ScheduledSamplingParams
from vlp_models.training.scheduled_sampling import make_loss

MASK = 4


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
        raise AssertionError("two passes ask for passes, never for the losses of one")

    def corrupt(self, batch, *, objectives, generator, mask_probability):
        words = torch.zeros_like(batch.text.mask_BT)
        words[0, 1] = words[0, 3] = words[1, 2] = True
        return Corruption(ids_BT=batch.text.ids_BT.masked_fill(words, MASK), words_BT=words)

    def encode_corrupted(self, batch, corruption):
        self.encoded += 1
        return "image"

    def masked_pass(self, batch, corruption, image, objectives, ids=None, after=None):
        assert image == "image"
        read = {path: (ids or {}).get(path, corruption.ids_BT).tolist() for path in self.word_paths}
        assert all(samples is None for samples in objectives.values())
        self.calls.append((set(objectives), read))
        # at position p the decoder predicts what follows p: for a masked word at p, look at p - 1
        after_BTV = torch.full((2, 5, 40), -50.0)
        for p in range(5):
            after_BTV[:, p, 10 + p + 1] = 50.0
        decoder = after_BTV[:, :-1][corruption.words_BT[:, 1:]]
        encoder = torch.full((3, 40), -50.0)
        encoder[range(3), [20, 21, 22]] = 50.0
        one = torch.ones((), requires_grad=True)
        losses = {name: Loss.of(one * 1.0, 1, **{name: one}) for name in objectives}
        return MaskedPass(losses=losses, word_logits={"encoder": encoder, "decoder": decoder})


def sentences() -> Batch:
    ids = torch.tensor([[2, 31, 32, 33, 3], [2, 34, 35, 3, 0]])
    return Batch(sample_ids=("a", "b"), image_ids=("a", "b"), image=None, text=Text(ids_BT=ids, mask_BT=ids > 0))  # type: ignore[arg-type]


S = [[2, MASK, 32, MASK, 3], [2, 34, MASK, 3, 0]]
S_E = [[2, 20, 32, 21, 3], [2, 34, 22, 3, 0]]
S_D = [[2, 11, 32, 13, 3], [2, 34, 12, 3, 0]]  # at p what the decoder predicted at p - 1


@pytest.mark.parametrize("sample", ["multinomial", "argmax"])
@pytest.mark.parametrize(
    ("scheme", "encoder_reads", "decoder_reads"), [("a", S_E, S_D), ("b", S_D, S_E)], ids=["eq. 1", "eq. 2"]
)
def test_schemes_a_and_b_repeat_all_objectives_but_matching(scheme, encoder_reads, decoder_reads, sample) -> None:
    model = Scripted()
    loss = two_pass(model, scheme, sample=sample)(sentences(), update=0, generator=generator())
    assert model.calls == [
        ({"mlm", "moc", "ism", "msg"}, {"encoder": S, "decoder": S}),
        ({"mlm", "moc", "msg"}, {"encoder": encoder_reads, "decoder": decoder_reads}),
    ]
    assert model.encoded == 1
    assert loss.mean.item() == 7.0
    assert set(loss.parts) == {"mlm", "moc", "ism", "msg", "mlm_pass2", "moc_pass2", "msg_pass2"}


def test_scheme_c_computes_each_objective_once() -> None:
    seen = []
    for seed in range(200):
        model = Scripted()
        loss = two_pass(model, "c")(sentences(), update=0, generator=generator(seed))
        assert loss.mean.item() == 4.0 and model.encoded == 1
        seen.append(model.calls)
    encoder_first = [({"mlm", "moc", "ism"}, {"encoder": S, "decoder": S}), ({"msg"}, {"encoder": S, "decoder": S_E})]
    decoder_first = [({"msg", "ism"}, {"encoder": S, "decoder": S}), ({"mlm", "moc"}, {"encoder": S_D, "decoder": S})]
    assert seen.count(encoder_first) + seen.count(decoder_first) == 200
    assert 70 < seen.count(encoder_first) < 130


def test_weights_apply_to_both_passes() -> None:
    weights = {"mlm": 2.0, "moc": 0.0, "ism": 5.0, "msg": 3.0}
    loss = two_pass(Scripted(), "a", weights=weights)(sentences(), update=0, generator=generator())
    assert loss.mean.item() == 2 * (2 + 3) + 5


def test_scheme_a_supports_a_single_path() -> None:
    model = Scripted()
    two_pass(model, "a", weights={"msg": 1.0, "ism": 1.0})(sentences(), update=0, generator=generator())
    assert [names for names, _ in model.calls] == [{"msg", "ism"}, {"msg"}]
    assert model.calls[1][1] == {"encoder": S, "decoder": S_D}


@pytest.mark.slow
def test_ramp_sets_the_share_of_replaced_words() -> None:
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


# ---- Invalid settings -----------------------------------------------------------------------------------------------


class MatchesOnly(nn.Module):
    objectives = ("itc",)

    def pretraining_losses(self, *_: Any, **__: Any) -> dict[str, Loss]:
        return {}


def test_invalid_settings_are_refused() -> None:
    with pytest.raises(ParamsError, match=r"scheme: b`: the model `tden` does not predict masked words in separate"):
        two_pass(MatchesOnly(), "b", weights={"itc": 1.0})
    with pytest.raises(ParamsError, match=r"scheme: c`: the decoder of `tden` needs `msg`"):
        two_pass(Scripted(), "c", weights={"mlm": 1.0})
    with pytest.raises(ParamsError, match=r"scheme: a`: the encoder of `tden` needs `mlm`"):
        two_pass(Scripted(), "a", weights={"moc": 1.0, "msg": 1.0})
    with pytest.raises(ParamsError, match=r"no objective in .* predicts masked words"):
        two_pass(Scripted(), "a", weights={"ism": 1.0})
    with pytest.raises(ParamsError, match="has 1: decoder; set `scheme: a`"):
        two_pass(Scripted(word_paths={"decoder": ("msg",)}), "b", weights={"msg": 1.0})
    with pytest.raises(ParamsError, match="set `mix: sum`, not sample"):
        make_loss(Scripted(), recipe_of(ALL, mix="sample"), ScheduledSamplingParams(scheme="a"), name="x")
