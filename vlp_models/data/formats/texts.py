"""Sentences that no image belongs to, for pretraining on text alone: files of one text a line, by split.

data.books: {format: texts, root: data/raw/books, texts: {train: [part-1.txt, part-2.txt], val: [held-out.txt]}}
"""

from __future__ import annotations

from pathlib import Path

from vlp_models.data.formats.base import Tables, is_utf8, join_id, need_root, open_lines
from vlp_models.data.tables import SPLITS
from vlp_models.errors import DataError
from vlp_models.params import SourceParams


def read(name: str, params: SourceParams, base: Path) -> Tables:
    """Empty lines are passed over; `params.limit` keeps the first texts of each split.

    Raises:
        DataError: the directory or a file is missing, a split is unknown, or no file is named.
    """
    root = need_root(base, params.root, f"put the text files there, or set data.{name}.root to where they are")
    if not params.texts:
        raise DataError(f"params: data.{name}.texts names no file; e.g. texts: {{train: [sentences.txt]}}")
    tables = Tables()
    for split, files in params.texts.items():
        if split not in SPLITS:
            raise DataError(f"params: data.{name}.texts.{split}: expected one of {', '.join(SPLITS)}")
        kept = 0
        for file in files:
            for number, line in enumerate(open_lines(root / file, "texts, one a line"), start=1):
                text = " ".join(line.split())
                if not text or (params.limit and kept >= params.limit):
                    continue
                text_id, provenance = join_id(name, f"{file}:{number}"), f"{file}:{number}"
                if not is_utf8(text):
                    tables.set_aside("texts", text_id, "text_utf8", f"not UTF-8: {text[:40]!r}", provenance)
                    continue
                kept += 1
                row = {"text_id": text_id, "source": name, "split": split, "text": text, "provenance": provenance}
                tables["texts"].append(row)
    return tables
