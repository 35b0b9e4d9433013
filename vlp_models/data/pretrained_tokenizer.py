"""A pretrained tokenizer in Hugging Face's format (tokenizer.json): BPE, SentencePiece's Unigram, or any other.

It serves every stage like the word pieces of tokenizer.py, with the same special tokens around a text, under the names
that the pretrained model gave them:

    [CLS]   cls_token, else bos_token, else eos_token (GPT-2 has one token for both)
    [SEP]   sep_token, else eos_token
    [PAD]   pad_token, else that of [SEP]: padding is masked everywhere, whatever its id
    [UNK]   unk_token; byte-level tokenizers have none
    [MASK]  mask_token; models that are trained on masked words need it

`tokenizer.special_tokens` in params.yaml names others. One that the vocabulary lacks is appended to it.
"""

from __future__ import annotations

import json
import unicodedata
from bisect import bisect_right
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, cast

from tokenizers import Encoding, normalizers
from tokenizers import Tokenizer as Engine
from tokenizers.pre_tokenizers import BertPreTokenizer
from tokenizers.processors import TemplateProcessing

from vlp_models.common.io import write_json
from vlp_models.data.tokenizer import CLS, MASK, PAD, SEP, UNK, Tokenizer
from vlp_models.errors import DataError, ParamsError, first_line

FILE, SETTINGS, OLD_SETTINGS = "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"
NAMES = {"pad": PAD, "unk": UNK, "cls": CLS, "sep": SEP, "mask": MASK}  # keys of `tokenizer.special_tokens`
# Hugging Face's names of the tokens, the first that is set counts
_CANDIDATES = {
    "cls": ("cls_token", "bos_token", "eos_token"),
    "sep": ("sep_token", "eos_token"),
    "pad": ("pad_token", "sep_token", "eos_token"),
    "unk": ("unk_token",),
    "mask": ("mask_token",),
}


class PretrainedTokenizer(Tokenizer):
    """Text to ids and back. Make one with `from_folder`."""

    def __init__(self, engine: Engine, special: Mapping[str, str], where: str) -> None:
        """
        Args:
            special: the token of each of `NAMES`; pad, cls and sep are needed. Unknown tokens are appended.
            where: the tokenizer's place, for messages.

        Raises:
            DataError: a needed special token is missing.
        """
        if missing := [name for name in ("cls", "sep", "pad") if not special.get(name)]:
            settings = ", ".join(f"{name}: <{name}>" for name in missing)
            raise DataError(
                f"{where}: names no {' and no '.join(missing)} token in {SETTINGS}; name them in params.yaml, such as "
                f"`tokenizer.special_tokens: {{{settings}}}`; a token that the vocabulary lacks is appended to it"
            )
        engine.no_padding()
        engine.no_truncation()
        engine.add_special_tokens([token for token in special.values() if token])
        engine.encode_special_tokens = True  # "</s>" in a caption is text
        _break_special_tokens(engine, [token for name, token in special.items() if token and name != "unk"])
        self._engine = engine
        self._names = {name: token for name, token in special.items() if token}
        self._special = {NAMES[name]: cast(int, engine.token_to_id(token)) for name, token in self._names.items()}
        ids = {i: token for token, i in engine.get_vocab(with_added_tokens=True).items()}
        self._tokens = tuple(ids.get(i, f"<no token {i}>") for i in range(max(ids) + 1))
        self._ids = {token: i for i, token in ids.items()}
        normalizer = engine.normalizer
        self.lowercase = normalizer is not None and normalizer.normalize_str("A").endswith("a")
        self.strip_accents = normalizer is not None and normalizer.normalize_str("é").endswith("e")
        # so that transformers' AutoTokenizer adds the special tokens of `encode_batch`
        around = {special["cls"]: self.cls_id, special["sep"]: self.sep_id}
        engine.post_processor = TemplateProcessing(
            single=[special["cls"], "$A", special["sep"]],
            pair=[special["cls"], "$A", special["sep"], "$B:1", f"{special['sep']}:1"],
            special_tokens=list(around.items()),
        )

    @classmethod
    def from_folder(cls, folder: Path, special_tokens: Mapping[str, str] | None = None) -> PretrainedTokenizer:
        """Read tokenizer.json and tokenizer_config.json, as transformers' `save_pretrained` or `save` below wrote them.

        Args:
            special_tokens: of `NAMES`; the others are those of the folder.

        Raises:
            DataError: a file is missing or damaged, or a needed special token is missing.
            ParamsError: `special_tokens` has an unknown key.
        """
        chosen = dict(special_tokens or {})
        if unknown := sorted(set(chosen) - set(NAMES)):
            raise ParamsError(
                f"params.yaml: `tokenizer.special_tokens.{unknown[0]}`: unknown; known: {', '.join(NAMES)}"
            )
        file = folder / FILE
        if not file.is_file():
            raise DataError(
                f"{file}: no such file; `transformers.AutoTokenizer.from_pretrained(FOLDER).save_pretrained(FOLDER)` "
                "writes it from a SentencePiece model or from BPE's vocabulary and merges"
            )
        try:
            engine = Engine.from_str(file.read_text(encoding="utf-8"))
        except Exception as error:  # the library raises plain exceptions
            raise DataError(f"{file}: not a tokenizer that the library tokenizers reads: {first_line(error)}") from None
        named = {**_read_settings(folder / OLD_SETTINGS), **_read_settings(folder / SETTINGS)}
        found = {
            name: next((content for key in keys if (content := _content(named.get(key)))), "")
            for name, keys in _CANDIDATES.items()
        }
        return cls(engine, {**found, **chosen}, str(folder))

    @classmethod
    def load(cls, directory: Path | str) -> PretrainedTokenizer:
        return cls.from_folder(Path(directory))

    def save(self, directory: Path | str) -> None:
        """Write tokenizer.json and tokenizer_config.json, which AutoTokenizer reads, too."""
        Path(directory).mkdir(parents=True, exist_ok=True)
        self.save_pretrained(Path(directory), None)

    def save_pretrained(self, directory: Path, max_len: int | None) -> None:
        self._engine.save(str(directory / FILE))
        limit = {} if max_len is None else {"model_max_length": max_len}
        write_json(
            directory / SETTINGS,
            {
                "tokenizer_class": "PreTrainedTokenizerFast",
                **{f"{name}_token": token for name, token in self._names.items()},
                **limit,
                "split_special_tokens": True,
                "clean_up_tokenization_spaces": False,
            },
        )

    def trimmed(self, texts: Iterable[str]) -> Tokenizer:
        raise ParamsError(
            "params.yaml: `tokenizer.trim` removes a BERT's word pieces; this tokenizer has pieces that depend on each "
            "other: set it to false"
        )

    def find_unknown(self, text: str) -> tuple[int, list[str]]:
        encoding = self._engine.encode(text, add_special_tokens=False)
        spans, unknown = zip(encoding.ids, encoding.offsets, strict=True), self._special.get(UNK)
        return len(word_spans(text)), [text[start:end] for i, (start, end) in spans if i == unknown]

    def _word_ids(self, encoding: Encoding, text: str) -> list[int]:
        """Return the word of each piece by its last character: a piece may contain the space before a word."""
        starts = [start for start, _ in word_spans(text)]
        return [max(0, bisect_right(starts, end - 1) - 1) for _, end in encoding.offsets]

    def decode(self, ids: Iterable[int]) -> str:
        """Return the text up to the first [SEP], or the one after the first token; without special tokens.

        A character that was cut off in the middle of its bytes is left out.
        """
        kept: list[int] = []
        special = set(self._special.values())
        for place, i in enumerate(map(int, ids)):
            if i == self.sep_id and (place or self.sep_id != self.cls_id):
                break
            if i not in special:
                kept.append(i)
        return unicodedata.normalize("NFC", self._engine.decode(kept, skip_special_tokens=True)).strip(" \ufffd")

    def split(self, text: str) -> list[str]:
        """Return the words of a text as the tokenizer writes it back, including punctuation marks."""
        return self.merge(self._engine.encode(text, add_special_tokens=False).ids)

    def merge(self, ids: Iterable[int]) -> list[str]:
        names = {i: name for name, i in self._special.items()} | {self.sep_id: SEP}
        words: list[str] = []
        run: list[int] = []
        for i in [*map(int, ids), None]:
            if i is not None and i not in names:
                run.append(i)
                continue
            text = self._engine.decode(run, skip_special_tokens=True) if run else ""
            words += [text[start:end] for start, end in word_spans(text)]
            run = []
            if i is not None:
                words.append(names[i])
        return words

    def matches(self, other: Tokenizer) -> bool:
        """Also the rules that split a text must be equal: two BPEs may have the same pieces, but merge others first."""
        if not isinstance(other, PretrainedTokenizer):
            return False
        return self._special == other._special and self._engine.to_str() == other._engine.to_str()

    def has_whole(self, word: str) -> bool:
        pieces = self._engine.encode(f" {word}", add_special_tokens=False).tokens
        written = [piece for piece in pieces if piece not in ("▁", "Ġ")]
        return len(written) == 1 and self._ids[written[0]] != self._special.get(UNK)


def _break_special_tokens(engine: Engine, tokens: Iterable[str]) -> None:
    """Add a normalizer that puts a space into a text's "</s>" where the model has it as a piece, as Unigrams do."""
    for token in tokens:
        if engine.token_to_id(token) in engine.encode(token, add_special_tokens=False).ids:
            replace = normalizers.Replace(token, f"{token[0]} {token[1:]}")
            engine.normalizer = normalizers.Sequence([*([engine.normalizer] if engine.normalizer else []), replace])


def word_spans(text: str) -> list[tuple[int, int]]:
    """Return start and end of each word and punctuation mark; a Chinese character is a word, as in BERT."""
    spans: list[tuple[int, int]] = []
    for _, (start, end) in BertPreTokenizer().pre_tokenize_str(text):
        for place in range(start, end):
            if _is_chinese(text[place]) or place == start or _is_chinese(text[place - 1]):
                spans.append((place, place + 1))
            else:
                spans[-1] = (spans[-1][0], place + 1)
    return spans


def _is_chinese(character: str) -> bool:
    return unicodedata.name(character, "").startswith("CJK ")


def _read_settings(file: Path) -> dict[str, Any]:
    """Return a JSON object; empty if the file does not exist.

    Raises:
        DataError: not a JSON object.
    """
    try:
        value = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, RecursionError) as error:
        raise DataError(f"{file}: cannot be read: {error}") from None
    if not isinstance(value, dict):
        raise DataError(f"{file}: not a JSON object")
    return value


def _content(token: Any) -> str:
    """Return a token's text; Hugging Face writes it alone, or with how it is matched."""
    token = token.get("content") if isinstance(token, dict) else token
    return token if isinstance(token, str) else ""
