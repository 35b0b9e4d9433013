"""tokenizer: build the vocabulary of the texts, and the list of answers that VQA chooses from.

The vocabulary comes from the train split only; the answers come from train and val, as in VQA v2.

A vocabulary that does not fit a dataset or one of its languages stops the stage: its texts, encoded and decoded, are
scored against themselves by CIDEr-D.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from vlp_models.common.io import output_directory, scratch_directory, write_json
from vlp_models.common.log import get_logger
from vlp_models.common.packages import HUB, PREFIX
from vlp_models.common.workspace import Workspace, require_output, write_manifest
from vlp_models.data.answers import build_answer_vocabulary
from vlp_models.data.bert_folder import find_folder, read_tokenizer
from vlp_models.data.joins import Database, number_rows
from vlp_models.data.mapped import MappedValues
from vlp_models.data.tables import SCHEMAS, SPLITS, read_languages, stream_table
from vlp_models.data.tokenizer import Tokenizer
from vlp_models.data.views import TABLES
from vlp_models.errors import DataError, ParamsError
from vlp_models.metrics.bootstrap import MIN_GROUPS
from vlp_models.metrics.cider_d import CiderD, DocumentFrequencies
from vlp_models.metrics.coco_tools import ptb_like
from vlp_models.params import Params, TokenizerParams, to_plain

logger = get_logger(__name__)

OWN_VOCABULARY = "vlp use own-vocabulary"
SAMPLE = 1_000  # rows per dataset and column, evenly spread, that are encoded and decoded


def run(params: Params, workspace: Workspace, key: str = "") -> None:
    """Write data/tokenizer and reports/tokenizer.json.

    Raises:
        DataError: the train split has no text, `vocab` is not a tokenizer, or too little of a dataset's texts remains
            after encoding and decoding.
        ParamsError: `source: vocab` without `vocab`.
        MissingToolError: the package of `vocab` is not installed.
    """
    p = params.tokenizer
    validated = require_output(workspace.validated, "validate")
    # The corpus is on disk, so it may be larger than memory.
    with read_texts(validated, p.sources, workspace) as (texts, questions, corpus):
        tokenizer = make_tokenizer(p, texts, workspace)
        shares = _check_decoding(tokenizer, corpus.sample(), p)
        answers = build_answer_vocabulary(questions, p.min_answer_count)
    with output_directory(workspace.tokenizer) as directory:
        tokenizer.save(directory)
        write_json(directory / "answers.json", answers)
        # Equal vocabularies give equal outputs, whatever the names of the datasets that they come from.
        unrecorded = ("sources", "min_decoded_share", *([] if p.special_tokens else ["special_tokens"]))
        settings = {key: value for key, value in to_plain(p).items() if key not in unrecorded}
        counts = {"tokens": tokenizer.vocab_size, "answers": len(answers)}
        write_manifest(directory, stage="tokenizer", params=settings, counts=counts)
    report = {**counts, "texts": len(texts), "questions": len(questions), "decoded_share": shares}
    write_json(workspace.reports / "tokenizer.json", report)
    logger.info(
        "tokenizer: %s tokens from %s texts, %s answers; CIDEr-D after encoding and decoding: %s",
        f"{tokenizer.vocab_size:,}",
        f"{len(texts):,}",
        f"{len(answers):,}",
        ", ".join(f"{source} {share}%" for source, share in shares.items()) or "no text of an image",
    )


@contextmanager
def read_texts(
    validated: Path, sources: list[str], workspace: Workspace, without: Set[str] = frozenset()
) -> Iterator[tuple[MappedValues, MappedValues, _Corpus]]:
    """Yield the texts of the vocabulary, the answers of each question, and what they come from, except of the images
    `without`.
    """
    with scratch_directory(workspace.root / ".work" / "texts") as folder, Database.within(folder) as database:
        corpus = _Corpus(database, validated, sources, without)
        # Generators: the rows are read while `MappedValues` writes them to disk.
        texts = (
            column.texts(rows)
            for name, view in TABLES.items()
            for column in view.text_columns
            for rows in corpus.rows(name, column.name, SPLITS[:1])
        )
        answers = (rows["answers"].to_pylist() for rows in corpus.rows("questions", "answers", SPLITS[:2]))
        # both are read more than once, and need not fit into memory
        yield (
            MappedValues(folder / "texts.arrow", texts, pa.string()),
            MappedValues(folder / "answers.arrow", answers, pa.list_(pa.string())),
            corpus,
        )


class _Corpus:
    """The validated tables, joined with their images on disk."""

    def __init__(self, database: Database, validated: Path, sources: list[str], without: Set[str]) -> None:
        """sources: empty: all datasets. without: images to leave out."""
        self._database, self._validated, self._sources = database, validated, sources
        columns = ["image_id", "split", "source"]
        schema = pa.schema([SCHEMAS["images"].field(name) for name in columns])
        # the images of the datasets; the other tables are joined with them
        images = stream_table("images", validated, columns)
        if without:
            lost = pa.array(sorted(without))
            images = (rows.filter(pc.invert(pc.is_in(rows["image_id"], value_set=lost))) for rows in images)
        database.load("images", (self._choose(rows, SPLITS) for rows in images), schema)

    def rows(self, table: str, column: str, splits: Sequence[str]) -> Iterator[pa.Table]:
        """Yield a column of a table in the order of its rows, for the images or texts of these splits."""
        if "split" in SCHEMAS[table].names:  # texts without an image
            for rows in stream_table(table, self._validated, ["split", "source", column]):
                yield self._choose(rows, splits)
            return
        if self._load(table, column):
            names = ", ".join(f"'{split}'" for split in splits)
            yield from self._database.stream(
                f'SELECT r."{column}" FROM rows r SEMI JOIN (SELECT * FROM images WHERE split IN ({names})) i '
                "ON r.image_id = i.image_id ORDER BY r.row"
            )

    def _load(self, table: str, column: str) -> bool:
        """Load a column of a table as `rows`. Return whether there are any."""
        schema = pa.schema([*(SCHEMAS[table].field(name) for name in ("image_id", column)), ("row", pa.int64())])
        # Numbered, because the join with the images loses the order of the rows.
        self._database.load("rows", number_rows(stream_table(table, self._validated, ["image_id", column])), schema)
        return bool(self._database.value("SELECT count(*) FROM rows"))

    def sample(self) -> dict[str, list[str]]:
        """Return dataset -> texts of its training images, at most SAMPLE rows of each column.

        `DATASET (LANGUAGE)` has all captions of the same images in a language, if captions name theirs.
        """
        texts: dict[str, list[str]] = defaultdict(list)
        captioned: set[str] = set()  # images
        for name, view in TABLES.items():
            for column in view.text_columns if view.has_image else ():
                if not self._load(name, column.name):
                    continue
                # every n-th row of a dataset: n is its number of rows / SAMPLE, rounded up
                for rows in self._database.stream(
                    f'SELECT source, image_id, "{column.name}" FROM (SELECT i.source, r.*, '
                    "row_number() OVER (PARTITION BY i.source ORDER BY r.row) - 1 AS number, "
                    "count(*) OVER (PARTITION BY i.source) AS total "
                    "FROM rows r JOIN images i ON r.image_id = i.image_id WHERE i.split = 'train') "
                    f"WHERE number % ((total + {SAMPLE - 1}) // {SAMPLE}) = 0 ORDER BY row"
                ):
                    for source in pc.unique(rows["source"]).to_pylist():
                        texts[source] += column.texts(rows.filter(pc.equal(rows["source"], source)))
                    captioned.update(rows["image_id"].to_pylist() if name == "captions" else [])
        for language, captions in read_languages(self._validated, captioned).items():
            for image_id, texts_of_image in captions.items():
                texts[f"{image_id.partition('/')[0]} ({language})"] += texts_of_image
        return dict(sorted(texts.items()))

    def _choose(self, rows: pa.Table, splits: Sequence[str]) -> pa.Table:
        rows = rows.filter(pc.is_in(rows["split"], value_set=pa.array(splits)))
        return rows.filter(pc.is_in(rows["source"], value_set=pa.array(self._sources))) if self._sources else rows


def make_tokenizer(p: TokenizerParams, texts: Collection[str], workspace: Workspace) -> Tokenizer:
    accents = None if p.strip_accents == "auto" else p.strip_accents
    if p.source == "vocab":
        tokenizer = _given(p, accents, workspace)
        return tokenizer.trimmed(texts) if p.trim else tokenizer
    if not len(texts):
        raise DataError(
            f"{workspace.validated}: the train split has no text to build a vocabulary from; "
            "check the `splits` and file lists under `data` in params.yaml, or use `tokenizer.source: vocab`"
        )
    return Tokenizer.train(texts, p.vocab_size, p.min_frequency, p.lowercase, accents)


def _given(p: TokenizerParams, accents: bool | None, workspace: Workspace) -> Tokenizer:
    if p.special_tokens and not (workspace.root / p.vocab).is_dir() and not p.vocab.startswith((PREFIX, HUB)):
        raise ParamsError(
            "params.yaml: `tokenizer.special_tokens` names tokens of a pretrained tokenizer.json; those of a vocab.txt "
            "are fixed, so remove it"
        )
    if not p.vocab:
        raise ParamsError(
            "params.yaml: `tokenizer.source: vocab` needs `tokenizer.vocab`: the path of a vocab.txt, or of a folder "
            f"with a tokenizer.json or a BERT's files, or {PREFIX}NAME of an installed package"
        )
    # one of three kinds of vocabulary: vocab.txt, or a folder or package with a tokenizer
    if not p.vocab.startswith((PREFIX, HUB)) and not (workspace.root / p.vocab).is_dir():
        return Tokenizer.from_vocab(workspace.root / p.vocab, p.lowercase, accents)
    folder = find_folder(p.vocab, workspace.root, "tokenizer.vocab")
    tokenizer = read_tokenizer(folder, lowercase=p.lowercase, special_tokens=p.special_tokens)
    if accents is not None and accents is not tokenizer.strips_accents:
        raise ParamsError(
            f"params.yaml: `tokenizer.strip_accents: {str(accents).lower()}`, but the tokenizer of {p.vocab} "
            f"{'strips' if tokenizer.strips_accents else 'keeps'} them; leave it at auto, or build a vocabulary from "
            f"your texts: `{OWN_VOCABULARY}`"
        )
    return tokenizer


def _check_decoding(tokenizer: Tokenizer, samples: Mapping[str, Sequence[str]], p: TokenizerParams) -> dict[str, float]:
    """Return the share of each sample, and raise a DataError if that of a dataset is below `min_decoded_share`.

    So does a language of a dataset with at least `MIN_GROUPS` texts: a single caption in another one stops nothing.
    """
    shares = {}
    for name, texts in samples.items():
        shares[name], example = decoded_share(tokenizer, texts)
        if shares[name] < p.min_decoded_share and (len(texts) >= MIN_GROUPS or "(" not in name):
            # the command that makes a vocabulary that fits
            settings = {"strip_accents": "false", "min_frequency": 1, "vocab_size": max(8000, 2 * p.vocab_size)}
            trained = "vlp use " + " ".join(f"--set tokenizer.{key}={value}" for key, value in settings.items())
            raise DataError(
                f"data.{name}: the vocabulary loses marks or words: texts keep {shares[name]}% of their CIDEr-D when "
                f"encoded and decoded (`tokenizer.min_decoded_share` in params.yaml: {p.min_decoded_share:g}%), such "
                f"as {example}; run `{OWN_VOCABULARY if p.source == 'vocab' else trained}`"
            )
    return shares


def decoded_share(tokenizer: Tokenizer, texts: Sequence[str]) -> tuple[float, str]:
    """Return the CIDEr-D of decoded texts against the texts themselves, in percent of that of the texts, and a text
    that changes most: `'before' -> 'after'`; empty if none does.

    Words are those of the caption scores, which ignore case and punctuation.
    """
    words = [ptb_like(text).split() for text in texts]
    decoded = [tokenizer.reproduce(text) for text in texts]
    counted = DocumentFrequencies.count([text] for text in words)
    # One document more than there are, or an n-gram of all texts would have no weight.
    frequencies = DocumentFrequencies(counted.images + 1, counted.words, counted.counts)
    scorer = CiderD(frequencies, lambda number: [words[int(number)]])
    # [N, 2]: of each text as it was, and decoded
    pairs = zip(words, (ptb_like(text).split() for text in decoded), strict=True)
    score_N2 = np.array([scorer.score(str(number), pair) for number, pair in enumerate(pairs)])
    texts_sum, decoded_sum = score_N2.sum(axis=0)
    share = round(100 * float(decoded_sum / texts_sum), 2) if texts_sum else 100.0
    losses = score_N2[:, 0] - score_N2[:, 1]
    worst = int(losses.argmax())
    return share, f"'{texts[worst]}' -> '{decoded[worst]}'" if losses[worst] > 0 else ""
