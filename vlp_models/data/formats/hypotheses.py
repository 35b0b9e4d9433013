"""What SNLI-VE's files share, whatever their form: hypotheses about Flickr's photos, each in a split.

With `params.split_files`, lists of photos, or a Karpathy file, a hypothesis is in its photo's split: SNLI-VE divides
Flickr's photos otherwise than Flickr8k does, so that what one learns from the other may be tested on. Hypotheses about
photos that no list has are then left out, and counted. A photo is in the file that its record names; where there is no
such file, in the one that its list names: Flickr8k's files have longer names. `params.val_fraction` keeps a share of
train's photos, with all that is said of them, for val.

A `gold_label` of "-" means that the annotators did not agree: such a line is left out, and counted, as the published
files leave it out.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from vlp_models.data.formats.base import RecordError, Row, Tables, get_id, image_row, join_id
from vlp_models.data.formats.karpathy import safe_name
from vlp_models.data.formats.photo_lists import is_held_out, photo_folder, photo_id, read_lists, stem
from vlp_models.data.images import FORMATS
from vlp_models.data.views import ENTAILMENT
from vlp_models.params import SourceParams

UNDECIDED = "-"


@dataclass(frozen=True, kw_only=True)
class Hypothesis:
    """One record. file: of its photo, as `safe_name` gives it. label: None where it is hidden."""

    local: str
    file: str
    text: str
    label: str | None
    annotators: list[str] = field(default_factory=list)


def fill(
    tables: Tables,
    name: str,
    params: SourceParams,
    root: Path,
    records: Iterator[tuple[str, Row, str]],
    parse: Callable[[str, Row], Hypothesis],
) -> None:
    """Adds photos and hypotheses; `params.limit` keeps the first hypotheses of each split.

    Args:
        records: (provenance, record, the split its file says).
        parse: (its id, a record) -> what it says; raises `RecordError`.
    """
    listed = read_lists(name, params, root, {}, tables) if params.split_files or params.karpathy else None
    folder = photo_folder(root, params.images)
    seen: dict[str, str] = {}
    files: dict[str, str] = {}  # of the photos met: as the record names it -> where it is
    splits: dict[str, str] = {}  # of the images met
    kept: Counter[str] = Counter()
    for provenance, record, own in records:
        with tables.record("hypotheses", provenance):
            local = get_id(record, "pairID")
            with tables.record("hypotheses", provenance, join_id(name, local)):
                if local in seen:
                    raise RecordError(f"pairID {local} stood already in {seen[local]}", rule="id_unique")
                seen[local] = provenance
                if record.get("gold_label") == UNDECIDED:
                    tables.left_out["hypotheses that annotators did not agree on"] += 1
                    continue
                hypothesis = parse(local, record)
                photo = photo_id(hypothesis.file)
                if listed is not None and photo not in listed.splits:
                    tables.left_out["hypotheses about photos that no list has"] += 1
                    continue
                held = listed is None and own == "train" and is_held_out(photo, params.val_fraction)
                split = listed.splits[photo] if listed else "val" if held else own
                file = hypothesis.file
                if listed is not None:
                    if file not in files:
                        there = (folder / file).is_file()
                        files[file] = file if there else safe_name(listed.files.get(photo, file))
                    file = files[file]
                image_id = join_id(name, stem(file))
                if splits.get(image_id, split) != split:
                    raise RecordError(
                        f"its photo is {split} here, and {splits[image_id]} before", rule="split_disjoint"
                    )
                if params.limit and kept[split] >= params.limit:
                    continue
                kept[split] += 1
                if image_id not in splits:
                    splits[image_id] = split
                    path = os.path.normpath(folder / file)
                    row = image_row(image_id, source=name, split=split, path=path, provenance=provenance)
                    tables["images"].append(row)
                tables["hypotheses"].append(
                    {
                        "hypothesis_id": join_id(name, local),
                        "image_id": image_id,
                        "text": hypothesis.text,
                        "gold_label": hypothesis.label,
                        "annotator_labels": hypothesis.annotators,
                        "provenance": provenance,
                    }
                )


def known_label(label: str) -> str:
    if label not in ENTAILMENT:
        raise RecordError(f"`gold_label` is {label!r}, expected {', '.join(ENTAILMENT)}", rule="gold_label_known")
    return label


def photo_file(record: Row, keys: tuple[str, ...]) -> str:
    """The file that the first of `keys` names which is there; some files lack the ending."""
    key = next((key for key in keys if key in record), keys[0])
    name = safe_name(get_id(record, key))
    return name if Path(name).suffix.lower() in FORMATS else f"{name}.jpg"
