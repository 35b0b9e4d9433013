"""Decisions and thresholds of the audit reach `validate`, which quarantines captions with the reason."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from audited_project import Audited
from cloned_project import copy_project, run

from vlp_models.common.workspace import Workspace
from vlp_models.contrib.audit.audit import audit
from vlp_models.contrib.audit.decisions import DECISIONS, REPORT, append_decision, files, read_decisions, read_flagged
from vlp_models.contrib.audit.params import AuditParams
from vlp_models.data.tables import read_table
from vlp_models.errors import DataError, ParamsError
from vlp_models.params import ValidateParams, parse_params
from vlp_models.pipeline.stages import validate


def with_audit(params: ValidateParams, **settings: Any) -> ValidateParams:
    return dataclasses.replace(params, sections={"audit": AuditParams(**settings)})


def test_a_threshold_takes_training_captions_and_decisions_come_first(audited: Audited) -> None:
    workspace, root = audited.workspace, audited.workspace.root
    plain = audited.params.validate
    assert files(plain) == [DECISIONS] and not read_flagged(plain, root)
    limit = with_audit(plain, above=0.5, kinds=["empty", "copied"])
    assert files(limit) == [DECISIONS, REPORT]
    flagged = read_flagged(limit, root)
    assert flagged.keys() == audited.planted["empty"] | audited.planted["copied"]
    assert "audit: empty, score 1.000: a file name" in flagged.values()
    assert not read_flagged(with_audit(plain, above=1.0, kinds=["empty"]), root), "no score is above 1"
    tested = {row["caption_id"] for row in audited.rows() if row["split"] != "train"}
    assert tested and not tested & read_flagged(with_audit(plain, above=0.0), root).keys()
    assert workspace.root == root


def test_the_last_decision_of_a_caption_counts_and_a_cut_off_line_is_no_decision(
    copied: Callable[[], Audited],
) -> None:
    project = copied()
    root, file = project.workspace.root, project.workspace.root / DECISIONS
    empty, stays = sorted(project.planted["empty"])[:2]
    for name, decision in ((empty, "remove"), (stays, "remove"), (stays, "accept")):
        append_decision(file, name, decision, "a text")  # type: ignore[arg-type]
    with file.open("a") as opened:
        opened.write('{"caption_id": "scenes/0", "deci')  # the machine stopped here
    append_decision(file, "scenes/5", "remove", "ein Würfel")
    lines = file.read_text(encoding="utf-8").splitlines()
    file.write_text("".join(f"{line}\n" for line in lines if not line.endswith("deci")), encoding="utf-8")
    assert read_decisions(file) == {empty: "remove", stays: "accept", "scenes/5": "remove"}
    flagged = read_flagged(with_audit(project.params.validate, above=0.5, kinds=["empty"]), root)
    assert stays not in flagged and flagged[empty] == "removed on the page of `vlp audit`"
    file.write_text('{"caption_id": "scenes/0", "decision": "perhaps"}\n')
    with pytest.raises(DataError, match="'perhaps' is not a decision"):
        read_decisions(file)
    file.write_text("[1]\n{}\n")
    with pytest.raises(DataError, match=r"audit\.jsonl:1: damaged"):
        read_decisions(file)


@pytest.mark.slow
def test_validate_quarantines_removed_captions_and_the_audit_stays_the_same(copied: Callable[[], Audited]) -> None:
    project = copied()
    workspace = project.workspace
    removed = sorted(project.planted["language"])
    for name in removed:
        append_decision(workspace.root / DECISIONS, name, "remove", "")
    limits = with_audit(project.params.validate, above=0.9, kinds=["empty"])
    params = dataclasses.replace(project.params, validate=dataclasses.replace(limits, max_bad_fraction=0.1))
    before = (workspace.root / REPORT).read_bytes()
    validate.run(params, workspace)
    expected = {*removed, *project.planted["empty"]}
    quarantine = [row for row in read_table("quarantine", workspace.validated).to_pylist() if row["rule"] == "flagged"]
    assert {row["row_id"] for row in quarantine} == expected
    assert {"removed on the page of `vlp audit`", "audit: empty, score 1.000: a file name"} <= {
        row["reason"] for row in quarantine
    }
    assert not expected & set(read_table("captions", workspace.validated)["caption_id"].to_pylist())
    report = json.loads((workspace.reports / "validation.json").read_text())
    assert [r["failed"] for r in report["rules"] if r["rule"] == "flagged"] == [len(expected)]
    assert "vlp audit" in (workspace.reports / "validation.html").read_text()
    # a second audit reads the removed pairs as well: they do not come back, and nothing else moves up
    audit(params, workspace, ["scenes"])
    assert (workspace.root / REPORT).read_bytes() == before


def test_the_section_is_checked(audited: Audited) -> None:
    raw = yaml.safe_load((Path(__file__).parents[3] / "params.yaml").read_text())
    raw["validate"]["audit"] = {"above": 0.9, "kinds": ["swapped", "copied"]}
    assert parse_params(raw).validate.section(AuditParams).kinds == ["swapped", "copied"]
    raw["validate"]["audit"] = {"above": 2}
    with pytest.raises(ParamsError, match=r"`validate\.audit\.above: 2.*less than or equal to 1"):
        parse_params(raw)
    raw["validate"]["audit"] = {"kinds": ["swaped"]}
    with pytest.raises(ParamsError, match=r"validate\.audit\.kinds\[0\].*did you mean `swapped`"):
        parse_params(raw)


@pytest.mark.long
def test_a_removed_pair_leaves_the_built_project(built_project: Path, tmp_path: Path) -> None:
    """`vlp audit`, a decision, `vlp run validate`: the decision makes the stage stale, and the next run skips it."""
    folder = copy_project(built_project, tmp_path / "project")
    assert "200 captions of 40 images" in run(folder, "vlp", "audit", "--top", "3").stdout
    assert (folder / REPORT).exists()
    row = read_table("captions", Workspace(folder).validated).to_pylist()[0]
    append_decision(folder / DECISIONS, row["caption_id"], "remove", row["text"])
    run(folder, "vlp", "run", "validate")
    assert row["caption_id"] not in read_table("captions", Workspace(folder).validated)["caption_id"].to_pylist()
    assert DECISIONS in (folder / "dvc.yaml").read_text()
