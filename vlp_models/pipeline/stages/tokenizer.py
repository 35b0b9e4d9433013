"""tokenizer: the vocabulary of the texts, and the answers VQA chooses from.

Only the train split is read for the vocabulary; the answers may come from train and val, as for VQA v2.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Sequence, Set
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc

from vlp_models.common.io import output_directory, read_json, write_json
from vlp_models.common.packages import PREFIX
from vlp_models.common.workspace import Workspace, record_timing, require_output, write_manifest
from vlp_models.data.answers import build_answer_vocabulary
from vlp_models.data.bert_folder import find_folder, read_tokenizer
from vlp_models.data.tables import read_table
from vlp_models.data.tokenizer import Survey, Tokenizer, survey
from vlp_models.data.views import TABLES
from vlp_models.errors import DataError, ParamsError
from vlp_models.params import Params, TokenizerParams, to_plain

SURVEYED = 100_000  # texts, evenly spread, whose words are looked up
WARNED = 0.01  # share of the words above which a loss is no accident


def run(params: Params, workspace: Workspace, key: str = "") -> None:
    """Writes data/tokenizer and reports/tokenizer.json.

    Raises:
        DataError: the train split has no text, or what `vocab` names is no BERT's tokenizer.
        ParamsError: a vocabulary is asked for and no place is given. MissingToolError: its package is not installed.
    """
    p = params.tokenizer
    with record_timing(workspace, "tokenizer"):
        validated = require_output(workspace.validated, "validate")
        texts, questions = _read(validated, p.sources)
        tokenizer = _make(p, texts, workspace)
        looked_up = survey(tokenizer, texts[:: -(-len(texts) // SURVEYED) or 1])
        answers = build_answer_vocabulary(questions, p.min_answer_count)
        with output_directory(workspace.tokenizer) as directory:
            tokenizer.save(directory)
            write_json(directory / "answers.json", answers)
            # the same words are the same output, whatever texts they are of and however their datasets came to be named
            settings = {name: value for name, value in to_plain(p).items() if name != "sources"}
            kept = {"tokens": tokenizer.vocab_size, "answers": len(answers)}
            write_manifest(directory, stage="tokenizer", params=settings, counts=kept)
        read = {"texts": len(texts), "questions": len(questions), "words": looked_up.words}
        lost = {"unknown_words": looked_up.unknown.total(), "changed_words": looked_up.changed.total()}
        write_json(workspace.reports / "tokenizer.json", kept | read | lost)
    print(
        f"tokenizer: {tokenizer.vocab_size:,} tokens from {len(texts):,} texts, {len(answers):,} answers; "
        f"[UNK]: {looked_up.unknown_share:.2%} of the words"
    )
    for line in _warnings(looked_up, p):
        print(f"tokenizer: warning: {line}", file=sys.stderr)


def _read(
    validated: Path, sources: list[str], without: Set[str] = frozenset()
) -> tuple[list[str], list[Sequence[str]]]:
    """The texts that a vocabulary is learnt from, and each question's answers; without those of some images."""
    images = read_table("images", validated)
    if without:
        images = images.filter(pc.invert(pc.is_in(images["image_id"], value_set=pa.array(sorted(without)))))
    texts = [
        text
        for name, view in TABLES.items()
        for text in view.texts(_of_splits(read_table(name, validated), images, ["train"], sources))
    ]
    asked = _of_splits(read_table("questions", validated), images, ["train", "val"], sources)
    return texts, asked["answers"].to_pylist()


def shaped_by(p: TokenizerParams, workspace: Workspace, image_ids: Set[str]) -> bool:
    """Whether data/tokenizer would be another one without the texts of these images: made again to see.

    Args:
        p: as it was made, `sources` included.

    Raises:
        DataError: `validate` or `tokenizer` has not run, or it is not what these settings make of all texts.
    """
    now = Tokenizer.load(require_output(workspace.tokenizer, "tokenizer"))
    learnt = p.source == "train" or p.trim

    def made(without: Set[str]) -> tuple[Sequence[str], list[str]]:
        texts, questions = _read(require_output(workspace.validated, "validate"), p.sources, without)
        vocabulary = now.vocabulary if not learnt else _make(p, texts, workspace).vocabulary if texts else ()
        return vocabulary, build_answer_vocabulary(questions, p.min_answer_count)

    whole = made(frozenset())
    if whole != (now.vocabulary, read_json(workspace.tokenizer / "answers.json")):
        raise DataError(f"{workspace.tokenizer}: not what params.yaml makes of {workspace.validated}; `vlp run` first")
    return made(image_ids) != whole


def _make(p: TokenizerParams, texts: list[str], workspace: Workspace) -> Tokenizer:
    accents = None if p.strip_accents == "auto" else p.strip_accents
    if p.source == "vocab":
        tokenizer = _given(p, accents, workspace)
        return tokenizer.trimmed(texts) if p.trim else tokenizer
    if not texts:
        raise DataError(
            f"{workspace.validated}: the train split has no text to learn a vocabulary from; "
            "check the `splits` and file lists under `data` in params.yaml, or use `tokenizer.source: vocab`"
        )
    return Tokenizer.train(texts, p.vocab_size, p.min_frequency, p.lowercase, accents)


def _given(p: TokenizerParams, accents: bool | None, workspace: Workspace) -> Tokenizer:
    if not p.vocab:
        raise ParamsError(
            "params.yaml: `tokenizer.source: vocab` needs `tokenizer.vocab`: the path of a vocab.txt, or of a folder "
            f"with a BERT's files, or {PREFIX}NAME of an installed package"
        )
    if not p.vocab.startswith(PREFIX) and not (workspace.root / p.vocab).is_dir():
        return Tokenizer.from_vocab(workspace.root / p.vocab, p.lowercase, accents)
    folder = find_folder(p.vocab, workspace.root, "tokenizer.vocab")
    tokenizer = read_tokenizer(folder, lowercase=p.lowercase)
    if accents is not None and accents is not tokenizer.strips_accents:
        raise ParamsError(
            f"params.yaml: `tokenizer.strip_accents: {str(accents).lower()}`, but the tokenizer of {p.vocab} "
            f"{'strips' if tokenizer.strips_accents else 'keeps'} them; leave it at auto"
        )
    return tokenizer


def _warnings(found: Survey, p: TokenizerParams) -> list[str]:
    """What would else be lost in silence, and the way out."""
    lines = []
    if found.unknown_share > WARNED:
        way_out = (
            "raise `tokenizer.vocab_size` or lower `tokenizer.min_frequency`"
            if p.source == "train"
            else "take a vocabulary that has their scripts, or learn one (`tokenizer.source: train`)"
        )
        lines.append(f"{found.unknown_share:.1%} of the words become [UNK], such as {_some(found.unknown)}; {way_out}")
    if found.changed_share > WARNED:
        lines.append(
            f"{found.changed_share:.1%} of the words lose vowels or other letters that are written as marks, such as "
            f"{_some(found.changed)}; set `tokenizer.strip_accents: false`"
            + (" with a vocabulary learnt here or a cased BERT's" if p.source == "vocab" else "")
        )
    return lines


def _some(words: Counter[str]) -> str:
    return ", ".join(repr(word) for word, _ in words.most_common(5))


def _of_splits(table: pa.Table, images: pa.Table, splits: list[str], sources: list[str]) -> pa.Table:
    """sources: datasets; empty: all."""

    def chosen(rows: pa.Table) -> pa.Table:
        rows = rows.filter(pc.is_in(rows["split"], value_set=pa.array(splits)))
        return rows.filter(pc.is_in(rows["source"], value_set=pa.array(sources))) if sources else rows

    if "split" in table.column_names:  # texts that no image belongs to
        return chosen(table)
    return table.filter(pc.is_in(table["image_id"], value_set=chosen(images)["image_id"].combine_chunks()))
