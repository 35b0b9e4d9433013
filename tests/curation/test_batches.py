"""validate works in batches: its verdicts equal those of a plain pass over all rows at once."""

from __future__ import annotations

import random
import sys
from pathlib import Path
from typing import Any

import pytest

from vlp_models.common.workspace import Workspace
from vlp_models.curation.validation.columns import add_derived_columns
from vlp_models.curation.validation.cross_row_facts import CrossFacts
from vlp_models.curation.validation.rules import passes, rules_for
from vlp_models.curation.validation.text import caption_key
from vlp_models.data.tables import ID_COLUMN, SPLITS, read_table
from vlp_models.params import ValidateParams
from vlp_models.pipeline.stages import validate

sys.path.append(str(Path(__file__).parents[1] / "pipeline"))
from test_validate import BROKEN, good_rows, params_for, row, unreadable, write_interim

Row = dict[str, Any]
Found = list[tuple[str, str | None, str, str, str]]


def plain_others(table: str, rows: list[Row], images: dict[str, Row], quarantined: set[str]) -> CrossFacts:
    """Compute with dictionaries over all rows what cross_row_facts.py computes with joins."""
    facts = CrossFacts(images=images, quarantined=quarantined)
    first: dict[Any, Row] = {}
    kept: dict[str, tuple[int, Row]] = {}
    captions: dict[tuple[str, str], Row] = {}
    alone = []
    for number, entry in enumerate(rows):
        owner = first.setdefault(entry[ID_COLUMN[table]], entry)
        if owner is not entry:
            facts.columns[number] = {"id_of": owner["provenance"]}
            continue
        alone.append((number, entry))
        if table == "images" and entry["sha256"] and entry["split"] in SPLITS:
            rank = SPLITS.index(entry["split"])
            if entry["sha256"] not in kept or rank > kept[entry["sha256"]][0]:
                kept[entry["sha256"]] = (rank, entry)
    for number, entry in alone:
        if table == "images" and entry["split"] in SPLITS and entry["sha256"] in kept:
            other = kept[entry["sha256"]][1]
            if other["split"] != entry["split"]:
                facts.columns[number] = {"also_in": f"{other['split']} as {other['image_id']}"}
        if table == "captions" and entry["text"] is not None:
            owner = captions.setdefault((entry["image_id"], caption_key(entry["text"])), entry)
            if owner is not entry:
                facts.columns[number] = {"same_as": owner["caption_id"]}
    return facts


def plain_verdicts(workspace: Workspace, sources: list[str], params: ValidateParams) -> tuple[Found, dict[str, list]]:
    """Return what is wrong with which row, and the rows that are left."""
    found: Found = []
    left: dict[str, list[Row]] = {}
    images: dict[str, Row] = {}
    quarantined: set[Any] = set()
    for table in ID_COLUMN:
        rows = [r for source in sources for r in read_table(table, workspace.interim(source)).to_pylist()]
        aside = [r for source in sources for r in read_table("quarantine", workspace.interim(source)).to_pylist()]
        bad = [(r["table"], r["row_id"], r["rule"], r["reason"], r["provenance"]) for r in aside if r["table"] == table]
        derived = add_derived_columns(table, rows, plain_others(table, rows, images, quarantined))
        kept = [
            number for number, entry in enumerate(derived) if not entry.get("same_as")
        ]  # equal captions are no fault
        rows, derived = [rows[number] for number in kept], [derived[number] for number in kept]
        for entry in derived:
            entry["broken"] = [rule for rule in rules_for(table, params) if not passes(rule.check, entry[rule.column])]
            bad += [
                (table, entry[ID_COLUMN[table]], rule.name, rule.reason.format_map(entry), entry["provenance"])
                for rule in entry["broken"]
            ]
        left[table] = [r for r, entry in zip(rows, derived, strict=True) if not entry["broken"]]
        if table == "images":
            images = {r["image_id"]: r for r in left[table]}
            quarantined = {row_id for _, row_id, *_ in bad} - images.keys()
        found += bad
    return found, left


def bad_data(workspace: Workspace, seed: int) -> list[str]:
    """Write two datasets with every kind of bad row, some of them twice, in random order, so that related rows are
    before and after each other, in one batch and in several, in one dataset and in both."""
    rng = random.Random(seed)
    rows = good_rows(images=5)
    for table, rules in BROKEN.items():
        for rule, changes in rules.items():
            bad = row(table, rule, **changes)
            rows[table] += [bad] * rng.choice((1, 1, 2))
    rows["captions"] += [row("captions", f"equal-{number}", text="CAPTION good") for number in range(9)]
    for number in range(6):  # one caption in other letters; one picture in several splits
        text = rng.choice(("Straße am Meer", "STRASSE am Meer ", "another caption", "Another Caption"))
        rows["captions"].append(row("captions", f"same-{number}", text=text))
        copy = row("images", "picture", split=rng.choice((*SPLITS, "dev")))
        rows["images"].append(copy | {"image_id": f"d/copy-{number}", "provenance": f"images-copy-{number}"})
        other = rng.choice((f"d/copy-{number}", "d/images-image_side", "d/nowhere", "d/images-d/tested"))
        rows["image_pairs"].append(row("image_pairs", f"pair-{number}", other_image_ids=["d/good", other]))
    parts: list[dict[str, list[Row]]] = [{}, {}]
    for table, found in rows.items():
        rng.shuffle(found)
        cut = rng.randrange(len(found))
        parts[0][table], parts[1][table] = found[:cut], found[cut:]
    parts[0]["quarantine"] = [unreadable("images", "d/cut", "image_decodes")]
    parts[1]["quarantine"] = [unreadable("captions", "", "record_readable")]
    for name, part in zip(("d", "e"), parts, strict=True):
        write_interim(workspace, part, name)
    return ["d", "e"]


@pytest.mark.slow
@pytest.mark.parametrize(("size", "seed"), [(17, 1), (65_536, 2)])
def test_verdicts_do_not_depend_on_batches(
    size: int, seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    workspace = Workspace(tmp_path)
    sources = bad_data(workspace, seed)
    params = params_for(0.999, *sources)
    wanted, left = plain_verdicts(workspace, sources, params.validate)
    monkeypatch.setattr(validate, "BATCH", size)
    validate.run(params, workspace)
    found = [
        (bad["table"], bad["row_id"], bad["rule"], bad["reason"], bad["provenance"])
        for bad in read_table("quarantine", workspace.validated).to_pylist()
    ]
    assert sorted(found, key=repr) == sorted(wanted, key=repr)
    assert {rule for _, _, rule, *_ in found} >= {
        "id_unique",
        "split_disjoint",
        "images_of_one_split",
    }
    for table, rows in left.items():
        assert read_table(table, workspace.validated).to_pylist() == rows, table
