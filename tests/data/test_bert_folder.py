"""Tokenizers of BERT's folders, and what becomes of texts in them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from bert_folders import VOCABULARY
from model_checks import encode
from tokenizers import BertWordPieceTokenizer

from vlp_models.data.bert_folder import read_tokenizer
from vlp_models.data.tokenizer import Tokenizer
from vlp_models.errors import DataError


def write_tokenizer(
    folder: Path, *, lowercase: bool = True, vocabulary: tuple[str, ...] = VOCABULARY
) -> dict[str, Any]:
    """tokenizer.json as Hugging Face's library writes it."""
    ids = {token: i for i, token in enumerate(vocabulary)}
    BertWordPieceTokenizer(ids, lowercase=lowercase).save(str(folder / "tokenizer.json"))
    return json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))


def write_vocab(folder: Path, vocabulary: tuple[str, ...] = VOCABULARY) -> None:
    (folder / "vocab.txt").write_text("\n".join(vocabulary) + "\n", encoding="utf-8")


def test_either_file_gives_the_tokenizer_and_both_must_agree(tmp_path: Path) -> None:
    write_vocab(tmp_path)
    by_lines = read_tokenizer(tmp_path, lowercase=True)
    write_tokenizer(tmp_path)
    both = read_tokenizer(tmp_path, lowercase=True)
    (tmp_path / "vocab.txt").unlink()
    by_json = read_tokenizer(tmp_path, lowercase=True)
    assert by_lines.vocabulary == both.vocabulary == by_json.vocabulary == VOCABULARY
    assert by_json.special_ids == (0, 3, 4, 5, 6)
    text = by_json.encode_batch(["Two cubes, red", ""], 16, whole_words=True)
    two, cube, s, comma, red = (VOCABULARY.index(token) for token in ("two", "cube", "##s", ",", "red"))
    assert text.ids_BT.tolist() == [[4, two, cube, s, comma, red, 5], [4, 5, 0, 0, 0, 0, 0]]
    assert text.word_BT is not None and text.word_BT[0].tolist() == [-1, 0, 1, 1, 2, 3, -1]
    write_vocab(tmp_path, (*VOCABULARY[:-1], "three"))
    with pytest.raises(DataError, match="have different vocabularies"):
        read_tokenizer(tmp_path, lowercase=True)


def test_case_and_accent_settings_of_the_folder_are_used(tmp_path: Path) -> None:
    write_tokenizer(tmp_path, lowercase=False)
    with pytest.raises(DataError, match=r"has lowercase false; set `tokenizer\.lowercase`"):
        read_tokenizer(tmp_path, lowercase=True)
    assert not read_tokenizer(tmp_path, lowercase=False).strips_accents
    settings = tmp_path / "tokenizer_config.json"
    settings.write_text(json.dumps({"do_lower_case": True, "strip_accents": False}), encoding="utf-8")
    tokenizer = read_tokenizer(tmp_path, lowercase=True)
    assert tokenizer.lowercase and not tokenizer.strips_accents and tokenizer.split("Ä") == ["ä"]
    tokenizer.save(tmp_path / "saved")
    assert Tokenizer.load(tmp_path / "saved").split("Ä") == ["ä"]
    settings.write_text(json.dumps({"do_lower_case": True, "tokenize_chinese_chars": False}), encoding="utf-8")
    with pytest.raises(DataError, match="tokenize_chinese_chars: false is not supported"):
        read_tokenizer(tmp_path, lowercase=True)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model": {"type": "BPE", "vocab": {}}}, r"not a tokenizer that the library tokenizers reads"),
        ({"normalizer": {"type": "NFC"}}, r"normalizer\.type is 'NFC'"),
        ({"pre_tokenizer": None}, r"pre_tokenizer\.type is None"),
        ({"added_tokens": [{"id": 26, "content": "covid", "special": False}]}, r"adds words .*\(covid\)"),
        (
            {"added_tokens": [{"id": 30, "content": "[NEW]", "special": True}]},
            "the ids of its 27 tokens are not 0 to 26",
        ),
    ],
)
def test_tokenizers_with_other_splitting_rules_are_refused(
    tmp_path: Path, change: dict[str, Any], message: str
) -> None:
    whole = write_tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text(json.dumps({**whole, **change}), encoding="utf-8")
    with pytest.raises(DataError, match=message):
        read_tokenizer(tmp_path, lowercase=True)


def test_missing_tokenizer_and_damaged_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"contains neither vocab\.txt nor Hugging Face's tokenizer\.json"):
        read_tokenizer(tmp_path, lowercase=True)
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(DataError, match=r"tokenizer\.json: not valid JSON"):
        read_tokenizer(tmp_path, lowercase=True)
    (tmp_path / "tokenizer.json").unlink()
    write_vocab(tmp_path, VOCABULARY[:4])
    with pytest.raises(DataError, match=r"special tokens \[CLS\], \[SEP\], \[MASK\] are missing"):
        read_tokenizer(tmp_path, lowercase=True)


def test_trimmed_tokenizer_splits_its_texts_as_before() -> None:
    whole = Tokenizer(VOCABULARY, lowercase=True)
    texts = ["two cubes", "it is a cube"]
    trimmed = whole.trimmed(texts)
    assert "green" not in trimmed.vocabulary and "[unused1]" not in trimmed.vocabulary
    assert trimmed.vocabulary[:5] == ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
    for text in texts:
        cut = [[t.vocabulary[i] for i in encode(t, text, 16)] for t in (whole, trimmed)]
        assert cut[0] == cut[1]
    assert trimmed.reproduce("abcd") == "abcd", "single characters stay, so other words can still be spelt"


SCRIPTS = [
    "Ein Bär läuft",
    "一只狗在雪地里",
    "कुत्ता दौड़ता है",
    "собака бежит",
    "개가 달린다",
    "كلب يجري",
    "がくせい",
    "สุนัขวิ่ง",
]


@pytest.mark.parametrize("caption", SCRIPTS)
def test_captions_of_any_script_survive_decoding(caption: str) -> None:
    tokenizer = Tokenizer.train([caption] * 3, 300, 1, False)
    assert tokenizer.decode(encode(tokenizer, caption, 128)) == caption
    kept = Tokenizer.train([caption] * 3, 300, 1, True, strip_accents=False)
    assert kept.decode(encode(kept, caption, 128)) == caption.lower()


def test_lowercase_keeps_hangul() -> None:
    tokenizer = Tokenizer.train(SCRIPTS, 500, 1, True)
    assert tokenizer.reproduce("개가 달린다") == "개가 달린다"


def test_zero_width_joiners_are_kept_by_a_vocabulary_that_has_them(tmp_path: Path) -> None:
    texts = ["سگی روی چمن می\u200cدود", "ශ්\u200dරී ලංකාව", "a\u00ad b\u200f c\ufeff"]  # the last: invisible, dropped
    kept = Tokenizer.train(texts, 300, 1, lowercase=True, strip_accents=False)
    kept.save(tmp_path)
    for tokenizer in (kept, Tokenizer.load(tmp_path)):
        assert [tokenizer.reproduce(text) for text in texts] == [*texts[:2], "a b c"]
    stripped = Tokenizer.train(texts, 300, 1, lowercase=True)
    assert "\u200c" not in stripped.reproduce(texts[0])


def test_turkish_capital_dotted_i_becomes_i(tmp_path: Path) -> None:
    texts = ["İki köpek İzmir'de", "I\u0307nce iki dal"]
    tokenizer = Tokenizer.train(texts, 300, 1, lowercase=True, strip_accents=False)
    tokenizer.save(tmp_path)
    assert [Tokenizer.load(tmp_path).split(text)[0] for text in texts] == ["iki", "ince"]
    with_dot = Tokenizer((*VOCABULARY, "i", "##\u0307"), lowercase=True, strip_accents=False)  # a Turkish BERT
    assert with_dot.split("İ") == ["i\u0307"]


def test_apostrophes_within_words_are_joined() -> None:
    texts = [
        "l'eau qu'il boit à l’aube, aujourd'hui",
        "la gente dell'acqua all'aperto",
        "the man’s dog isn't here",
        "a ' stop ' sign, it isn't ' new '",
    ]
    tokenizer = Tokenizer.train(texts, 300, 1, lowercase=False)
    assert [tokenizer.reproduce(text) for text in texts] == texts
