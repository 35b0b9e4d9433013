"""e-SNLI-VE (Kayser et al. 2021): SNLI-VE's hypotheses as csv, some of them corrected, and Flickr's photos.

`esnlive_{train,dev,test}.csv`, or one `esnlive.csv` with a column `split`, have the columns `pairID, Flickr30kID,
hypothesis, gold_label` and `explanation`; the last one is not read. A photo is `<Flickr30kID>` below `params.images`,
unless a column `image` names its file: Flickr8k calls `2181846120.jpg` `2181846120_3744ca3942.jpg`. What splits may be
besides the files' own: formats/hypotheses.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from vlp_models.data.formats.base import RecordError, Row, Tables, get_sentence, get_text, need_root
from vlp_models.data.formats.csv_records import read_csv
from vlp_models.data.formats.hypotheses import Hypothesis, fill, known_label, photo_file
from vlp_models.data.tables import SPLITS
from vlp_models.errors import DataError
from vlp_models.params import SourceParams

WHOLE = "esnlive.csv"
FILES = {"train": "esnlive_train.csv", "val": "esnlive_dev.csv", "test": "esnlive_test.csv"}
OURS = {"train": "train", "dev": "val", "val": "val", "test": "test"}
COLUMNS = ("pairID", "Flickr30kID", "hypothesis", "gold_label")


def read(name: str, params: SourceParams, base: Path) -> Tables:
    """Reads `esnlive.csv` where it is there, else the files of `params.splits` or all; `params.limit` keeps the first
    hypotheses of each split.

    Raises:
        DataError: the folder or a split asked for is missing, or a file lacks one of the columns.
    """
    root = need_root(base, params.root, "its files are in github.com/maximek3/e-ViL; the photos are Flickr30k's")
    for split in params.splits:
        if split not in SPLITS:
            raise DataError(f"params: data.{name}.splits: e-SNLI-VE has no split {split!r}; known: {', '.join(SPLITS)}")
    splits = params.splits or [split for split in SPLITS if (root / FILES[split]).is_file()]
    whole = root / WHOLE
    if not splits and not whole.is_file():
        raise DataError(f"{root}: holds neither {WHOLE} nor one of {', '.join(FILES.values())}")
    tables = Tables()

    def records() -> Iterator[tuple[str, Row, str]]:
        if whole.is_file():
            for provenance, row in read_csv(whole, tables, "hypotheses", (*COLUMNS, "split")):
                own = OURS.get(row["split"].strip(), "")
                if not own:
                    tables.set_aside(
                        "hypotheses",
                        "",
                        "split_known",
                        f"split {row['split']!r} is none of {', '.join(OURS)}",
                        provenance,
                    )
                elif not params.splits or own in params.splits:
                    yield provenance, row, own
            return
        for split in splits:
            for provenance, row in read_csv(root / FILES[split], tables, "hypotheses", COLUMNS):
                yield provenance, row, split

    fill(tables, name, params, root, records(), _hypothesis)
    return tables


def _hypothesis(local: str, record: Row) -> Hypothesis:
    text = get_sentence(record, "hypothesis")
    if not text:
        raise RecordError("no hypothesis")
    return Hypothesis(
        local=local,
        file=photo_file(record, ("image",) if record.get("image") else ("Flickr30kID",)),
        text=text,
        label=known_label(get_text(record, "gold_label").strip()),
    )
