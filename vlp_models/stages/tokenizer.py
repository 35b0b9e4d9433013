"""tokenizer: the vocabulary of the texts, and the answers VQA chooses from.

Only the train split is read for the vocabulary; the answers may come from train and val, as for VQA v2.
"""

from __future__ import annotations

import pyarrow as pa
import pyarrow.compute as pc

from vlp_models.data.answers import build_answer_vocabulary
from vlp_models.data.tables import read_table
from vlp_models.data.tokenizer import Tokenizer
from vlp_models.data.views import TABLES
from vlp_models.errors import DataError, ParamsError
from vlp_models.params import Params, TokenizerParams, to_plain
from vlp_models.workspace.paths import (
    Workspace,
    measured,
    need,
    output_directory,
    write_json,
    write_manifest,
)


def run(params: Params, workspace: Workspace, key: str = "") -> None:
    """Writes data/tokenizer.

    Raises:
        DataError: the train split has no text.
        ParamsError: a vocab.txt is asked for and no path is given, or `size` has no room for the special tokens.
    """
    p = params.tokenizer
    with measured(workspace, "tokenizer"):
        validated = need(workspace.validated, "validate")
        images = read_table("images", validated)
        texts = [
            text
            for name, view in TABLES.items()
            for text in view.texts(_of_splits(read_table(name, validated), images, ["train"]))
        ]
        tokenizer = _make(p, texts, workspace)
        questions = _of_splits(read_table("questions", validated), images, ["train", "val"])["answers"].to_pylist()
        answers = build_answer_vocabulary(questions, p.min_answer_count)
        with output_directory(workspace.tokenizer) as directory:
            tokenizer.save(directory)
            write_json(directory / "answers.json", answers)
            counts = {
                "texts": len(texts),
                "tokens": tokenizer.vocab_size,
                "questions": len(questions),
                "answers": len(answers),
            }
            write_manifest(directory, stage="tokenizer", params=to_plain(p), counts=counts)
    print(f"tokenizer: {tokenizer.vocab_size:,} tokens from {len(texts):,} texts, {len(answers):,} answers")


def _make(p: TokenizerParams, texts: list[str], workspace: Workspace) -> Tokenizer:
    if p.source == "vocab":
        if not p.vocab:
            raise ParamsError("params.yaml: `tokenizer.source: vocab` needs `tokenizer.vocab`, the path of a vocab.txt")
        return Tokenizer.from_vocab(workspace.root / p.vocab, p.lowercase)
    if not texts:
        raise DataError(
            f"{workspace.validated}: the train split has no text to learn a vocabulary from; "
            "check the `splits` and file lists under `data` in params.yaml, or use `tokenizer.source: vocab`"
        )
    return Tokenizer.train(texts, p.vocab_size, p.min_frequency, p.lowercase)


def _of_splits(table: pa.Table, images: pa.Table, splits: list[str]) -> pa.Table:
    if "split" in table.column_names:  # texts that no image belongs to
        return table.filter(pc.is_in(table["split"], value_set=pa.array(splits)))
    ids = images.filter(pc.is_in(images["split"], value_set=pa.array(splits)))["image_id"]
    return table.filter(pc.is_in(table["image_id"], value_set=ids.combine_chunks()))
