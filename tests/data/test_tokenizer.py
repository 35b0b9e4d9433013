from __future__ import annotations

import random
import subprocess
import sys
from pathlib import Path

import pytest
from model_checks import encode

from vlp_models.data.tokenizer import SPECIAL_TOKENS, Tokenizer
from vlp_models.errors import DataError

CORPUS = [
    "A man isn't riding a big red horse.",
    "two zebras, one of them in a t-shirt, stand near the river",
    "how many zebras are near the river (or in it)?",
] * 4


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.train(CORPUS, 200, 2, True)


def test_encode_adds_special_tokens_and_truncates(tokenizer: Tokenizer) -> None:
    ids = encode(tokenizer, "two zebras stand", 32)
    assert ids[0] == tokenizer.cls_id and ids[-1] == tokenizer.sep_id
    assert encode(tokenizer, "two zebras stand near the river", 4) == [*ids[:3], tokenizer.sep_id]
    assert encode(tokenizer, "", 8) == [tokenizer.cls_id, tokenizer.sep_id]
    assert tokenizer.unk_id in encode(tokenizer, "Ω", 8)


def test_special_tokens_never_come_from_text(tokenizer: Tokenizer) -> None:
    inner = encode(tokenizer, "a [SEP] b [MASK] [PAD] [CLS]", 64)[1:-1]
    specials = set(tokenizer.special_ids) - {tokenizer.unk_id}
    assert len(inner) > 4 and not specials & set(inner)


def test_decode_restores_text_and_stops_at_sep(tokenizer: Tokenizer) -> None:
    for text in CORPUS[:3]:
        assert tokenizer.decode(encode(tokenizer, text, 64)) == text.lower()
    end = [tokenizer.sep_id, *encode(tokenizer, "zebras", 8), tokenizer.pad_id]
    assert tokenizer.decode([*encode(tokenizer, "a river", 8)[:-1], tokenizer.mask_id, *end]) == "a river"


def test_batch_is_padded_and_masked(tokenizer: Tokenizer) -> None:
    text = tokenizer.encode_batch(["a man", "two zebras stand near the river", ""], 6)
    assert text.ids_BT.shape == (3, 6) and str(text.ids_BT.dtype) == "torch.int64"
    assert (text.ids_BT == tokenizer.pad_id).equal(~text.mask_BT)
    assert text.mask_BT.sum(1).tolist() == [4, 6, 2]
    assert text.ids_BT[1, -1] == tokenizer.sep_id


def test_save_and_load_round_trip(tokenizer: Tokenizer, tmp_path: Path) -> None:
    tokenizer.save(tmp_path / "a")
    loaded = Tokenizer.load(tmp_path / "a")
    loaded.save(tmp_path / "b")
    for file in ("vocab.txt", "tokenizer.json"):
        assert (tmp_path / "a" / file).read_bytes() == (tmp_path / "b" / file).read_bytes()
    assert loaded.vocabulary == tokenizer.vocabulary
    assert encode(loaded, CORPUS[1], 32) == encode(tokenizer, CORPUS[1], 32)


def test_training_is_the_same_in_every_process_and_order(tmp_path: Path) -> None:
    """Random words, so that merges tie all the time."""
    rng = random.Random(3)
    words = ["".join(rng.choices("abcdefghij", k=rng.randint(1, 7))) for _ in range(300)]
    texts = [" ".join(rng.choices(words, k=8)) for _ in range(300)]
    script = (
        "import sys, random; from vlp_models.data.tokenizer import Tokenizer\n"
        "texts = open(sys.argv[1]).read().splitlines(); random.shuffle(texts)\n"
        "print('\\n'.join(Tokenizer.train(texts, 400, 2, True).vocabulary))"
    )
    file = tmp_path / "texts"
    file.write_text("\n".join(texts), encoding="utf-8")
    outputs = [
        subprocess.run([sys.executable, "-c", script, file], check=True, capture_output=True, text=True).stdout
        for _ in range(2)
    ]
    here = Tokenizer.train(texts, 400, 2, True).vocabulary
    assert outputs[0].splitlines() == outputs[1].splitlines() == list(here)
    assert len(here) == 400 and here[:5] == SPECIAL_TOKENS


def test_case_and_accents_follow_lowercase() -> None:
    cased = Tokenizer.train(["Ein Bär"] * 3, 100, 1, False)
    assert cased.decode(encode(cased, "Ein Bär", 16)) == "Ein Bär"
    lower = Tokenizer.train(["Ein Bär"] * 3, 100, 1, True)
    assert lower.decode(encode(lower, "EIN BÄR", 16)) == "ein bar"


def test_reads_a_bert_vocabulary(tmp_path: Path) -> None:
    file = tmp_path / "vocab.txt"
    file.write_bytes(b"[PAD]\r\n[unused0]\r\n[UNK]\r\n[CLS]\r\n[SEP]\r\n[MASK]\r\nplay\r\n##ing\r\n")
    tokenizer = Tokenizer.from_vocab(file, lowercase=True)
    assert encode(tokenizer, "Playing", 8) == [3, 6, 7, 4]
    assert tokenizer.decode([3, 6, 7, 4]) == "playing"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"[PAD]\n[UNK]\n[CLS]\nword\n", r"vocab.txt: .*\[SEP\], \[MASK\] are missing"),
        ("\n".join([*SPECIAL_TOKENS, "x", "x"]).encode(), "duplicate tokens, such as .*x"),
        (b"[PAD]\n\xff\n", "not UTF-8"),
    ],
)
def test_bad_vocabularies_and_settings_are_refused(content: bytes, message: str, tmp_path: Path) -> None:
    (tmp_path / "vocab.txt").write_bytes(content)
    with pytest.raises(DataError, match=message):
        Tokenizer.from_vocab(tmp_path / "vocab.txt", lowercase=True)
    with pytest.raises(DataError, match=r"tokenizer\.json: no such file"):
        Tokenizer.load(tmp_path)
    for settings, problem in (
        ('{"version": "1.0"}', "not tokenizer settings"),
        ('{"format": "vlp-tokenizer/1", "lowercase": 1}', "must be true or false"),
    ):
        (tmp_path / "tokenizer.json").write_text(settings, encoding="utf-8")
        with pytest.raises(DataError, match=problem):
            Tokenizer.load(tmp_path)


def test_truncated_text_has_no_learned_end(tokenizer: Tokenizer) -> None:
    """Its [SEP] closes what a model reads. Generation must not learn that the text ended at that word."""
    sentence = "two zebras stand near the river"
    length = len(encode(tokenizer, sentence, 64))
    whole, cut = tokenizer.encode_batch([sentence, "a man"], length), tokenizer.encode_batch([sentence, "a man"], 6)
    assert whole.cut_B is not None and whole.cut_B.tolist() == [False, False]
    assert cut.cut_B is not None and cut.cut_B.tolist() == [True, False]
    assert int(cut.ids_BT[0, 5]) == tokenizer.sep_id
    for text, ends in ((whole, 2), (cut, 1)):
        targets = text.next_tokens(text.has_next_BT).tolist()
        assert targets.count(tokenizer.sep_id) == ends
    assert cut.has_next_BT.sum(1).tolist() == [4, int(cut.mask_BT[1].sum()) - 1]


def test_whole_words_are_marked_on_request(tokenizer: Tokenizer) -> None:
    text = tokenizer.encode_batch(["two zebras, near", "a"], 64, whole_words=True)
    assert tokenizer.encode_batch(["a"], 64).word_BT is None
    assert text.word_BT is not None
    words: dict[int, list[int]] = {}
    for word, piece in zip(text.word_BT[0].tolist(), text.ids_BT[0].tolist(), strict=True):
        words.setdefault(word, []).append(piece)
    assert [tokenizer.merge(words[i]) for i in range(4)] == [["two"], ["zebras"], [","], ["near"]]
    assert bool((text.word_BT[~text.mask_BT] == -1).all()) and text.word_BT[0, 0] == -1
    cut = tokenizer.encode_batch(["two zebras, near"], 4, whole_words=True)
    assert cut.word_BT is not None and cut.word_BT.shape == (1, 4)
