"""`<root>/captions.tsv`: lines of split, image file and caption, with tabs between."""

from pathlib import Path

from vlp_models.data.formats.base import RecordError, Tables, fills, image_row, join_id
from vlp_models.data.formats.files import read_text, require_directory
from vlp_models.params import SourceParams


@fills("captions")
def read(name: str, params: SourceParams, base: Path) -> Tables:
    root, tables = require_directory(base, params.root, f"set data.{name}.root to the folder of captions.tsv"), Tables()
    for number, line in enumerate(read_text(root / "captions.tsv", "lines of captions").splitlines(), 1):
        row_id, provenance = join_id(name, number), f"captions.tsv:{number}"
        # An error in this block quarantines the line and reading continues.
        with tables.record("captions", provenance, row_id):
            if line.count("\t") != 2:
                raise RecordError("not split, file and caption with tabs between")
            split, file, text = line.split("\t")
            image_id = join_id(name, file)
            image = image_row(image_id, source=name, split=split, path=str(root / file), provenance=provenance)
            tables["images"].append(image)
            caption = {"caption_id": row_id, "image_id": image_id, "text": text, "provenance": provenance}
            tables["captions"].append(caption)
    return tables
