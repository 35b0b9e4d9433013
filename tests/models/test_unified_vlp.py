"""Unified VLP against the paper's formulas; its objectives: what is hidden, who learns what, and two passes."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
from tiny_unified_vlp import FACTS, MASK, VARIANTS, Slow, scored, tiny_unified_vlp
from two_pass_toys import generator, recipe_of

from vlp_models.data.batch import Batch, Regions, Text
from vlp_models.errors import CheckpointError, DataError, ParamsError
from vlp_models.models import build_model
from vlp_models.models.partial_load import load_partial
from vlp_models.models.unified_vlp.masking import mask_one_word, maskable
from vlp_models.objectives.masked_modeling import Corruption, select_number
from vlp_models.params import ScheduledSamplingParams
from vlp_models.training.scheduled_sampling import make_loss

NAMES = list(VARIANTS)
BOTH = {"bidirectional": None, "seq2seq": None}


@pytest.fixture
def batch(make_batch) -> Batch:
    return scored(make_batch())


def sentence(batch: Batch, i: int) -> list[int]:
    """The words and the closing [SEP]."""
    return batch.text.ids_BT[i, 1 : int(batch.text.mask_BT[i].sum())].tolist()


@pytest.mark.parametrize("name", NAMES)
def test_masked_words_are_predicted_by_the_papers_formulas(batch, name):
    model = tiny_unified_vlp(**VARIANTS[name])
    generator = torch.Generator().manual_seed(3)
    hidden = model.corrupt(batch, objectives=BOTH, generator=generator, mask_probability=0.4)
    with torch.no_grad():
        done = model.masked_pass(batch, hidden, model.encode_corrupted(batch, hidden), BOTH)
    slow, total = Slow(model), {"bidirectional": 0.0, "seq2seq": 0.0}
    rows = dict.fromkeys(total, 0)
    for i in range(len(batch)):
        words = hidden.ids_BT[i, 1 : int(batch.text.mask_BT[i].sum())].tolist()
        for path in total:
            states = slow.states(batch.image, i, words, path == "seq2seq")
            for place in hidden.words_BT[i].nonzero()[:, 0].tolist():
                logits = slow.word_logits(states[place - len(words) - 1])
                found = done.word_logits[path][rows[path]]
                np.testing.assert_allclose(found.numpy(), logits, atol=1e-10)
                total[path] += np.log(np.exp(logits).sum()) - logits[batch.text.ids_BT[i, place]]
                rows[path] += 1
    for path, loss in done.losses.items():
        assert loss.count == rows[path] == hidden.words_BT.sum()
        assert loss.sum.item() == pytest.approx(total[path], abs=1e-9)


@pytest.mark.parametrize("name", NAMES)
def test_mask_after_the_words_so_far_predicts_the_next_word(batch, name):
    """Teacher forcing of all words equals one run per word with a [MASK] in its place and nothing after it."""
    model = tiny_unified_vlp(**VARIANTS[name])
    with torch.no_grad():
        logits = model.generation_logits(batch.image, batch.text)
        some = batch.text.has_next_BT & (torch.arange(9) % 3 == 1)
        picked = model.generation_logits(batch.image, batch.text, some)
    torch.testing.assert_close(picked, logits[some], rtol=0, atol=1e-10)
    slow = Slow(model)
    for i in range(len(batch)):
        words = sentence(batch, i)
        for t in range(len(words) + 1):
            state = slow.states(batch.image, i, [*words[:t], MASK], True)[-1]
            np.testing.assert_allclose(logits[i, t].numpy(), slow.word_logits(state), atol=1e-10)


@pytest.mark.parametrize("name", NAMES)
def test_vqa_feature_is_cls_times_sep(batch, name):
    model = tiny_unified_vlp(**VARIANTS[name])
    with torch.no_grad():
        pooled = model.fuse(batch.image, batch.text).pooled_BP
    assert pooled.shape == (4, model.fused_dim)
    slow = Slow(model)
    for i in range(len(batch)):
        states = slow.states(batch.image, i, sentence(batch, i), False)
        both = states[0] * states[int(batch.image.mask_BR[i].sum()) + 1]
        np.testing.assert_allclose(pooled[i].numpy(), np.maximum(slow.linear("fusion", both), 0), atol=1e-10)


def test_seq2seq_depends_on_earlier_words_and_bidirectional_on_all(batch):
    model = tiny_unified_vlp()
    words = torch.zeros_like(batch.text.mask_BT)
    words[:, 1] = True

    def predictions(ids):
        hidden = Corruption(ids_BT=ids, words_BT=words)
        return model.masked_pass(batch, hidden, model.encode_corrupted(batch, hidden), BOTH).word_logits

    for changed in range(1, 8):
        ids = batch.text.ids_BT.clone()
        ids[:, changed] = (ids[:, changed] + 1) % 30
        before, after = predictions(batch.text.ids_BT), predictions(ids)
        assert torch.equal(before["seq2seq"], after["seq2seq"]) is (changed > 1)
        assert not torch.allclose(before["bidirectional"][0], after["bidirectional"][0])


def test_longest_text_trains(batch):
    """All `max_text` tokens, because nothing after the last one is predicted."""
    model = tiny_unified_vlp()
    generator, length = torch.Generator().manual_seed(2), model.config.max_text
    ids = torch.randint(5, 30, (4, length), generator=generator)
    text = Text(ids_BT=ids, mask_BT=torch.ones_like(ids, dtype=torch.bool))
    with torch.no_grad():
        logits = model.generation_logits(batch.image, text, text.has_next_BT).unflatten(0, (4, -1))
        short = Text(ids_BT=ids[:, :-1], mask_BT=text.mask_BT[:, :-1])
        torch.testing.assert_close(logits, model.generation_logits(batch.image, short), rtol=0, atol=1e-10)
    with pytest.raises(DataError, match="what follows the last"):
        model.generation_logits(batch.image, text, text.mask_BT)


def test_attention_dropout_in_steps(batch):
    """With a dropout of 1 in training, neither the image nor earlier words have an effect."""
    model = tiny_unified_vlp(attention_dropout=1.0)
    words = torch.full((4,), 7)
    for training in (False, True):
        logits = []
        for image, first in ((batch.image, 7), (batch.image.blanked(), 8)):
            state = model.eval().start(image, max_len=3)
            _, state = model.step(words, state)
            _, state = model.step(torch.full((4,), first), state)
            logits.append(model.train(training).step(words, state)[0])
        assert torch.allclose(*logits) is training


def test_partial_load_of_longer_tables():
    model, longer = tiny_unified_vlp(1), tiny_unified_vlp(2, max_positions=40)
    report = load_partial(longer, model.state_dict(), dataclasses.asdict(model.config))
    assert report.missing == ["text_embedding.positions.weight"] and not report.left_out
    assert torch.equal(longer.text_embedding.positions.weight[:32], model.text_embedding.positions.weight)
    with pytest.raises(CheckpointError, match="region_slots: 5 in the model, 7 in the weights"):
        load_partial(tiny_unified_vlp(region_slots=5), model.state_dict(), dataclasses.asdict(model.config))


def test_wrong_input_is_named(batch):
    model = tiny_unified_vlp()
    with pytest.raises(DataError, match="owner_N"):
        model.fuse(batch.image.select(torch.tensor([0, 1])), batch.text)
    plain = Regions(**{n: t for n, t in vars(batch.image).items() if n != "scores_BR"})
    with pytest.raises(DataError, match="ScoredRegions"):
        tiny_unified_vlp(compat_reference=True).fuse(plain, batch.text)


def test_sizes_equal_the_authors_model():
    """The authors' BERT-base with the VQA classifier has 121.93M weights, with BERT's pooler, six segments and
    3129 answers; here the answers' layer is the task's."""
    from dataclasses import replace

    facts = replace(FACTS, vocab_size=28996, mask_id=103, cls_id=101, sep_id=102, feature_dim=2048, num_classes=1601)
    with torch.device("meta"):
        model = build_model("unified_vlp", {"compat_reference": True}, facts)
    ours = sum(p.numel() for p in model.parameters())
    theirs = ours + (768 * 768 + 768) + 2 * 768 + (1536 * 3129 + 3129)
    assert theirs / 1e6 == pytest.approx(121.93, abs=0.005)


# ---- Objectives ----


def losses(model, batch, objectives=BOTH, seed=0, probability=0.4):
    return model.pretraining_losses(
        batch, objectives=objectives, generator=generator(seed), mask_probability=probability
    )


def text(*lengths: int, cut: tuple[int, ...] = ()) -> Text:
    mask = torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]
    is_cut = torch.tensor([i in cut for i in range(len(lengths))])
    return Text(ids_BT=torch.full(mask.shape, 9) * mask, mask_BT=mask, cut_B=is_cut if cut else None)


def test_number_of_masked_words():
    """Rounded, halves to even; at least one; at most the limit; the closing [SEP] is as likely as a word."""
    lengths = list(range(2, 40))
    sentences = text(*lengths)
    words = torch.tensor(lengths) - 2
    for probability, most in ((0.15, 3), (0.15, 0), (0.5, 0), (0.0, 3)):
        chosen = select_number(maskable(sentences), words, probability, generator(1), at_most=most)
        expected = [max(1, round(probability * n)) if probability else 0 for n in words.tolist()]
        expected = [min(n, most) if most else n for n in expected]
        assert chosen.sum(1).tolist() == expected
        assert not chosen[:, 0].any() and not (chosen & ~sentences.mask_BT).any()
    many = text(*[6] * 8000)
    counts = select_number(maskable(many), torch.full((8000,), 4), 0.15, generator(2)).sum(0).tolist()
    assert counts[0] == 0 and all(abs(n - 1600) < 4 * 36 for n in counts[1:])  # sqrt(8000 * 0.2 * 0.8) = 36


def test_end_of_a_cut_text_is_not_masked():
    sentences = text(5, 5, 3, cut=(0,))
    assert maskable(sentences).tolist() == [
        [False, True, True, True, False],
        [False, True, True, True, True],
        [False, True, True, False, False],
    ]


def test_mixed_batch_equals_the_two_objectives_on_its_parts(make_batch):
    batch, model = make_batch(6), tiny_unified_vlp()
    one = torch.tensor([True, False, True, True, False, False])
    drawn = losses(model, batch, {"bidirectional": one, "seq2seq": ~one})
    both = losses(model, batch)
    hidden = model.corrupt(batch, objectives=BOTH, generator=generator(), mask_probability=0.4)
    for path, own in (("bidirectional", one), ("seq2seq", ~one)):
        some = own.nonzero()[:, 0]
        part = batch.select(some)
        seen = Corruption(ids_BT=hidden.ids_BT[some], words_BT=hidden.words_BT[some])
        with torch.no_grad():
            alone = model.masked_pass(part, seen, model.encode_corrupted(part, seen), {path: None}).losses[path]
        assert drawn[path].count == alone.count
        torch.testing.assert_close(drawn[path].sum, alone.sum)
        assert drawn[path].count < both[path].count
    no_rows = torch.zeros(6, dtype=torch.bool)
    empty = losses(model, batch, {"bidirectional": no_rows, "seq2seq": ~no_rows})["bidirectional"]
    assert empty.count == 0 and empty.sum.item() == 0 and set(empty.parts) == set(drawn["bidirectional"].parts)
    empty.sum.backward()


def test_pretraining_counts(make_batch):
    batch = make_batch(6)
    one = torch.tensor([True, False, True, True, False, False])
    model = tiny_unified_vlp(region_classes="pretext")
    asked = {"bidirectional": one, "seq2seq": ~one, "moc": one}
    found = losses(model, batch, asked, seed=4)
    counts = model.pretraining_counts(batch, objectives=asked, generator=generator(4), mask_probability=0.4)
    assert {name: int(n) for name, n in counts.items()} == {name: int(loss.count) for name, loss in found.items()}
    assert min(int(n) for n in counts.values()) > 0


def test_vocabulary_logits_of_masked_words_only(make_batch, monkeypatch):
    batch, model = make_batch(6), tiny_unified_vlp()
    seen = []
    monkeypatch.setattr(
        type(model.word_head),
        "forward",
        lambda self, x, w=None, old=type(model.word_head).forward: seen.append(len(x)) or old(self, x, w),
    )
    found = losses(model, batch)
    assert seen == [sum(int(loss.count) for loss in found.values())]
    assert seen[0] < batch.text.mask_BT.sum()


def test_every_weight_learns(make_batch):
    batch = make_batch()
    for overrides in ({}, {"region_classes": "pretext"}):
        model = tiny_unified_vlp(**overrides)
        found = losses(model, batch, dict.fromkeys(model.objectives))
        sum(loss.mean for loss in found.values()).backward()
        idle = {n for n, p in model.named_parameters() if p.grad is None or not p.grad.any()}
        assert idle == {"fusion.weight", "fusion.bias"}


def test_masked_region_classification(make_batch):
    batch = make_batch()
    with pytest.raises(ParamsError, match="`moc` needs `region_classes: pretext`"):
        losses(tiny_unified_vlp(), batch, {"moc": None})
    model = tiny_unified_vlp(region_classes="pretext")
    hidden = model.corrupt(batch, objectives={"moc": None}, generator=generator(), mask_probability=0.5)
    assert hidden.regions_BR.any() and torch.equal(hidden.ids_BT, batch.text.ids_BT), "no word is hidden for it"

    def moc(b: Batch) -> torch.Tensor:
        return model.masked_pass(b, hidden, model.encode_corrupted(b, hidden), {"moc": None}).losses["moc"].mean

    def with_features(change) -> Batch:
        features = torch.where(change[..., None], batch.image.features_BRF + 1, batch.image.features_BRF)
        return dataclasses.replace(batch, image=dataclasses.replace(batch.image, features_BRF=features))

    assert torch.equal(moc(with_features(hidden.regions_BR)), moc(batch)), "a hidden region is out of sight"
    assert not torch.equal(moc(with_features(~hidden.regions_BR & batch.image.mask_BR)), moc(batch))


def test_captioning_on_masked_words_equals_seq2seq(make_batch):
    batch, model = make_batch(), tiny_unified_vlp()
    logits, targets = model.masked_words(batch, generator=generator(3), mask_probability=0.4)
    found = losses(model, batch, {"seq2seq": None}, seed=3)["seq2seq"]
    assert len(targets) == found.count
    torch.testing.assert_close(torch.nn.functional.cross_entropy(logits, targets), found.mean)


def test_training_masks_a_word_of_each_question(make_batch):
    batch, model = make_batch(), tiny_unified_vlp(mask_question=True)
    torch.manual_seed(0)
    many = batch.text.select(torch.zeros(4000, dtype=torch.int64))
    changed = mask_one_word(many, model.config) != many.ids_BT
    assert changed.sum(1).max() == 1 and not changed[:, 0].any()
    share = changed.double().mean(0)[1:]
    assert share.sum().item() == pytest.approx(0.9 - 0.1 / 25, abs=0.03) and share.min() > 0.07
    plain = model.fuse(batch.image, batch.text).pooled_BP
    assert torch.equal(plain, model.fuse(batch.image, batch.text).pooled_BP), "not while it is scored"
    model.train()
    assert not torch.equal(plain, model.fuse(batch.image, batch.text).pooled_BP)


@pytest.mark.parametrize("scheme", ["a", "b", "c"])
def test_two_passes(make_batch, scheme):
    """The second pass reads the first one's predictions in place of masked words; the targets are the same."""
    batch, model = make_batch(), tiny_unified_vlp()
    recipe = recipe_of({"bidirectional": 1.0, "seq2seq": 1.0}, mask_probability=0.4)
    loss = make_loss(model, recipe, ScheduledSamplingParams(scheme=scheme, sample="argmax"), name="u")
    parts = loss(batch, update=5, generator=generator(1)).parts
    if scheme == "c":
        again = {name.removesuffix("_pass2") for name in parts if name.endswith("_pass2")}
        assert again in ({"bidirectional", "bidirectional_accuracy"}, {"seq2seq", "seq2seq_accuracy"})
        return
    hidden = model.corrupt(batch, objectives=BOTH, generator=generator(1), mask_probability=0.4)
    image = model.encode_corrupted(batch, hidden)
    first = model.masked_pass(batch, hidden, image, BOTH)
    for path, other in (("bidirectional", "seq2seq"), ("seq2seq", "bidirectional")):
        ids = hidden.ids_BT.clone()
        ids[hidden.words_BT] = first.word_logits[path if scheme == "a" else other].argmax(-1)
        expected = model.masked_pass(batch, hidden, image, {path: None}, {path: ids}).losses[path]
        torch.testing.assert_close(parts[f"{path}_pass2"].mean, expected.mean.detach())
        torch.testing.assert_close(parts[path].mean, first.losses[path].mean.detach())
