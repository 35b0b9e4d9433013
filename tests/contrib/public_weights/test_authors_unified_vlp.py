"""Unified VLP against numbers that its authors' code computed on the same weights and inputs.

They are in tests/golden/authors_unified_vlp.json (tests/golden/README.md names the code), from runs in float64. The
model is imported from the file that the authors' code would have saved.

Shape suffixes: B images, R regions, N texts, T tokens, V vocabulary, A answers, D hidden.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from authors_unified_vlp import (
    ANSWERS,
    CLS,
    COUNT_EPS,
    ENDS,
    HIDDEN,
    REGIONS,
    SAMPLES,
    SEP,
    SIDES,
    STEPS,
    answer_scores,
    batch,
    drawn,
    images,
    imported,
)
from torch import Tensor

from vlp_models.data.batch import Text
from vlp_models.models.convert import ImportedModel
from vlp_models.models.decoding.search import beam_search, greedy
from vlp_models.models.unified_vlp.masking import texts_by_path
from vlp_models.models.unified_vlp.model import UnifiedVLP
from vlp_models.objectives.generation import self_critical, sentence_generation
from vlp_models.objectives.loss import Loss, soft_label_answers
from vlp_models.objectives.masked_modeling import Corruption

FILE = Path(__file__).parents[2] / "golden" / "authors_unified_vlp.json"
THEIRS: dict[str, Any] = json.loads(FILE.read_text(encoding="utf-8"))


@pytest.fixture(params=[torch.float64, torch.float32], ids=["float64", "float32"])
def dtype(request: pytest.FixtureRequest) -> torch.dtype:
    wanted: torch.dtype = request.param
    return wanted


@pytest.fixture(scope="module")
def pretrained(tmp_path_factory: pytest.TempPathFactory) -> UnifiedVLP:
    return imported(tmp_path_factory.mktemp("pretrained"))[0]


@pytest.fixture(scope="module")
def answering(tmp_path_factory: pytest.TempPathFactory) -> tuple[UnifiedVLP, ImportedModel]:
    return imported(tmp_path_factory.mktemp("answering"), vqa=True)


def as_read(text: Text, rows: list[list[int]]) -> Tensor:
    """Return the ids with masks and random words of the authors' loader; the first [SEP] is [CLS] here."""
    return torch.nn.utils.rnn.pad_sequence([torch.tensor([CLS, *row]) for row in rows], batch_first=True) * text.mask_BT


def corruption(text: Text) -> Corruption:
    words_NT = torch.zeros_like(text.mask_BT)
    for row, places in enumerate(THEIRS["hidden"]):
        words_NT[row, places] = True
    return Corruption(ids_BT=as_read(text, THEIRS["read"]), words_BT=words_NT)


def learners() -> dict[str, Tensor | None]:
    of_sample = [objective for _, _, objective in SAMPLES]
    return {name: torch.tensor([o == name for o in of_sample]) for name in ("bidirectional", "seq2seq")}


def check(ours: Tensor, theirs: Any) -> None:
    """Compare within 1e-5; in float32 plus a millionth of the number, ten times its precision."""
    expected = torch.tensor(theirs, dtype=torch.float64)
    rtol = 0.0 if ours.dtype == torch.float64 else 1e-6
    torch.testing.assert_close(ours.detach().double(), expected, rtol=rtol, atol=1e-5)


# ---- What the tests of tests/golden/authors_unified_vlp.json look at ---------------------------------------------

LOOKED_AT = {"regions": (0, 7, 9, 99), "states": (0, 1, 8, 10)}  # of an image's rows
EVERY = {"words": 16, "answers": 300, "steps": 40}  # logits
DIMENSIONS = 6


def places_of_states(length: int) -> list[int]:
    """Return the places of [CLS], some regions, the first [SEP], the words and the last [SEP] in their layout."""
    return [*LOOKED_AT["states"], *range(1 + REGIONS, 2 + REGIONS + length)]


# ---- Tests -------------------------------------------------------------------------------------------------------


def test_regions(pretrained: UnifiedVLP, dtype: torch.dtype) -> None:
    found_BRD = pretrained.to(dtype).embed_regions(images(dtype))
    check(found_BRD[:, LOOKED_AT["regions"], :DIMENSIONS], THEIRS["regions"])


def test_states_and_losses_of_a_mixed_batch(pretrained: UnifiedVLP, dtype: torch.dtype) -> None:
    model, data, learn = pretrained.to(dtype), batch(dtype), learners()
    seen = corruption(data.text)
    image = model.encode_corrupted(data, seen)
    x_MD, packing = model.encode_rows(data, seen, image, texts_by_path(learn, data.text), {})
    order = torch.cat(list(texts_by_path(learn, data.text).values())).tolist()
    for states_LD, sample in zip(packing.pad(x_MD), order, strict=True):
        length = min(SAMPLES[sample][1], 20) + 1
        ours = [place + 2 * (place > REGIONS) for place in places_of_states(length)]  # two places of padding
        check(states_LD[ours, :DIMENSIONS], THEIRS["states"][sample])

    done = model.masked_pass(data, seen, image, learn)
    for name, who_N in learn.items():
        rows = [row for sample, row in enumerate(THEIRS["word logits"]) if who_N is not None and who_N[sample]]
        check(done.word_logits[name][:, :: EVERY["words"]], [logits for row in rows for logits in row])
    total = torch.stack([loss.sum for loss in done.losses.values()]).sum()
    mean = total / (sum(loss.count for loss in done.losses.values()) + COUNT_EPS)
    check(mean, THEIRS["losses"]["mixed"])
    gradients = torch.autograd.grad(mean, list(model.parameters()), allow_unused=True)
    check(torch.stack([g.square().sum() for g in gradients if g is not None]).sum().sqrt(), THEIRS["gradient"])


@pytest.mark.parametrize("objective", ["bidirectional", "seq2seq"])
def test_single_objective(pretrained: UnifiedVLP, dtype: torch.dtype, objective: str) -> None:
    model, data = pretrained.to(dtype), batch(dtype)
    seen = corruption(data.text)
    done = model.masked_pass(data, seen, model.encode_corrupted(data, seen), {objective: None})
    check(as_theirs(done.losses[objective]), THEIRS["losses"][objective])


def test_captioning_on_masked_words(
    pretrained: UnifiedVLP, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The authors' code trains captioning as it pretrains seq2seq (captioning's option `targets: masked`)."""
    model, data = pretrained.to(dtype), batch(dtype)
    monkeypatch.setattr(model, "corrupt", lambda *_, **__: corruption(data.text))
    found = model.masked_words(data, generator=torch.Generator(), mask_probability=0.15)
    check(as_theirs(sentence_generation(*found)), THEIRS["losses"]["seq2seq"])


def as_theirs(loss: Loss) -> Tensor:
    return loss.sum / (loss.count + COUNT_EPS)


def test_number_of_masked_words(pretrained: UnifiedVLP) -> None:
    """In sentences of 1 to 20 words; the closing [SEP] is masked as often as a word."""
    lengths_N1 = torch.arange(1, 21)[:, None]
    mask_NT = torch.arange(22) < lengths_N1 + 2
    text = Text(ids_BT=torch.full((20, 22), 7) * mask_NT, mask_BT=mask_NT)
    data = replace(batch(torch.float32), text=text)
    generator, last = torch.Generator().manual_seed(0), 0
    for _ in range(40):
        seen = pretrained.corrupt(data, objectives={"seq2seq": None}, generator=generator, mask_probability=0.15)
        assert seen.words_BT.sum(1).tolist() == THEIRS["hidden of 1 to 20 words"]
        assert not seen.words_BT[:, 0].any()
        last += int(seen.words_BT[0, 2])
    assert 10 < last < 30, "a word alone is hidden in half of the cases, else the end"


def test_answers(answering: tuple[UnifiedVLP, ImportedModel], dtype: torch.dtype) -> None:
    """With a masked word of the question, as in training, and without one. Answer 0 is never given."""
    model, head = answering[0].to(dtype), answering[1].head
    data = batch(dtype)
    layer = torch.nn.Linear(2 * HIDDEN, ANSWERS).to(dtype)
    layer.load_state_dict(dict(head))
    logits = {}
    for name in ("answering", "training"):
        text = replace(data.text, ids_BT=as_read(data.text, THEIRS["questions"][name]))
        logits[name] = layer(model.fuse(data.image, text).pooled_BP)
        check(logits[name][:, :: EVERY["answers"]], THEIRS["answer logits"][name])
    assert (logits["answering"][:, 1:].argmax(1) + 1).tolist() == THEIRS["answers"]
    check(soft_label_answers(logits["training"], answer_scores().to(dtype)).mean, THEIRS["losses"]["vqa"])


def test_greedy_steps(pretrained: UnifiedVLP, dtype: torch.dtype) -> None:
    """One [MASK] at a time (the authors' code caches states, ours keys and values), and all in one pass."""
    model, image, words_BT = pretrained.to(dtype), images(dtype), torch.tensor(THEIRS["greedy"])
    state, token_B, steps = model.start(image, max_len=STEPS), torch.full((len(SIDES),), CLS), []
    for step in range(STEPS):
        logits_BV, state = model.step(token_B, state)
        steps.append(logits_BV)
        token_B = words_BT[:, step]
    logits_BTV = torch.stack(steps, 1)
    check(logits_BTV[..., :: EVERY["steps"]], THEIRS["step logits"])
    assert torch.equal(logits_BTV.argmax(-1), words_BT)

    ids_BT = torch.cat([torch.full((len(SIDES), 1), CLS), words_BT], 1)
    together_BTV = model.generation_logits(image, Text(ids_BT=ids_BT, mask_BT=torch.ones_like(ids_BT).bool()))
    check(together_BTV[:, :STEPS, :: EVERY["steps"]], THEIRS["step logits"])
    ends: dict[str, Any] = {"max_len": STEPS, "bos_id": CLS, "eos_id": SEP}
    assert [h.ids for h in greedy(model, image, **ends)] == [until_end(row) for row in words_BT.tolist()]


def until_end(ids: list[int]) -> list[int]:
    return ids[: ids.index(SEP)] if SEP in ids else ids


@pytest.mark.parametrize("beams", [2, 3, 5])
def test_beams(pretrained: UnifiedVLP, dtype: torch.dtype, beams: int) -> None:
    model, image, theirs = pretrained.to(dtype), images(dtype), THEIRS["beams"][str(beams)]
    ends: dict[str, Any] = {"max_len": STEPS, "bos_id": CLS, "eos_id": SEP, "beam_size": beams}
    assert model.stores_finished
    found = beam_search(model, image, set_aside=True, **ends)
    assert [h.ids for h in found] == [until_end(ids) for ids in theirs["ids"]]
    check(torch.tensor([h.score for h in found], dtype=dtype), theirs["scores"])
    if beams == 5:
        other = beam_search(model, image, **ends)
        assert [h.ids for h in other] != [h.ids for h in found], "finished ones that stay are lost in between"
        assert other[0].score < found[0].score - 1


@pytest.mark.parametrize("end", [False, True], ids=["none ends", "all end"])
def test_self_critical_loss(end: bool) -> None:
    """The authors' code counts one more token of each finished caption: the one drawn after its [SEP]."""
    tokens_NT, logits_NTV, advantage_N = drawn()
    last_N = torch.tensor(ENDS if end else [20] * 4)
    if end:
        tokens_NT[torch.arange(4), last_N] = SEP
    at_NT = torch.arange(21) <= last_N[:, None]
    advantage_NT = advantage_N[:, None].expand_as(at_NT)
    ours = self_critical(logits_NTV[at_NT], tokens_NT[at_NT], advantage_NT[at_NT])
    behind_NT = torch.arange(21) == last_N[:, None] + 1
    more = self_critical(logits_NTV[behind_NT], tokens_NT[behind_NT], advantage_NT[behind_NT])
    assert more.count == (3 if end else 0)
    check(
        (ours.sum + more.sum) / (ours.count + more.count),
        THEIRS["self-critical loss"]["all end" if end else "none ends"],
    )
