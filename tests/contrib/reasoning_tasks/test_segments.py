"""Texts of several segments in one row."""

from __future__ import annotations

import pytest
from model_checks import encode

from vlp_models.contrib.reasoning_tasks.segments import encode_segments
from vlp_models.data.tokenizer import Tokenizer

SENTENCE = "two zebras stand near the river"


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.train([SENTENCE, "a man"], 60, 1, lowercase=True)


def test_segments_end_in_sep_and_the_longest_is_truncated(tokenizer: Tokenizer) -> None:
    a, b = (encode(tokenizer, text, 64)[1:-1] for text in (SENTENCE, "a man"))
    cls, sep = tokenizer.cls_id, tokenizer.sep_id
    texts = [(SENTENCE, "a man"), ("a man", "", "a man")]
    whole = encode_segments(tokenizer, texts, 64)
    assert whole.ids_BT[0].tolist() == [cls, *a, sep, *b, sep]
    assert whole.ids_BT[1, : int(whole.mask_BT[1].sum())].tolist() == [cls, *b, sep, sep, *b, sep]
    assert whole.last_segment_BT is not None
    for i, segments in enumerate(texts):
        assert whole.ids_BT[i, whole.last_segment_BT[i]].tolist() == [*b, sep], segments
    cut = encode_segments(tokenizer, texts[:1], 8)
    assert cut.ids_BT[0].tolist() == [cls, *a[: 5 - len(b)], sep, *b, sep]
    assert encode_segments(tokenizer, [("a man",)], 8).ids_BT[0].tolist() == encode(tokenizer, "a man", 8)
    with pytest.raises(ValueError, match="2"):
        encode_segments(tokenizer, [("a", "b")], 2)


def test_a_truncated_last_segment_has_no_learned_end(tokenizer: Tokenizer) -> None:
    segments = encode_segments(tokenizer, [(SENTENCE, "a man"), ("a man", SENTENCE)], 8)
    assert segments.cut_B is not None and segments.cut_B.tolist() == [False, True]
