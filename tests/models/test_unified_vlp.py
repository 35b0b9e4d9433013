"""Unified VLP against the paper's formulas, and which outputs depend on which inputs."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
from tiny_unified_vlp import FACTS, MASK, VARIANTS, Slow, scored, tiny_unified_vlp

from vlp_models.data.batch import Batch, Regions, Text
from vlp_models.errors import CheckpointError, DataError
from vlp_models.models import build_model
from vlp_models.models.partial_load import load_partial
from vlp_models.objectives.masked_modeling import Corruption

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
