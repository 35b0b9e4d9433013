"""Run bundles: figures that replay from items, from weights and from nothing; a changed byte is refused."""

from __future__ import annotations

import json
import random
import shutil
import subprocess
import zipfile
from pathlib import Path

import pytest
from cloned_project import copy_project, run
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

from vlp_models.cli.main import app
from vlp_models.common.workspace import Workspace
from vlp_models.errors import DataError
from vlp_models.params import load_params
from vlp_models.pipeline.run_bundle import RunBundle, open_bundle, pack

pytestmark = pytest.mark.pipeline
RUN = "tden-vqa"


@pytest.fixture(scope="module")
def project(built_project: Path, tmp_path_factory: pytest.TempPathFactory) -> Workspace:
    return Workspace(copy_project(built_project, tmp_path_factory.mktemp("bundles") / "project"))


@pytest.fixture(scope="module")
def packed(project: Workspace) -> RunBundle:
    path = project.root / f"{RUN}.run.zip"
    return pack(load_params(project.root / "params.yaml"), project, RUN, path)


def test_bundle_has_what_the_figures_come_from(packed: RunBundle, project: Workspace) -> None:
    opened = open_bundle(packed.path)
    assert opened.id == packed.id and opened.files == packed.files
    names = {"bundle.json", "lineage.json", "params.yaml", "dvc.lock", "scores.json", "items.parquet"}
    assert names < set(opened.files) and "predictions-test.jsonl" in opened.files
    weights = {Path(name).parent.as_posix() for name in opened.manifest["weights"]}
    assert weights >= {"checkpoints/finetune/tden-vqa", "checkpoints/pretrain/tden", "checkpoints/initial/tden"}
    assert "data/detector" in weights and opened.manifest["environment"]["mode"] == "portable"
    again = pack(load_params(project.root / "params.yaml"), project, RUN, packed.path.with_name("again.zip"))
    assert again.path.read_bytes() == packed.path.read_bytes()


def test_a_member_with_another_compression_is_refused(tmp_path: Path) -> None:
    """zipfile unpacks bzip2 without a limit, whatever size the member declares."""
    with zipfile.ZipFile(tmp_path / "a.run.zip", "w", zipfile.ZIP_BZIP2) as archive:
        archive.writestr("bundle.json", "{}")
    with pytest.raises(DataError, match=r"bundle\.json is neither stored nor deflated"):
        open_bundle(tmp_path / "a.run.zip")


def test_a_thousand_mutations_are_refused(packed: RunBundle, tmp_path: Path) -> None:
    content, rng = packed.path.read_bytes(), random.Random(1)
    path = tmp_path / "mutated.zip"
    for number in range(1000):
        changed, place = bytearray(content), rng.randrange(len(content))
        if number % 4 == 0:
            changed[place] ^= 1 << rng.randrange(8)
        elif number % 4 == 1:
            changed[place] = (changed[place] + rng.randrange(1, 256)) % 256
        elif number % 4 == 2:
            del changed[place : place + rng.randrange(1, 100)]
        else:
            changed[place:place] = rng.randbytes(rng.randrange(1, 100))
        path.write_bytes(changed)
        with pytest.raises(DataError):
            open_bundle(path)
    with pytest.raises(DataError, match="no such file"):
        open_bundle(tmp_path / "absent.zip")


def test_scores_replay_anywhere_and_a_forged_score_does_not(
    packed: RunBundle, project: Workspace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)  # no project
    result = CliRunner().invoke(app, ["replay", str(packed.path)])
    assert result.exit_code == 0 and "equal" in result.output and packed.id in result.output
    forged = tmp_path / "forged"
    shutil.copytree(project.root, forged, symlinks=True, ignore=shutil.ignore_patterns("cache", ".git"))
    path = forged / "reports" / "eval" / RUN / "scores.json"
    scores = json.loads(path.read_text())
    first = next(record for record in scores if record["metric"] == "accuracy")
    first["value"] += 1
    path.unlink()
    path.write_text(json.dumps(scores))
    pack(load_params(forged / "params.yaml"), Workspace(forged), RUN, tmp_path / "forged.zip")
    result = CliRunner().invoke(app, ["replay", "forged.zip"])
    assert result.exit_code == 1 and "accuracy" in result.output and "from its items" in result.output


def test_predictions_replay_in_the_project_with_its_weights_only(packed: RunBundle, project: Workspace) -> None:
    done = run(project.root, "vlp", "replay", packed.path.name, "--level", "predict", check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "predictions-test.jsonl: all" in done.stdout and "differs" not in done.stdout
    assert not list((project.root / ".work").glob(".replay*"))
    (weights,) = (project.checkpoint(f"finetune/{RUN}")).glob("*.safetensors")
    kept = weights.read_bytes()
    try:
        tensors = load_file(weights)
        weights.unlink()
        save_file({name: tensor + 0.001 for name, tensor in tensors.items()}, weights)
        done = run(project.root, "vlp", "replay", packed.path.name, "--level", "predict", check=False)
        assert done.returncode == 2 and "not the bundle's weights" in done.stderr
    finally:
        weights.unlink()
        weights.write_bytes(kept)


def test_the_training_replays_bit_for_bit(packed: RunBundle, project: Workspace) -> None:
    done = run(project.root, "vlp", "replay", packed.path.name, "--level", "train", check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    found = [line for line in done.stdout.splitlines() if line.endswith("bit-identical")]
    assert len(found) == len(packed.manifest["weights"])


def test_signature_names_who_packed_it(packed: RunBundle, tmp_path: Path) -> None:
    pytest.importorskip("model_signing")
    from vlp_models.pipeline.run_bundle import check_signature, sign

    for name in ("own", "other"):
        command = [
            "openssl",
            "ecparam",
            "-name",
            "prime256v1",
            "-genkey",
            "-noout",
            "-out",
            str(tmp_path / f"{name}.pem"),
        ]
        subprocess.run(command, check=True)
        public = ["-in", str(tmp_path / f"{name}.pem"), "-pubout", "-out", str(tmp_path / f"{name}.pub")]
        subprocess.run(["openssl", "ec", *public], check=True, capture_output=True)
    path = tmp_path / "run.zip"
    shutil.copy(packed.path, path)
    with pytest.raises(DataError, match="not signed"):
        check_signature(path, tmp_path / "own.pub")
    sign(path, tmp_path / "own.pem")
    check_signature(path, tmp_path / "own.pub")
    with pytest.raises(DataError, match="not signed by"):
        check_signature(path, tmp_path / "other.pub")
    path.write_bytes(path.read_bytes() + b" ")
    with pytest.raises(DataError, match="not signed by"):
        check_signature(path, tmp_path / "own.pub")
