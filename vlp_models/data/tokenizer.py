"""Tokenizers: word pieces, trained on the corpus or read from a BERT's files, and those of other pretrained models.

Text is split as by BERT (Devlin et al., 2019): cleaned, optionally lower-cased and stripped of accents, split at white
space and punctuation, then each word into the longest pieces of the vocabulary. Special tokens never come from text:
"[SEP]" in a caption is a bracket, a word and a bracket.

`read_pretrained` reads Hugging Face's tokenizer.json (BPE, SentencePiece's Unigram, or any other). It serves every
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
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from tokenizers import Regex, normalizers
from tokenizers import Tokenizer as Engine
from tokenizers.models import BPE, WordPiece
from tokenizers.normalizers import BertNormalizer, Normalizer
from tokenizers.pre_tokenizers import BertPreTokenizer
from tokenizers.processors import TemplateProcessing
from tokenizers.trainers import BpeTrainer

from vlp_models.common.io import convert_command, write_json
from vlp_models.common.log import get_logger
from vlp_models.common.unicode_words import CHARACTERS, UNSPACED, unspaced_scripts
from vlp_models.errors import DataError, ParamsError, explain_system_error, first_line

if TYPE_CHECKING:
    from vlp_models.data.batch import Text

logger = get_logger(__name__)

FORMAT = "vlp-tokenizer/1"
PAD, UNK, CLS, SEP, MASK = SPECIAL_TOKENS = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
CONTINUATION = "##"
UNSPACED_PIECE = 8  # characters of a piece, if a script of the texts has no spaces between words: a word or two of Thai

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
    """Text to ids and back. Make one with `train`, `from_vocab`, `load` or `read_pretrained`."""

    def __init__(
        self,
        vocabulary: Sequence[str],
        *,
        lowercase: bool,
        strip_accents: bool | None = None,
        engine: Engine | None = None,
        special: Mapping[str, str] = NAMES,
    ) -> None:
        """Make a tokenizer.

        Args:
            vocabulary: tokens in the order of their ids, including the special tokens.
            strip_accents: None: same as `lowercase`, as in BERT.
            engine: splits and encodes texts (`read_pretrained`); None: BERT's word pieces.
            special: the special tokens; keys of `NAMES`.

        Raises:
            DataError: a token occurs twice, or a special token is missing.
        """
        self.vocabulary = tuple(vocabulary)
        self.vocab_size = len(self.vocabulary)
        self._ids = {token: i for i, token in enumerate(self.vocabulary)}
        if len(self._ids) != self.vocab_size:
            repeated = [token for token, n in Counter(self.vocabulary).items() if n > 1]
            raise DataError(f"vocabulary: {len(repeated)} duplicate tokens, such as {repeated[:3]}")
        missing = [token for token in special.values() if token not in self._ids]
        if missing:
            raise DataError(f"vocabulary: special tokens {', '.join(missing)} are missing; use a BERT's vocab.txt")
        self._names = special
        ids = {name: self._ids[token] for name, token in special.items()}
        self.cls_id, self.sep_id, self.pad_id = ids["cls"], ids["sep"], ids["pad"]
        self.unk_id = ids.get("unk")
        # None: the tokenizer has no [MASK], so no model can be trained on masked words
        self.mask_id = ids.get("mask")
        # ids that masking leaves unchanged and decoding leaves out
        self.special_ids = tuple(ids.values())
        # Where one token is [CLS] and [SEP], it reads as [SEP].
        self._id_names = {i: NAMES[name] for name, i in ids.items()} | {self.sep_id: SEP}
        self.lowercase = lowercase
        # one form per setting, so that equal tokenizers have equal files
        self._strip_accents = None if strip_accents is lowercase else strip_accents
        self.strips_accents = lowercase if strip_accents is None else strip_accents
        self._is_bert = engine is None
        if engine is None:
            # BERT has [UNK] for a word of more than 100 characters, and a caption in Thai may be one word.
            model = WordPiece(self._ids, unk_token=UNK, max_input_chars_per_word=1000)
            engine = _engine(model, _normalizer(lowercase, self._strip_accents, self.vocabulary))
        self._engine = engine

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

        A character or a merge needs at least `min_frequency` occurrences. If a script of the texts has no spaces
        between words, a merge needs two, and a piece has at most `UNSPACED_PIECE` characters. Memory grows with the
        distinct words; `texts` is iterated twice.
        """
        normalizer = _normalizer(lowercase, strip_accents)
        counts: Counter[str] = Counter()
        for text in texts:
            counts.update(normalizer.normalize_str(text))
        # most frequent first, ties by code point
        frequent = [c for c, n in counts.items() if n >= min_frequency and not c.isspace()]
        characters = sorted(frequent, key=lambda c: (-counts[c], c))
        # A word's first letter and its other letters ("##a") are different pieces: at most two per character.
        characters = characters[: max(0, (size - len(SPECIAL_TOKENS)) // 2)]
        # The trainer numbers "##a" pieces in the order of a randomly seeded hash map and breaks ties by number.
        # Listing them all beforehand makes training a function of the texts alone.
        named = [*SPECIAL_TOKENS, *(CONTINUATION + c for c in characters)]
        # Thai has no spaces between words, so a caption is one word: without limits it would become one piece.
        without_spaces = bool(unspaced_scripts("".join(characters)) - {"Han"})
        # The library's trainer of word pieces is this one, without a limit on their length.
        trainer = BpeTrainer(
            vocab_size=size,
            min_frequency=max(min_frequency, 2) if without_spaces else min_frequency,
            max_token_length=UNSPACED_PIECE if without_spaces else None,
            continuing_subword_prefix=CONTINUATION,
            special_tokens=named,
            initial_alphabet=characters,
            limit_alphabet=len(characters),
            show_progress=False,
        )
        engine = _engine(BPE(unk_token=UNK, continuing_subword_prefix=CONTINUATION), normalizer)
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
        vocabulary = read_vocabulary(Path(path))
        try:
            return cls(vocabulary, lowercase=lowercase, strip_accents=strip_accents)
        except DataError as error:
            raise DataError(f"{path}: {error}") from None

    @classmethod
    def load(cls, directory: Path | str) -> Tokenizer:
        """Read what `save` or `save_pretrained` wrote.

        Raises:
            DataError: the files are missing or damaged.
        """
        file = Path(directory) / FILE
        if not file.exists():
            raise DataError(f"{file}: no such file; run `dvc repro tokenizer`")
        settings = read_settings(file)
        # three kinds of file: of another pretrained model, `save_pretrained`'s, and `save`'s
        if "model" in settings and not (Path(directory) / "vocab.txt").exists():
            return read_pretrained(Path(directory))
        if isinstance(settings.get("normalizer"), dict):  # Hugging Face's format
            steps = settings["normalizer"].get("normalizers", [settings["normalizer"]])
            settings = {**steps[-1], "format": FORMAT}  # `_normalizer` has BERT's last
        if settings.get("format") != FORMAT:
            raise DataError(f"{file}: not tokenizer settings of format {FORMAT}")
        lowercase, accents = settings.get("lowercase"), settings.get("strip_accents")
        if not isinstance(lowercase, bool) or not isinstance(accents, bool | None):
            raise DataError(f"{file}: `lowercase` and `strip_accents` must be true or false")
        return cls.from_vocab(Path(directory) / "vocab.txt", lowercase, accents)

    def save(self, directory: Path | str) -> None:
        """Write the files that `load` reads; equal tokenizers give equal bytes.

        BERT's are vocab.txt and tokenizer.json with our settings; another model's, those of `save_pretrained`.
        """
        directory = Path(directory)
        directory.mkdir(parents=True, exist_ok=True)
        if not self._is_bert:
            self.save_pretrained(directory, None)
            return
        self._write_vocabulary(directory)
        settings = {"format": FORMAT, "lowercase": self.lowercase, "vocab_size": self.vocab_size}
        settings |= {} if self._strip_accents is None else {"strip_accents": self._strip_accents}
        (directory / FILE).write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")

    def save_pretrained(self, directory: Path, max_len: int | None) -> None:
        """Write tokenizer.json and tokenizer_config.json as `transformers.AutoTokenizer` reads them.

        It gives the ids of `encode_batch`: special tokens are added around a text and never found in one.
        """
        engine = self._engine
        if self._is_bert:
            # a copy: this tokenizer must not find special tokens in texts
            engine = Engine.from_str(engine.to_str())
            engine.add_special_tokens(list(SPECIAL_TOKENS))
            _add_template(engine, CLS, SEP)
            self._write_vocabulary(directory)
        engine.save(str(directory / FILE))
        write_json(
            directory / SETTINGS,
            {
                "tokenizer_class": "PreTrainedTokenizerFast",
                **{f"{name}_token": token for name, token in self._names.items()},
                **({} if max_len is None else {"model_max_length": max_len}),
                "split_special_tokens": True,
                "clean_up_tokenization_spaces": False,
            },
        )

    def _write_vocabulary(self, directory: Path) -> None:
        (directory / "vocab.txt").write_text("".join(f"{token}\n" for token in self.vocabulary), encoding="utf-8")

    def trimmed(self, texts: Iterable[str]) -> Tokenizer:
        """Return the tokenizer without the pieces that no text has.

        Special tokens and single characters are kept: `texts` are split as before, other texts at most into smaller
        pieces.

        Raises:
            ParamsError: it is not a BERT's.
        """
        if not self._is_bert:
            raise ParamsError(
                "params.yaml: `tokenizer.trim` removes a BERT's word pieces; this tokenizer has pieces that depend on "
                "each other: set it to false"
            )
        used: set[str] = set(SPECIAL_TOKENS)
        for text in texts:
            used.update(self._engine.encode(text, add_special_tokens=False).tokens)
        # Single characters stay, so that every word of known letters can still be split.
        tokens = [token for token in self.vocabulary if token in used or len(token.removeprefix(CONTINUATION)) == 1]
        return Tokenizer(tokens, lowercase=self.lowercase, strip_accents=self._strip_accents)

    def reproduce(self, text: str) -> str:
        """Return a text encoded and decoded: as a captioner trained on it can write it at best."""
        return self.decode(self.pieces(text))

    def pieces(self, text: str) -> list[int]:
        """Return the ids of a text without special tokens."""
        ids: list[int] = self._engine.encode(text, add_special_tokens=False).ids
        return ids

    def encode_batch(self, texts: Sequence[str], max_len: int, *, whole_words: bool = False) -> Text:
        """Encode each text as [CLS] w1 ... wn [SEP], padded to the longest; with `word_BT` if `whole_words`.

        A text longer than `max_len` is truncated but keeps [SEP].
        """
        import torch

        # [CLS] and [SEP] take two positions; params have at least that many.
        room = max_len - 2
        # One by one: the engine's batches start threads, which a loader's forked worker must not do.
        encoded = [self._engine.encode(text, add_special_tokens=False) for text in texts]
        text = self.pad([[self.cls_id, *e.ids[:room], self.sep_id] for e in encoded])
        text = dataclasses.replace(text, cut_B=torch.tensor([len(e.ids) > room for e in encoded], dtype=torch.bool))
        if not whole_words:
            return text
        word_BT = torch.full_like(text.ids_BT, -1)  # special tokens and padding belong to no word
        # pieces start behind [CLS]
        for row_T, e, written in zip(word_BT, encoded, texts, strict=True):
            words = e.word_ids
            if not self._is_bert:
                # by the last character: a piece may contain the space before a word
                starts = [start for start, _ in word_spans(written)]
                words = [max(0, bisect_right(starts, end - 1) - 1) for _, end in e.offsets]
            row_T[1 : 1 + len(words[:room])] = torch.tensor(words[:room], dtype=torch.int64)
        return dataclasses.replace(text, word_BT=word_BT)

    def pad(self, rows: Sequence[Sequence[int]]) -> Text:
        """Return rows of ids as a batch, padded to the longest."""
        import torch

        from vlp_models.data.batch import Text

        # [CLS] and [SEP] for a batch without texts
        width = max((len(row) for row in rows), default=2)
        # Padding everywhere, then each row's ids from the left.
        ids = np.full((len(rows), width), self.pad_id, dtype=np.int64)
        mask = np.zeros((len(rows), width), dtype=bool)
        for i, row in enumerate(rows):
            ids[i, : len(row)] = row
            mask[i, : len(row)] = True
        return Text(ids_BT=torch.from_numpy(ids), mask_BT=torch.from_numpy(mask))

    def decode(self, ids: Iterable[int]) -> str:
        """Return readable text up to the first [SEP]; special tokens, including [UNK], are left out.

        The text is composed (NFC): if accents are stripped, Hangul is split into single letters. A character that was
        cut off in the middle of its bytes is left out.
        """
        text_ids: list[int] = []
        for position, i in enumerate(map(int, ids)):
            # where one token is [CLS] and [SEP], the first is [CLS]
            if i == self.sep_id and (position or self.sep_id != self.cls_id):
                break
            if i not in self._id_names:
                text_ids.append(i)
        if self._is_bert:
            return unicodedata.normalize("NFC", _join(self.merge(text_ids)))
        # A character cut off in its bytes decodes to U+FFFD: leave it out at the ends.
        return unicodedata.normalize("NFC", self._engine.decode(text_ids, skip_special_tokens=True)).strip(" \ufffd")

    def split(self, text: str) -> list[str]:
        """Return the words of a text before they are split into pieces, including punctuation marks.

        A tokenizer without words returns those of the text as it writes it back.
        """
        engine = self._engine
        if not self._is_bert:
            return self.merge(self.pieces(text))
        assert engine.normalizer is not None
        assert engine.pre_tokenizer is not None
        return [word for word, _ in engine.pre_tokenizer.pre_tokenize_str(engine.normalizer.normalize_str(text))]

    def merge(self, ids: Iterable[int]) -> list[str]:
        """Return the words with these pieces.

        The result of `split`, if the vocabulary has them. Special tokens are kept.
        """
        words: list[str] = []
        if self._is_bert:
            for token in (self.vocabulary[i] for i in map(int, ids)):
                # A new word, or the next piece of the last one; "##" alone is a word of two signs.
                is_piece = token.startswith(CONTINUATION) and token != CONTINUATION
                if is_piece and words:
                    words[-1] += token[len(CONTINUATION) :]
                else:
                    words.append(token[len(CONTINUATION) :] if is_piece else token)
            return words
        # runs of text between special tokens
        for is_special, run in groupby(map(int, ids), key=self._id_names.__contains__):
            if is_special:
                words += [self._id_names[i] for i in run]
                continue
            text = self._engine.decode(list(run), skip_special_tokens=True)
            words += [text[start:end] for start, end in word_spans(text)]
        return words

    def matches(self, other: Tokenizer) -> bool:
        """Return whether models of this tokenizer can read the ids of another one."""
        if self._is_bert:
            return self.vocabulary == other.vocabulary
        # the rules that split a text, too: two BPEs may have the same pieces, but merge others first
        return self._names == other._names and self._engine.to_str() == other._engine.to_str()


def read_vocabulary(path: Path) -> list[str]:
    """Return the lines of a vocab.txt.

    Raises:
        DataError: the file is missing, or not UTF-8.
    """
    try:
        # the end of the last line begins no token
        lines = path.read_text(encoding="utf-8").removesuffix("\n").split("\n")
    except (FileNotFoundError, NotADirectoryError):
        raise DataError(f"{path}: no such file; give the path of a vocab.txt with one token per line") from None
    except UnicodeDecodeError:
        raise DataError(f"{path}: not UTF-8 text; save it as UTF-8: {convert_command(str(path))}") from None
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
        # Control, format and private-use characters and U+FFFD, except tab, line ends and both joiners.
        steps.append(normalizers.Replace(Regex("[[\\p{Cc}\\p{Cf}\\p{Co}\ufffd]&&[^\\t\\n\\r\u200c\u200d]]"), ""))
    if keeps_accents and lowercase and (pieces is None or "\u0307" not in pieces):
        # Capital dotted I, or an i of either case with a combining dot above.
        steps.append(normalizers.Replace(Regex("İ|[Ii]\u0307"), "i"))
    bert = BertNormalizer(
        clean_text=not keeps_joiners, handle_chinese_chars=True, strip_accents=strip_accents, lowercase=lowercase
    )
    return normalizers.Sequence([*steps, bert]) if steps else bert


def _engine(model: WordPiece | BPE, normalizer: Normalizer) -> Engine:
    engine = Engine(model)
    engine.normalizer = normalizer
    engine.pre_tokenizer = BertPreTokenizer()
    return engine


# Words that lose their last vowel before another word (French, Italian, Catalan): l'eau, qu'il, dell'acqua
_ELIDED = r"[cdjlmnst]|(?:jus|lors|puis|quel)?qu|aujourd|(?:a|da|de|ne|su|que)ll"


# Han characters, which BERT makes words, and the punctuation of Chinese and Japanese
_HAN = r"\u3001-\u3003\u3008-\u3011\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff\uff01-\uff1f\U00020000-\U0003ffff"


def _join(words: list[str]) -> str:
    """Join words and punctuation: "a t - shirt , isn ' t it ?" -> "a t-shirt, isn't it?"."""
    text = " ".join(words)
    text = re.sub(rf"(?<=[{_HAN}]) (?=[{_HAN}{UNSPACED}])|(?<=[{UNSPACED}]) (?=[{_HAN}])", "", text)
    # No space before closing marks (also those of Arabic, Hindi and Amharic), none after an opening bracket.
    text = re.sub(r" ([.,;:?!%)\]،؛؟।॥።፣])", r"\1", text)
    text = re.sub(r"([(\[]) ", r"\1", text)
    # isn't, l'eau, t-shirt
    text = re.sub(rf"(?<={CHARACTERS}) (['’]) (?=(?:s|t|re|ve|ll|d|m)(?!{CHARACTERS}))", r"\1", text)
    text = re.sub(rf"(?<!{CHARACTERS})(?<!['’])({_ELIDED}) (['’]) (?={CHARACTERS})", r"\1\2", text, flags=re.I)
    return re.sub(rf"(?<={CHARACTERS}) ([-/]) (?=\w)", r"\1", text)


def read_pretrained(folder: Path, special_tokens: Mapping[str, str] | None = None) -> Tokenizer:
    """Read tokenizer.json and tokenizer_config.json, as transformers' or our `save_pretrained` wrote them.

    Args:
        special_tokens: of `NAMES`; the others are those of the folder. Tokens that the vocabulary lacks are appended.

    Raises:
        DataError: a file is missing or damaged, or a needed special token is missing.
        ParamsError: `special_tokens` has an unknown key.
    """
    special_tokens = special_tokens or {}
    if unknown := sorted(set(special_tokens) - set(NAMES)):
        raise ParamsError(f"params.yaml: `tokenizer.special_tokens.{unknown[0]}`: unknown; known: {', '.join(NAMES)}")
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
    settings = {**read_settings(folder / OLD_SETTINGS), **read_settings(folder / SETTINGS)}
    special = {}
    for name, keys in _CANDIDATES.items():
        token = special_tokens.get(name, next(filter(None, (_content(settings.get(key)) for key in keys)), ""))
        if token:
            special[name] = token
    if missing := [name for name in ("cls", "sep", "pad") if name not in special]:
        needed = ", ".join(f"{name}: <{name}>" for name in missing)
        raise DataError(
            f"{folder}: names no {' and no '.join(missing)} token in {SETTINGS}; name them in params.yaml, such as "
            f"`tokenizer.special_tokens: {{{needed}}}`; a token that the vocabulary lacks is appended to it"
        )
    _adapt(engine, special, str(folder))
    # ids may have gaps; the vocabulary has a token for each
    tokens = {i: token for token, i in engine.get_vocab(with_added_tokens=True).items()}
    normalizer = engine.normalizer
    return Tokenizer(
        [tokens.get(i, f"<no token {i}>") for i in range(max(tokens) + 1)],
        # Probe the normalizer: it may be any sequence of steps.
        lowercase=normalizer is not None and normalizer.normalize_str("A").endswith("a"),
        strip_accents=normalizer is not None and normalizer.normalize_str("é").endswith("e"),
        engine=engine,
        special=special,
    )


def _adapt(engine: Engine, special: Mapping[str, str], where: str) -> None:
    """Make an engine encode each text alone, always with the same ids, and find no special token in it."""
    # padding, truncation and dropout are settings of the training of the other model
    engine.no_padding()
    engine.no_truncation()
    if isinstance(engine.model, BPE) and engine.model.dropout:
        logger.info(
            "%s: its BPE dropout (%.2g) is off, so that equal texts have equal ids", where, engine.model.dropout
        )
        engine.model.dropout = None
    engine.add_special_tokens(list(special.values()))
    engine.encode_special_tokens = True  # "</s>" in a caption is text
    # a normalizer that puts a space into a text's "</s>" where the model has it as a piece, as Unigrams do
    for name, token in special.items():
        if name != "unk" and engine.token_to_id(token) in engine.encode(token, add_special_tokens=False).ids:
            steps = [engine.normalizer] if engine.normalizer else []
            steps.append(normalizers.Replace(token, f"{token[0]} {token[1:]}"))
            engine.normalizer = normalizers.Sequence(steps)
    _add_template(engine, special["cls"], special["sep"])


def _add_template(engine: Engine, cls: str, sep: str) -> None:
    """Let transformers' AutoTokenizer add the special tokens of `encode_batch`."""
    ids = {token: engine.token_to_id(token) for token in (cls, sep)}
    engine.post_processor = TemplateProcessing(
        single=[cls, "$A", sep], pair=[cls, "$A", sep, "$B:1", f"{sep}:1"], special_tokens=list(ids.items())
    )


def word_spans(text: str) -> list[tuple[int, int]]:
    """Return start and end of each word and punctuation mark; a Chinese character is a word, as in BERT."""
    spans: list[tuple[int, int]] = []
    for _, (start, end) in BertPreTokenizer().pre_tokenize_str(text):
        for i in range(start, end):
            # Each Chinese character starts a word, and so does the character after one.
            if _is_chinese(text[i]) or i == start or _is_chinese(text[i - 1]):
                spans.append((i, i + 1))
            else:
                spans[-1] = (spans[-1][0], i + 1)
    return spans


def _is_chinese(character: str) -> bool:
    return unicodedata.name(character, "").startswith("CJK ")


def read_settings(file: Path) -> dict[str, Any]:
    """Return a JSON object; empty if the file does not exist."""
    try:
        value = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except OSError as error:
        raise DataError(explain_system_error(error)) from None
    except (ValueError, RecursionError) as error:
        raise DataError(f"{file}: not valid JSON: {error}") from None
    if not isinstance(value, dict):
        raise DataError(f"{file}: not a JSON object")
    return value


def _content(token: Any) -> str:
    """Return a token's text; Hugging Face writes it alone, or with how it is matched."""
    token = token.get("content") if isinstance(token, dict) else token
    return token if isinstance(token, str) else ""
