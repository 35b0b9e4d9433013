"""Words keep their combining marks in every script, with and without Java, and a score states what it counts."""

from __future__ import annotations

import shutil
import unicodedata
from pathlib import Path

import pytest

from vlp_models.common.unicode_words import split_words
from vlp_models.curation.duplicates.leakage import compare_sentences
from vlp_models.data.tokenizer import _join
from vlp_models.metrics.caption import CaptionSet, score_caption_sets
from vlp_models.metrics.coco_tools import ptb_like, tokenize, tokenize_captions
from vlp_models.metrics.score import Score

SPACED = [  # words are between spaces
    "पीला कुत्ता घास पर",  # Hindi
    "একটি কুকুর দৌড়ায়",  # Bengali
    "ஒரு நாய் ஓடுகிறது",  # Tamil
    "ನಾಯಿ ಹುಲ್ಲು ಮೇಲೆ",  # Kannada
    "କୁକୁର ଘାସ ଉପରେ",  # Odia
    "බල්ලා තණකොළ මත",  # Sinhala
    "മലയാളം ക്ഷേത്രം",  # Malayalam
    "ਕੁੱਤਾ ਦੌੜਦਾ",  # Punjabi
    "كَلْبٌ يَجْرِي",  # Arabic with vowel signs
    "שָׁלוֹם כֶּלֶב",  # Hebrew with points
    "سگ می\u200cدود",  # Persian, with a joiner within a word
    "ශ්\u200dරී ලංකා",
    "개가 달린다",
    "𝗮 𝗱𝗼𝗴 𝗿𝘂𝗻𝘀",
    "𞤀𞤣𞤤𞤢𞤥 𞤀𞤣𞤤𞤢𞤥",  # Adlam
    "a dog 😀 runs 👨\u200d👩\u200d👧 🇩🇪 👍🏽",
]
UNSPACED = [
    ("สุนัขวิ่ง", "สุ นั ข วิ่ ง", "Thai"),
    ("សត្វ ឆ្កែ", "ស ត្ វ ឆ្ កែ", "Khmer"),
    ("ခွေး", "ခွေး", "Myanmar"),
    ("ꦱꦺꦒ", "ꦱꦺ ꦒ", "Javanese"),
    ("一只狗。", "一 只 狗", "Han"),
    ("犬が走る、a cat", "犬 が 走 る a cat", "Han, Hiragana"),
    ("𠮷野家", "𠮷 野 家", "Han"),
    ("མི་དམར།", "མི དམར", "Tibetan"),
]
MODES = [pytest.param(True, marks=pytest.mark.skipif(not shutil.which("java"), reason="java not found")), False]


@pytest.fixture
def java(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> bool:
    if not request.param:
        monkeypatch.setenv("PATH", str(tmp_path))
    return bool(request.param)


def score(candidates: dict[str, str], references: dict[str, list[str]]) -> dict[str, Score]:
    captions = CaptionSet(candidates=candidates, references=references)
    return {score.metric: score for score in score_caption_sets({"": captions})[""]}


@pytest.mark.parametrize("java", MODES, indirect=True)
def test_words_keep_every_letter_and_mark(java: bool) -> None:
    tokens, note = tokenize(SPACED)
    for text in SPACED:
        assert tokens[text].split() == unicodedata.normalize("NFC", text).lower().split()
    assert "no spaces between words" not in note


@pytest.mark.parametrize("java", MODES, indirect=True)
def test_scripts_without_spaces_are_split_into_characters_and_say_so(java: bool) -> None:
    tokenization = tokenize_captions([text for text, _, _ in UNSPACED])
    for text, tokens, script in UNSPACED:
        assert tokenization.tokens[text] == tokens
        note = tokenization.note([text])
        assert f"no spaces between words ({script})" in note
        assert "scored over characters" in note


@pytest.mark.parametrize("java", MODES, indirect=True)
def test_decomposed_accents_equal_composed_ones(java: bool) -> None:
    text = "un café très naïf"
    tokens, _ = tokenize([text, unicodedata.normalize("NFD", text)])
    assert set(tokens.values()) == {text}
    assert split_words(unicodedata.normalize("NFD", text)) == unicodedata.normalize("NFD", text).split()


@pytest.mark.skipif(not shutil.which("java"), reason="java not found")
def test_note_names_what_the_penn_treebank_tokenizer_drops() -> None:
    _, note = tokenize(["a dog", "ನಾಯಿ"])
    assert note == (
        "ptb-like tokenizer for 1 of 2 captions: the Penn Treebank tokenizer drops letters or symbols from them, such "
        "as U+0CBE KANNADA VOWEL SIGN AA"
    )
    assert tokenize(["the taste of ½ a café™ at 5° cost £3 (naïve)"])[1] == ""


@pytest.mark.slow
@pytest.mark.parametrize("java", MODES, indirect=True)
def test_scores_of_texts_without_spaces_are_noted(java: bool) -> None:
    references = {"1": ["一只狗在草地上跑"], "2": ["两只猫在睡觉"]}
    scores = score({"1": "一只狗在跑", "2": "a cat"}, references)
    for name in ("BLEU-1", "BLEU-4", "ROUGE-L", "CIDEr"):
        assert scores[name].value is not None and "2 of 2 captions have no spaces" in scores[name].note
    assert not java or "2 of 2 captions have no spaces" in scores["METEOR"].note


@pytest.mark.slow
@pytest.mark.skipif(not shutil.which("java"), reason="java not found")
def test_notes_depend_on_references_only() -> None:
    """Scores with different notes cannot be compared: a model must not be excluded for one emoji."""
    scores = score({"1": "a dog 😀"}, {"1": ["a dog"]})
    assert scores["CIDEr"].note == scores["METEOR"].note == ""
    hindi = score({"1": "a dog"}, {"1": ["पीला कुत्ता"]})
    assert hindi["CIDEr"].note == ""
    assert hindi["METEOR"].note.startswith("METEOR splits words with combining marks")


def test_stray_signs_of_no_width_are_no_words() -> None:
    assert ptb_like("a\u200b \u200edog\u200f \ufeffrun\u00adning \u200d \u200c") == "a dog running"
    assert ptb_like("❤️ ❤ 1️⃣") == "❤ ❤ 1⃣"


def test_sentences_that_differ_in_vowel_signs_are_not_equal_and_marks_are_joined() -> None:
    assert compare_sentences(["यह कि है"], ["यह की है"]) != ["equal"]
    assert compare_sentences(["यह कि है"], ["यह कि है"]) == ["equal"]
    assert _join(["कुत्ते", "-", "बिल्ली"]) == "कुत्ते-बिल्ली"
    assert _join(["cafe\u0301", "'", "s"]) == "cafe\u0301's"
