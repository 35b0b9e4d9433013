"""Tokenizers: word pieces, trained on the corpus or read from a BERT's files, and those of other pretrained models.

Text is split as by BERT (Devlin et al., 2019): cleaned, optionally lower-cased and stripped of accents, split at white
space and punctuation, then each word into the longest pieces of the vocabulary. Special tokens never come from text:
"[SEP]" in a caption is a bracket, a word and a bracket.

`PretrainedTokenizer` reads Hugging Face's tokenizer.json (BPE, SentencePiece's Unigram, or any other). It serves every
stage in the same way, with the same special tokens around a text, under the names that the pretrained model gave them:

    [CLS]   cls_token, else bos_token, else eos_token (GPT-2 has one token for both)
    [SEP]   sep_token, else eos_token
    [PAD]   pad_token, else that of [SEP]: padding is masked everywhere, whatever its id
    [UNK]   unk_token; byte-level tokenizers have none
    [MASK]  mask_token; models that are trained on masked words need it

`tokenizer.special_tokens` in params.yaml names others. One that the vocabulary lacks is appended to it.
"""

from __future__ import annotations

import dataclasses
import json
import re
import unicodedata
from bisect import bisect_right
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np
from tokenizers import Encoding, Regex, normalizers
from tokenizers import Tokenizer as Engine
from tokenizers.models import BPE, WordPiece
from tokenizers.normalizers import BertNormalizer, Normalizer
from tokenizers.pre_tokenizers import BertPreTokenizer
from tokenizers.processors import TemplateProcessing
from tokenizers.trainers import WordPieceTrainer

from vlp_models.common.io import convert_command, write_json
from vlp_models.common.log import get_logger
from vlp_models.common.unicode_words import CHARACTERS
from vlp_models.errors import DataError, ParamsError, first_line

if TYPE_CHECKING:
    from vlp_models.data.batch import Text

logger = get_logger(__name__)

FORMAT = "vlp-tokenizer/1"
PAD, UNK, CLS, SEP, MASK = SPECIAL_TOKENS = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
CONTINUATION = "##"

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


class Tokenizer:
    """Text to ids and back. Make one with `train`, `from_vocab` or `load`."""

    def __init__(self, vocabulary: Sequence[str], *, lowercase: bool, strip_accents: bool | None = None) -> None:
        """Make a tokenizer.

        Args:
            vocabulary: tokens in the order of their ids, including the five special tokens.
            strip_accents: None: same as `lowercase`, as in BERT.

        Raises:
            DataError: a token occurs twice, or a special token is missing.
        """
        self._tokens = tuple(vocabulary)
        self._ids = {token: i for i, token in enumerate(self._tokens)}
        if len(self._ids) != len(self._tokens):
            repeated = [token for token, n in Counter(self._tokens).items() if n > 1]
            raise DataError(f"vocabulary: {len(repeated)} duplicate tokens, such as {repeated[:3]}")
        missing = [token for token in SPECIAL_TOKENS if token not in self._ids]
        if missing:
            raise DataError(f"vocabulary: special tokens {', '.join(missing)} are missing; use a BERT's vocab.txt")
        self._special = {token: self._ids[token] for token in SPECIAL_TOKENS}
        self.lowercase = lowercase
        # one form per setting, so that equal tokenizers have equal files
        self.strip_accents = None if strip_accents is lowercase else strip_accents
        model = WordPiece(self._ids, unk_token=UNK, max_input_chars_per_word=100)
        self._engine = _engine(model, _normalizer(lowercase, self.strip_accents, self._tokens))

    @classmethod
    def train(
        cls,
        texts: Collection[str],
        size: int,
        min_frequency: int,
        lowercase: bool,
        strip_accents: bool | None = None,
    ) -> Tokenizer:
        """Train at most `size` pieces on `texts`; the same texts in any order give the same vocabulary.

        A character or a merge needs at least `min_frequency` occurrences. Memory grows with the distinct words; `texts`
        is iterated twice.
        """
        normalizer = _normalizer(lowercase, strip_accents)
        characters = _frequent_characters(texts, normalizer, min_frequency)
        # A word's first letter and its other letters ("##a") are different pieces: at most two per character.
        characters = characters[: max(0, (size - len(SPECIAL_TOKENS)) // 2)]
        # The trainer numbers "##a" pieces in the order of a randomly seeded hash map and breaks ties by number.
        # Listing them all beforehand makes training a function of the texts alone.
        named = [*SPECIAL_TOKENS, *(CONTINUATION + c for c in characters)]
        trainer = WordPieceTrainer(
            vocab_size=size,
            min_frequency=min_frequency,
            special_tokens=named,
            initial_alphabet=characters,
            limit_alphabet=len(characters),
            show_progress=False,
        )
        engine = _engine(WordPiece(unk_token=UNK), normalizer)
        engine.train_from_iterator(iter(texts), trainer)
        ids = engine.get_vocab(with_added_tokens=True)  # token -> id
        vocabulary = sorted(ids, key=ids.__getitem__)
        return cls(vocabulary, lowercase=lowercase, strip_accents=strip_accents)

    @classmethod
    def from_vocab(cls, path: Path | str, lowercase: bool, strip_accents: bool | None = None) -> Tokenizer:
        """Read a vocab.txt: one token per line, the line number is its id.

        Raises:
            DataError: the file is missing, not UTF-8, or lacks a special token.
        """
        try:
            return cls(read_vocabulary(Path(path)), lowercase=lowercase, strip_accents=strip_accents)
        except DataError as error:
            raise error if str(error).startswith(str(path)) else DataError(f"{path}: {error}") from None

    @classmethod
    def load(cls, directory: Path | str) -> Tokenizer:
        """Read what `save` or `save_pretrained` wrote, of this class or of `PretrainedTokenizer`.

        Raises:
            DataError: the files are missing or damaged.
        """
        file = Path(directory) / "tokenizer.json"
        try:
            settings = json.loads(file.read_text(encoding="utf-8"))
        except FileNotFoundError:
            raise DataError(f"{file}: no such file; run `dvc repro tokenizer`") from None
        except (ValueError, RecursionError) as error:
            raise DataError(f"{file}: not valid JSON: {error}") from None
        # three kinds of file: of another pretrained model, `save_pretrained`'s, and `save`'s
        if isinstance(settings, dict) and "model" in settings and not (Path(directory) / "vocab.txt").exists():
            return PretrainedTokenizer.load(directory)
        if isinstance(settings, dict) and isinstance(settings.get("normalizer"), dict):  # Hugging Face's format
            steps = settings["normalizer"].get("normalizers", [settings["normalizer"]])
            settings = {**steps[-1], "format": FORMAT}  # `_normalizer` has BERT's last
        if not isinstance(settings, dict) or settings.get("format") != FORMAT:
            raise DataError(f"{file}: not tokenizer settings of format {FORMAT}")
        if not isinstance(settings.get("lowercase"), bool):
            raise DataError(f"{file}: `lowercase` must be true or false, found {settings.get('lowercase')!r}")
        accents = settings.get("strip_accents")
        if accents is not None and not isinstance(accents, bool):
            raise DataError(f"{file}: `strip_accents` must be true or false, found {accents!r:.60}")
        return cls.from_vocab(Path(directory) / "vocab.txt", settings["lowercase"], accents)

    def save(self, directory: Path | str) -> None:
        """Write vocab.txt and tokenizer.json (the settings); equal tokenizers give equal bytes."""
        directory = Path(directory)
        directory.mkdir(parents=True, exist_ok=True)
        (directory / "vocab.txt").write_text("".join(f"{token}\n" for token in self._tokens), encoding="utf-8")
        settings = {"format": FORMAT, "lowercase": self.lowercase, "vocab_size": self.vocab_size}
        if self.strip_accents is not None:
            settings["strip_accents"] = self.strip_accents
        (directory / "tokenizer.json").write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")

    def save_pretrained(self, directory: Path, max_len: int) -> None:
        """Write vocab.txt, tokenizer.json and tokenizer_config.json as `transformers.AutoTokenizer` reads them.

        It gives the ids of `encode_batch`: special tokens are added around a text and never found in one.
        """
        # a copy: this tokenizer must not find special tokens in texts
        engine = Engine.from_str(self._engine.to_str())
        engine.add_special_tokens(list(SPECIAL_TOKENS))
        engine.post_processor = TemplateProcessing(
            single=f"{CLS} $A {SEP}",
            pair=f"{CLS} $A {SEP} $B:1 {SEP}:1",
            special_tokens=[(CLS, self.cls_id), (SEP, self.sep_id)],
        )
        engine.save(str(directory / "tokenizer.json"))
        (directory / "vocab.txt").write_text("".join(f"{token}\n" for token in self._tokens), encoding="utf-8")
        names = {"pad": PAD, "unk": UNK, "cls": CLS, "sep": SEP, "mask": MASK}
        write_json(
            directory / "tokenizer_config.json",
            {
                "tokenizer_class": "PreTrainedTokenizerFast",
                **{f"{name}_token": token for name, token in names.items()},
                "model_max_length": max_len,
                "split_special_tokens": True,
                "clean_up_tokenization_spaces": False,
            },
        )

    def trimmed(self, texts: Iterable[str]) -> Tokenizer:
        """Return the tokenizer without the pieces that no text has.

        Special tokens and single characters are kept: `texts` are split as before, other texts at most into smaller
        pieces.
        """
        used: set[str] = set(SPECIAL_TOKENS)
        for text in texts:
            used.update(self._engine.encode(text, add_special_tokens=False).tokens)
        tokens = [token for token in self._tokens if token in used or len(token.removeprefix(CONTINUATION)) == 1]
        return Tokenizer(tokens, lowercase=self.lowercase, strip_accents=self.strip_accents)

    def reproduce(self, text: str) -> str:
        """Return a text encoded and decoded: as a captioner trained on it can write it at best."""
        return self.decode(self._engine.encode(text, add_special_tokens=False).ids)

    def encode_batch(self, texts: Sequence[str], max_len: int, *, whole_words: bool = False) -> Text:
        """Encode each text as [CLS] w1 ... wn [SEP], padded to the longest; with `word_BT` if `whole_words`.

        A text longer than `max_len` is truncated but keeps [SEP].
        """
        import torch

        if max_len < 2:
            raise ValueError(f"max_len must fit [CLS] and [SEP]: {max_len}")
        room = max_len - 2
        # One by one: the engine's batches start threads, which a loader's forked worker must not do.
        encoded = [self._engine.encode(text, add_special_tokens=False) for text in texts]
        text = self._pad([[self.cls_id, *e.ids[:room], self.sep_id] for e in encoded])
        text = dataclasses.replace(text, cut_B=torch.tensor([len(e.ids) > room for e in encoded], dtype=torch.bool))
        if not whole_words:
            return text
        word_BT = torch.full_like(text.ids_BT, -1)  # special tokens and padding belong to no word
        # pieces start behind [CLS]
        for row_T, e, written in zip(word_BT, encoded, texts, strict=True):
            words = self._word_ids(e, written)[:room]
            row_T[1 : 1 + len(words)] = torch.tensor(words, dtype=torch.int64)
        return dataclasses.replace(text, word_BT=word_BT)

    def _word_ids(self, encoding: Encoding, text: str) -> list[int]:
        """Return the word of each piece."""
        return cast(list[int], encoding.word_ids)  # no piece of a text is without a word

    def _pad(self, rows: Sequence[Sequence[int]]) -> Text:
        import torch

        from vlp_models.data.batch import Text

        # [CLS] and [SEP] for a batch without texts
        width = max((len(row) for row in rows), default=2)
        ids = np.full((len(rows), width), self.pad_id, dtype=np.int64)
        mask = np.zeros((len(rows), width), dtype=bool)
        for i, row in enumerate(rows):
            ids[i, : len(row)] = row
            mask[i, : len(row)] = True
        return Text(ids_BT=torch.from_numpy(ids), mask_BT=torch.from_numpy(mask))

    def encode_segments(self, texts: Sequence[Sequence[str]], max_len: int) -> Text:
        """Encode texts of several segments as [CLS] first [SEP] second [SEP] ...

        A text that is too long loses the ends of its longest segments.

        Raises:
            ValueError: `max_len` does not fit [CLS] and each segment's [SEP].
        """
        import torch

        rows, starts, cut = [], [], []
        for segments in texts:
            room = max_len - 1 - len(segments)
            if room < 0:
                raise ValueError(f"max_len must fit [CLS] and {len(segments)} [SEP]: {max_len}")
            pieces = [self._engine.encode(segment, add_special_tokens=False).ids for segment in segments]  # per segment
            last_length = len(pieces[-1])
            # shorten the longest segment, one piece at a time
            while sum(map(len, pieces)) > room:
                longest = max(range(len(pieces)), key=lambda i: len(pieces[i]))
                pieces[longest] = pieces[longest][:-1]
            rows.append([self.cls_id, *(i for ids in pieces for i in (*ids, self.sep_id))])
            cut.append(len(pieces[-1]) < last_length)
            # where the last segment starts; behind the row if it is the only one
            starts.append(len(rows[-1]) - (len(pieces[-1]) + 1 if len(pieces) > 1 else 0))
        text = self._pad(rows)
        is_last_BT = torch.arange(text.ids_BT.shape[1]) >= torch.tensor(starts)[:, None]
        cut_B = torch.tensor(cut, dtype=torch.bool)
        return dataclasses.replace(text, last_segment_BT=text.mask_BT & is_last_BT, cut_B=cut_B)

    def decode(self, ids: Iterable[int]) -> str:
        """Return readable text up to the first [SEP]; special tokens, including [UNK], are left out.

        The text is composed (NFC): if accents are stripped, Hangul is split into single letters.
        """
        words: list[str] = []
        special = set(self.special_ids)
        for i in map(int, ids):
            if i == self.sep_id:
                break
            if i in special:
                continue
            _append(words, self._tokens[i])
        return unicodedata.normalize("NFC", _join(words))

    def split(self, text: str) -> list[str]:
        """Return the words of a text before they are split into pieces, including punctuation marks."""
        engine = self._engine
        assert engine.normalizer is not None
        assert engine.pre_tokenizer is not None
        return [word for word, _ in engine.pre_tokenizer.pre_tokenize_str(engine.normalizer.normalize_str(text))]

    def merge(self, ids: Iterable[int]) -> list[str]:
        """Return the words with these pieces.

        The result of `split`, if the vocabulary has them. Special tokens are kept.
        """
        words: list[str] = []
        for i in map(int, ids):
            _append(words, self._tokens[i])
        return words

    def matches(self, other: Tokenizer) -> bool:
        """Return whether models of this tokenizer can read the ids of another one."""
        return self.vocabulary == other.vocabulary

    def has_whole(self, word: str) -> bool:
        """Return whether a word of `split` is one piece."""
        return word in self._ids

    @property
    def strips_accents(self) -> bool:
        return self.lowercase if self.strip_accents is None else self.strip_accents

    @property
    def vocabulary(self) -> tuple[str, ...]:
        return self._tokens

    @property
    def vocab_size(self) -> int:
        return len(self._tokens)

    @property
    def pad_id(self) -> int:
        return self._special[PAD]

    @property
    def unk_id(self) -> int:
        return self._special[UNK]

    @property
    def cls_id(self) -> int:
        return self._special[CLS]

    @property
    def sep_id(self) -> int:
        return self._special[SEP]

    @property
    def mask_id(self) -> int | None:
        """The id of [MASK]; None: the tokenizer has none, so no model can be trained on masked words."""
        return self._special.get(MASK)

    @property
    def special_ids(self) -> tuple[int, ...]:
        """Return the ids that masking leaves unchanged and decoding leaves out."""
        return tuple(self._special.values())


def read_vocabulary(path: Path) -> list[str]:
    """Return the lines of a vocab.txt.

    Raises:
        DataError: the file is missing, or not UTF-8.
    """
    try:
        lines = path.read_text(encoding="utf-8").split("\n")
    except (FileNotFoundError, NotADirectoryError):
        raise DataError(f"{path}: no such file; give the path of a vocab.txt with one token per line") from None
    except UnicodeDecodeError:
        raise DataError(f"{path}: not UTF-8 text; save it as UTF-8: {convert_command(str(path))}") from None
    if lines and not lines[-1]:
        # the end of the last line begins no token
        lines.pop()
    return [line.removesuffix("\r") for line in lines]


def _normalizer(lowercase: bool, strip_accents: bool | None, vocabulary: Iterable[str] | None = None) -> Normalizer:
    """Return BERT's normalizer, which drops zero-width joiners and lower-cases "İ" to "i" and a combining dot.

    If accents are kept, joiners are kept as well (Persian, Sinhala and Malayalam spell with them), and "İ" becomes the
    "i" of Turkish. Joiners that the `vocabulary` lacks are dropped, and a combining dot that it has is used.

    Args:
        vocabulary: None: to train one.
    """
    pieces = None if vocabulary is None else "".join(vocabulary)
    # None: as `lowercase`, as in BERT
    keeps_accents = not (lowercase if strip_accents is None else strip_accents)
    keeps_joiners = keeps_accents and (pieces is None or "\u200c" in pieces or "\u200d" in pieces)
    steps: list[Normalizer] = []
    if keeps_joiners:  # instead of `clean_text`
        steps.append(normalizers.Replace(Regex("[[\\p{Cc}\\p{Cf}\\p{Co}\ufffd]&&[^\\t\\n\\r\u200c\u200d]]"), ""))
    if keeps_accents and lowercase and (pieces is None or "\u0307" not in pieces):
        steps.append(normalizers.Replace(Regex("İ|[Ii]\u0307"), "i"))
    bert = BertNormalizer(
        clean_text=not keeps_joiners, handle_chinese_chars=True, strip_accents=strip_accents, lowercase=lowercase
    )
    return normalizers.Sequence([*steps, bert]) if steps else bert


def _engine(model: WordPiece, normalizer: Normalizer) -> Engine:
    engine = Engine(model)
    engine.normalizer = normalizer
    engine.pre_tokenizer = BertPreTokenizer()
    return engine


def _frequent_characters(texts: Iterable[str], normalizer: Normalizer, min_frequency: int) -> list[str]:
    """Return the characters of the normalized texts, most frequent first, ties by code point."""
    counts: Counter[str] = Counter()
    for text in texts:
        counts.update(normalizer.normalize_str(text))
    frequent = [c for c, n in counts.items() if n >= min_frequency and not c.isspace()]
    return sorted(frequent, key=lambda c: (-counts[c], c))


def _append(words: list[str], token: str) -> None:
    """Add a new word, or the next piece of the last one."""
    # "##" alone is a word of two signs
    if not token.startswith(CONTINUATION) or token == CONTINUATION:
        words.append(token)
    elif words:
        words[-1] += token[len(CONTINUATION) :]
    else:
        words.append(token[len(CONTINUATION) :])


# Words that lose their last vowel before another word (French, Italian, Catalan): l'eau, qu'il, dell'acqua
_ELIDED = r"[cdjlmnst]|(?:jus|lors|puis|quel)?qu|aujourd|(?:a|da|de|ne|su|que)ll"


def _join(words: list[str]) -> str:
    """Join words and punctuation: "a t - shirt , isn ' t it ?" -> "a t-shirt, isn't it?"."""
    text = " ".join(words)
    text = re.sub(r" ([.,;:?!%)\]])", r"\1", text)
    text = re.sub(r"([(\[]) ", r"\1", text)
    # isn't, l'eau, t-shirt
    text = re.sub(rf"(?<={CHARACTERS}) (['’]) (?=(?:s|t|re|ve|ll|d|m)(?!{CHARACTERS}))", r"\1", text)
    text = re.sub(rf"(?<!{CHARACTERS})(?<!['’])({_ELIDED}) (['’]) (?={CHARACTERS})", r"\1\2", text, flags=re.I)
    return re.sub(rf"(?<={CHARACTERS}) ([-/]) (?=\w)", r"\1", text)


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
        # padding, truncation and dropout are settings of the training of the other model
        engine.no_padding()
        engine.no_truncation()
        if isinstance(engine.model, BPE) and engine.model.dropout:
            logger.info(
                "%s: its BPE dropout (%.2g) is off, so that equal texts have equal ids", where, engine.model.dropout
            )
            engine.model.dropout = None
        engine.add_special_tokens([token for token in special.values() if token])
        engine.encode_special_tokens = True  # "</s>" in a caption is text
        # a normalizer that puts a space into a text's "</s>" where the model has it as a piece, as Unigrams do
        for name, token in special.items():
            if not token or name == "unk":
                continue
            if engine.token_to_id(token) in engine.encode(token, add_special_tokens=False).ids:
                steps = [engine.normalizer] if engine.normalizer else []
                steps.append(normalizers.Replace(token, f"{token[0]} {token[1:]}"))
                engine.normalizer = normalizers.Sequence(steps)
        self._engine = engine
        self._names = {name: token for name, token in special.items() if token}
        self._special = {NAMES[name]: cast(int, engine.token_to_id(token)) for name, token in self._names.items()}
        # ids may have gaps; the vocabulary has a token for each
        tokens = {i: token for token, i in engine.get_vocab(with_added_tokens=True).items()}
        self._tokens = tuple(tokens.get(i, f"<no token {i}>") for i in range(max(tokens) + 1))
        self._ids = {token: i for i, token in tokens.items()}
        normalizer = engine.normalizer
        self.lowercase = normalizer is not None and normalizer.normalize_str("A").endswith("a")
        self.strip_accents = normalizer is not None and normalizer.normalize_str("é").endswith("e")
        # so that transformers' AutoTokenizer adds the special tokens of `encode_batch`
        template_ids = {special["cls"]: self.cls_id, special["sep"]: self.sep_id}
        engine.post_processor = TemplateProcessing(
            single=[special["cls"], "$A", special["sep"]],
            pair=[special["cls"], "$A", special["sep"], "$B:1", f"{special['sep']}:1"],
            special_tokens=list(template_ids.items()),
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
        from_params = dict(special_tokens or {})
        if unknown := sorted(set(from_params) - set(NAMES)):
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
        # the newer file wins
        settings = {**_read_settings(folder / OLD_SETTINGS), **_read_settings(folder / SETTINGS)}
        from_settings = {}
        for name, keys in _CANDIDATES.items():
            candidates = [_content(settings.get(key)) for key in keys]
            from_settings[name] = next(filter(None, candidates), "")
        return cls(engine, {**from_settings, **from_params}, str(folder))

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

    def _word_ids(self, encoding: Encoding, text: str) -> list[int]:
        """Return the word of each piece by its last character: a piece may contain the space before a word."""
        starts = [start for start, _ in word_spans(text)]
        return [max(0, bisect_right(starts, end - 1) - 1) for _, end in encoding.offsets]

    def decode(self, ids: Iterable[int]) -> str:
        """Return the text up to the first [SEP], or the one after the first token; without special tokens.

        A character that was cut off in the middle of its bytes is left out.
        """
        text_ids: list[int] = []
        special = set(self._special.values())
        for position, i in enumerate(map(int, ids)):
            if i == self.sep_id and (position or self.sep_id != self.cls_id):
                break
            if i not in special:
                text_ids.append(i)
        return unicodedata.normalize("NFC", self._engine.decode(text_ids, skip_special_tokens=True)).strip(" \ufffd")

    def split(self, text: str) -> list[str]:
        """Return the words of a text as the tokenizer writes it back, including punctuation marks."""
        return self.merge(self._engine.encode(text, add_special_tokens=False).ids)

    def merge(self, ids: Iterable[int]) -> list[str]:
        names = {i: name for name, i in self._special.items()} | {self.sep_id: SEP}
        words: list[str] = []
        text_ids: list[int] = []  # since the last special token
        for i in [*map(int, ids), None]:  # None: the end
            if i is not None and i not in names:
                text_ids.append(i)
                continue
            text = self._engine.decode(text_ids, skip_special_tokens=True) if text_ids else ""
            words += [text[start:end] for start, end in word_spans(text)]
            text_ids = []
            if i is not None:
                words.append(names[i])
        return words

    def matches(self, other: Tokenizer) -> bool:
        """Also the rules that split a text must be equal: two BPEs may have the same pieces, but merge others first."""
        if not isinstance(other, PretrainedTokenizer):
            return False
        return self._special == other._special and self._engine.to_str() == other._engine.to_str()

    def has_whole(self, word: str) -> bool:
        # the piece of a word behind a space, which some tokenizers make a piece of its own
        pieces = self._engine.encode(f" {word}", add_special_tokens=False).tokens
        written = [piece for piece in pieces if piece not in ("▁", "Ġ")]
        return len(written) == 1 and self._ids[written[0]] != self._special.get(UNK)


def word_spans(text: str) -> list[tuple[int, int]]:
    """Return start and end of each word and punctuation mark; a Chinese character is a word, as in BERT."""
    spans: list[tuple[int, int]] = []
    for _, (start, end) in BertPreTokenizer().pre_tokenize_str(text):
        for i in range(start, end):
            if _is_chinese(text[i]) or i == start or _is_chinese(text[i - 1]):
                spans.append((i, i + 1))
            else:
                spans[-1] = (spans[-1][0], i + 1)
    return spans


def _is_chinese(character: str) -> bool:
    return unicodedata.name(character, "").startswith("CJK ")


def _read_settings(file: Path) -> dict[str, Any]:
    """Return a JSON object; empty if the file does not exist."""
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
