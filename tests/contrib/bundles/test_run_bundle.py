"""Run bundles: figures that replay from items, from weights and from nothing; a changed byte is refused."""

from __future__ import annotations

import dataclasses
import random
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from cloned_project import copy_project, run
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

from vlp_models.cli.main import app
from vlp_models.common.workspace import Workspace
from vlp_models.contrib.bundles import pack as packing
from vlp_models.contrib.bundles.pack import hash_weights, pack
from vlp_models.contrib.bundles.run_bundle import RunBundle, check_signature, load_signer, open_bundle, sign
from vlp_models.errors import DataError, MissingToolError
from vlp_models.params import load_params, parse_params

pytestmark = pytest.mark.pipeline
RUN = "tden-vqa"
SHIPPED = Path(__file__).parents[3] / "docs" / "results" / "runs" / f"scenes-{RUN}.run.zip"
HOOK = "https://hooks.example.org/services/T0/B0/xyz"


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


def test_scores_replay_anywhere(packed: RunBundle, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)  # no project
    result = CliRunner().invoke(app, ["replay", str(packed.path)])
    assert result.exit_code == 0 and "equal" in result.output and packed.id in result.output


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        (f"checkpoints/finetune/{RUN}/model.safetensors", b"", f"evaluate@{RUN}, finetune@{RUN}: changed since"),
        ("checkpoints/pretrain/tden/model.safetensors", None, "pretrain@tden: changed since"),
        ("params.yaml", b"bootstrap: 7", f"`params.yaml: evaluate`: changed since .*`vlp run evaluate@{RUN}`"),
        ("params.yaml", b"max_text_len: 23", f"evaluate@{RUN}, finetune@{RUN}.*: changed since"),
        (f"reports/eval/{RUN}/scores.json", b'"value": 99.9', f"evaluate@{RUN}: changed since"),
    ],
    ids=["weights", "no weights", "bootstrap", "training", "scores"],
)
def test_pack_refuses_scores_of_another_training_or_other_params(
    name: str, change: bytes | None, message: str, project: Workspace, tmp_path: Path
) -> None:
    file, key = project.root / name, (change or b"").partition(b" ")[0]
    kept = file.read_bytes()
    file.unlink()  # a link to DVC's cache
    try:
        if change is not None:
            file.write_bytes(re.sub(key + rb" [\d.]+", change, kept) if key else kept[:-4] + bytes(4))
        with pytest.raises(DataError, match=message):
            pack(load_params(project.root / "params.yaml"), project, RUN, tmp_path / "a.run.zip")
        assert not list(tmp_path.iterdir())
    finally:
        file.unlink(missing_ok=True)
        file.write_bytes(kept)


def test_pack_refuses_a_score_that_does_not_follow_from_its_items(
    project: Workspace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(packing, "_check_recorded", lambda *_: None)
    params = load_params(project.root / "params.yaml")
    params = dataclasses.replace(params, evaluate=dataclasses.replace(params.evaluate, bootstrap=7))
    with pytest.raises(DataError, match=r"not written: .*bootstrap is 7 in bundle\.json"):
        pack(params, project, RUN, tmp_path / "a.run.zip")
    monkeypatch.setattr("vlp_models.contrib.bundles.replay.interval", lambda *_, **__: (0.0, 0.0))
    with pytest.raises(DataError, match=r"not written: accuracy on .* from its items 0\.0"):
        pack(load_params(project.root / "params.yaml"), project, RUN, tmp_path / "a.run.zip")
    assert not list(tmp_path.iterdir())


def test_packed_params_are_valid_without_their_secrets(project: Workspace, tmp_path: Path) -> None:
    file = project.root / "params.yaml"
    kept = file.read_text()
    try:
        file.write_text(kept.replace('webhook: ""', f"webhook: {HOOK}"))
        assert load_params(file).flow.webhook == HOOK
        bundle = pack(load_params(file), project, RUN, tmp_path / "a.run.zip")
    finally:
        file.write_text(kept)
    assert parse_params(open_bundle(bundle.path).params(), root=project.root).flow.webhook == ""
    assert not any(HOOK.encode() in content for content in bundle.files.values())


def test_run_without_weights_is_refused(tmp_path: Path) -> None:
    params = load_params(Path(__file__).parents[3] / "params.yaml")
    with pytest.raises(DataError, match=rf"checkpoints/finetune/{RUN}: has no weights; .*vlp run evaluate@{RUN}"):
        hash_weights(params, Workspace(tmp_path), RUN)


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


def test_standalone_bundle_predicts_without_the_project(project: Workspace, tmp_path: Path) -> None:
    run(project.root, "vlp", "pack", RUN, "--standalone", "-o", str(tmp_path / "a.run.zip"))
    command = [sys.executable, "-m", "vlp_models.cli.main", "replay", "a.run.zip", "--level", "predict"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "equal      predictions-test.jsonl: all" in done.stdout and "unchecked  the rest: baselines" in done.stdout
    assert [path.name for path in tmp_path.iterdir()] == ["a.run.zip"]
    # In the project its own weights and data are used, so everything is compared.
    done = run(project.root, "vlp", "replay", str(tmp_path / "a.run.zip"), "--level", "predict", check=False)
    assert done.returncode == 0 and "intervals, items and baselines are equal" in done.stdout


def test_without_predictions_their_scores_are_computed_again(packed: RunBundle, project: Workspace) -> None:
    run(project.root, "vlp", "pack", RUN, "--scores-only", "-o", "scores.run.zip")
    kept = {name for name in packed.files if not name.startswith("predictions-")}
    assert set(open_bundle(project.root / "scores.run.zip").files) == kept < set(packed.files)
    done = run(project.root, "vlp", "replay", "scores.run.zip", "--level", "predict", check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "unchecked  predictions: not in the bundle" in done.stdout and "equal      computed again:" in done.stdout


def test_the_training_replays_bit_for_bit(packed: RunBundle, project: Workspace) -> None:
    done = run(project.root, "vlp", "replay", packed.path.name, "--level", "train", check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    found = [line for line in done.stdout.splitlines() if line.endswith("bit-identical")]
    assert len(found) == len(packed.manifest["weights"])


def make_key(path: Path, *kind: str) -> Path:
    """Write a private key and, with the suffix .pub, its public key."""
    subprocess.run(["openssl", "genpkey", *kind, "-out", str(path)], check=True, capture_output=True)
    public = ["-in", str(path), "-pubout", "-out", str(path.with_suffix(".pub"))]
    subprocess.run(["openssl", "pkey", *public], check=True, capture_output=True)
    return path


def ec(curve: str) -> tuple[str, ...]:
    return ("-algorithm", "EC", "-pkeyopt", f"ec_paramgen_curve:{curve}")


def test_signature_names_who_packed_it(tmp_path: Path) -> None:
    pytest.importorskip("model_signing")
    own, other = (make_key(tmp_path / f"{name}.pem", *ec("P-256")) for name in ("own", "other"))
    path = tmp_path / "run.zip"
    shutil.copy(SHIPPED, path)
    with pytest.raises(DataError, match="not signed"):
        check_signature(path, own.with_suffix(".pub"))
    sign(path, load_signer(own))
    check_signature(path, own.with_suffix(".pub"))
    with pytest.raises(DataError, match="not signed by"):
        check_signature(path, other.with_suffix(".pub"))
    path.write_bytes(path.read_bytes() + b" ")
    with pytest.raises(DataError, match="not signed by"):
        check_signature(path, own.with_suffix(".pub"))


@pytest.mark.parametrize(
    "kind", [ec("secp256k1"), ("-algorithm", "ed25519"), ("-algorithm", "RSA")], ids=lambda k: k[-1]
)
def test_key_that_cannot_sign_is_refused_before_packing(kind: tuple[str, ...], tmp_path: Path) -> None:
    pytest.importorskip("model_signing")
    key = make_key(tmp_path / "a.pem", *kind)
    with pytest.raises(DataError, match=r"a\.pem: .*P-256, P-384 or P-521"):
        load_signer(key)
    with pytest.raises(DataError, match=r"a\.pub: .*P-256, P-384 or P-521"):
        check_signature(SHIPPED, key.with_suffix(".pub"))
    with pytest.raises(DataError, match=r"absent\.pem: no such file"):
        load_signer(tmp_path / "absent.pem")
    with pytest.raises(DataError, match=r"absent\.pub: no such file"):
        check_signature(SHIPPED, tmp_path / "absent.pub")


def test_missing_module_is_named_and_nothing_is_packed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """model-signing 1.1 imports OpenSSL, which it does not declare."""
    (tmp_path / "model_signing").mkdir()
    for name, text in (("__init__", ""), ("signing", "import OpenSSL_of_nobody"), ("verifying", "")):
        (tmp_path / "model_signing" / f"{name}.py").write_text(text)
    monkeypatch.syspath_prepend(str(tmp_path))
    for name in [name for name in sys.modules if name.partition(".")[0] == "model_signing"]:
        monkeypatch.delitem(sys.modules, name)
    message = "module OpenSSL_of_nobody: pip install model-signing pyopenssl"
    with pytest.raises(MissingToolError, match=message):
        check_signature(SHIPPED, tmp_path / "a.pub")
    monkeypatch.chdir(Path(__file__).parents[3])
    monkeypatch.setattr(packing, "pack", lambda *_: pytest.fail("was packed"))
    result = CliRunner().invoke(app, ["pack", RUN, "--key", str(tmp_path / "a.pem")])
    assert isinstance(result.exception, MissingToolError)
