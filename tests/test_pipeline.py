"""End to end: a clone, `vlp run`, results, promotion, predictions, a served model.

The whole pipeline runs once per test session at the smallest size, with the real commands; every test here uses one
copy of it.
"""

from __future__ import annotations

import base64
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import time
import urllib.error
import urllib.request
from pathlib import Path

import pytest
from cloned_project import BIN, commit, copy_project, run, run_in_process

pytestmark = [pytest.mark.pipeline, pytest.mark.slow, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def clone(built_project: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return copy_project(built_project, tmp_path_factory.mktemp("clone") / "project")


@pytest.mark.core
def test_run_writes_results_report_and_metrics(built_project: Path, clone: Path) -> None:
    output = (built_project.parent / "run.log").read_text()
    assert "report" in output and "mlflow ui" in output
    summary = json.loads((clone / "reports" / "summary.json").read_text())
    keys = {"dataset", "split", "model", "task", "metric", "value", "baselines", "seed", "seconds", "peak_memory_mb"}
    assert all(keys | {"git", "data"} <= record.keys() for record in summary)
    metrics = {record["metric"] for record in summary}
    assert {"CIDEr", "accuracy", "faithful captions"} <= metrics
    page = (clone / "reports" / "index.html").read_text()
    assert "<html" in page
    # These questions use few words: leakage is counted for each score, and shown in the report.
    accuracy = next(record for record in summary if record["metric"] == "accuracy")
    leakage = accuracy["leakage"]
    assert leakage["images"] == 0 and leakage["texts"] > 0 and "without_both" in leakage
    # No image is seen, so without seen images score and baselines are those of all items.
    unseen = leakage["without_images"]
    assert unseen["value"] == accuracy["value"]
    assert {name: baseline["value"] for name, baseline in unseen["baselines"].items()} == accuracy["baselines"]
    assert "No image is seen." in page and f">{leakage['texts']} of " in page
    assert json.loads((clone / "reports" / "validation.json").read_text())["tables"]["captions"]["good"]
    assert 'href="validation.html"' in page and (clone / "reports" / "validation.html").exists()
    assert "CIDEr" in run(clone, "dvc", "metrics", "show", "--json").stdout


@pytest.mark.core
def test_second_run_does_nothing(clone: Path) -> None:
    before = (clone / "dvc.lock").read_bytes()
    done = run(clone, "vlp", "run")
    assert "Running stage" not in done.stdout
    assert (clone / "dvc.lock").read_bytes() == before
    assert run(clone, "dvc", "status").stdout.strip().endswith("up to date.")


@pytest.mark.core
def test_registering_again_makes_no_second_version(clone: Path) -> None:
    versions = json.loads((clone / "reports" / "registered.json").read_text())
    assert "already registered" in run_in_process(clone, "vlp", "stage", "register").stderr
    assert json.loads((clone / "reports" / "registered.json").read_text()) == versions


def test_promote_then_caption_answer_and_serve(clone: Path) -> None:
    assert "champion is version 1" in run(clone, "vlp", "promote", "captioning").stdout
    assert "champion is version 1" in run_in_process(clone, "vlp", "promote", "vqa").stdout
    image = next((clone / "data" / "raw" / "scenes" / "images").glob("*.png"))
    assert run(clone, "vlp", "caption", str(image)).stdout.startswith(f"{image}\t")
    answers = run(clone, "vlp", "answer", str(image), "how many circles are there?").stdout.splitlines()
    assert len(answers) >= 2 and "%" in answers[1]
    missing = run_in_process(clone, "vlp", "caption", "nowhere.png", check=False)
    assert missing.returncode == 2 and "nowhere.png: file not found" in missing.stderr

    served = serve(clone, "models:/vlp-vqa@champion", image)
    assert isinstance(served[0]["answer"], str) and len(served[0]["top"]) >= 1


def test_verify_returns_1_for_a_version_that_differs_from_its_lineage(clone: Path) -> None:
    assert "holds    bundle" in run(clone, "vlp", "verify", "vqa").stdout
    (labels,) = (clone / "mlartifacts").rglob("bundle/checkpoint/labels.json")
    whole = labels.read_bytes()
    labels.write_bytes(whole.replace(b'"', b" ", 2))
    try:
        changed = run_in_process(clone, "vlp", "verify", "vqa", check=False)
    finally:
        labels.write_bytes(whole)
    assert changed.returncode == 1 and "differs  bundle   " in changed.stdout and "labels.json" in changed.stdout


def serve(clone: Path, model: str, image: Path) -> list[dict[str, object]]:
    """Serve a model with `mlflow models serve`, pickle forbidden; return the predictions for one image."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    env = {**os.environ, "PATH": f"{BIN}{os.pathsep}{os.environ['PATH']}"}
    env |= {
        "MLFLOW_TRACKING_URI": f"sqlite:///{clone / 'mlflow.db'}",
        "MLFLOW_REGISTRY_URI": f"sqlite:///{clone / 'mlflow.db'}",
        "MLFLOW_ALLOW_PICKLE_DESERIALIZATION": "false",
        "TMPDIR": str(clone.parent),
    }
    command = [str(BIN / "mlflow"), "models", "serve", "-m", model, "--env-manager", "local"]
    with (clone.parent / "serve.log").open("w") as log:
        process = subprocess.Popen(
            [*command, "--host", "127.0.0.1", "--port", str(port)],
            cwd=clone,
            env=env,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        body = {"image": base64.b64encode(image.read_bytes()).decode(), "text": "is there a circle?"}
        request = urllib.request.Request(
            f"http://127.0.0.1:{port}/invocations",
            json.dumps({"dataframe_records": [body]}).encode(),
            {"Content-Type": "application/json"},
        )
        deadline = time.monotonic() + 120
        while True:
            try:
                answer = json.loads(urllib.request.urlopen(request, timeout=60).read())
                return list(answer["predictions"])
            except urllib.error.HTTPError as error:
                raise AssertionError(error.read().decode()[-2000:]) from error
            except OSError:
                log_text = (clone.parent / "serve.log").read_text()
                assert time.monotonic() < deadline and process.poll() is None, log_text[-2000:]
                time.sleep(1)
    finally:
        os.killpg(process.pid, signal.SIGTERM)
        process.wait(30)


def stages_run(output: str) -> set[str]:
    return set(re.findall(r"Running stage '([^']+)'", output))


def test_going_back_to_earlier_params_trains_nothing(clone: Path) -> None:
    """From A to B to A: the results of A come from DVC's cache."""
    target = "finetune@tden-vqa"
    before = (clone / "checkpoints/finetune/tden-vqa/model.safetensors").read_bytes()
    run_in_process(clone, "vlp", "use", "--set", "finetune.tden-vqa.max_steps=1")
    assert stages_run(run(clone, "dvc", "repro", target).stdout) == {"plan", target}
    assert (clone / "checkpoints/finetune/tden-vqa/model.safetensors").read_bytes() != before
    run_in_process(clone, "vlp", "use", "--set", "finetune.tden-vqa.max_steps=null")
    back = run(clone, "vlp", "run")
    assert stages_run(back.stdout) == set(), "everything is in the cache"
    assert (clone / "checkpoints/finetune/tden-vqa/model.safetensors").read_bytes() == before
    assert run(clone, "dvc", "status").stdout.strip().endswith("up to date.")


def test_settings_and_code_without_effect_make_nothing_stale(clone: Path) -> None:
    params, other = clone / "params.yaml", clone / "vlp_models/models/tden/config.py"
    text, code = params.read_text(), other.read_text()
    try:
        run_in_process(
            clone, "vlp", "use", "--set", "trainer.log_every_steps=3", "--set", "trainer.checkpoint_every_steps=7"
        )
        assert run(clone, "dvc", "status").stdout.strip().endswith("up to date.")
        (clone / "vlp_models/models/another").mkdir()
        (clone / "vlp_models/models/another/model.py").write_text("x = 1\n")
        assert stages_run(run(clone, "dvc", "repro").stdout) == {"plan"}, "no stage uses another model's folder"
        other.write_text(code + "# a comment\n")
        run(clone, "dvc", "repro", "plan")
        assert json.loads(run(clone, "dvc", "status", "--json").stdout) == {}, "a comment is no change"
        other.write_text(code + "CHANGED = True\n")
        run(clone, "dvc", "repro", "plan")
        stale = json.loads(run(clone, "dvc", "status", "--json").stdout)
        assert "pretrain@tden" in stale and "features" not in stale and "tokenizer" not in stale
    finally:
        params.write_text(text)
        other.write_text(code)
        shutil.rmtree(clone / "vlp_models/models/another", ignore_errors=True)
        run(clone, "dvc", "repro", "plan")
    assert run(clone, "dvc", "status").stdout.strip().endswith("up to date.")


def test_push_clone_and_pull_reproduce_results_and_metrics(clone: Path, tmp_path: Path) -> None:
    """Nothing is stale in the clone, and every commit has its metrics."""
    run(clone, "dvc", "remote", "add", "-d", "-f", "store", str(tmp_path / "store"))
    commit(clone, "results")
    run(clone, "dvc", "push")
    copy = tmp_path / "copy"
    subprocess.run(["git", "clone", "-q", str(clone), str(copy)], check=True)
    run(copy, "dvc", "remote", "modify", "--local", "store", "url", str(tmp_path / "store"))
    run(copy, "dvc", "pull")
    assert stages_run(run(copy, "dvc", "repro", "--dry").stdout) == set()
    shown = json.loads(run(copy, "dvc", "exp", "show", "--json").stdout)
    metrics = next(entry for entry in shown if entry["rev"] == "workspace")["data"]["metrics"]
    assert metrics["reports/metrics.json"]["data"]["evaluate"]["tden-vqa"]
    assert metrics["reports/training/pretrain/tden.json"]["data"]["steps"] > 0
    assert not any("error" in found for found in metrics.values())
    assert (copy / "reports" / "curves" / "pretrain" / "tden.csv").exists()


@pytest.mark.long
def test_experiment_in_a_temporary_copy_uses_the_projects_registry(clone: Path) -> None:
    commit(clone, "before the experiment")
    versions = json.loads((clone / "reports" / "registered.json").read_text())
    done = run(clone, "dvc", "exp", "run", "--temp", "-S", "evaluate.bootstrap=60")
    assert {"evaluate@tden-vqa", "register", "report"} <= stages_run(done.stdout + done.stderr)
    assert not stages_run(done.stdout + done.stderr) & {"pretrain@tden", "finetune@tden-vqa"}
    shown = json.loads(run(clone, "dvc", "exp", "show", "--json").stdout)
    assert any(entry.get("experiments") for entry in shown)
    assert json.loads((clone / "reports" / "registered.json").read_text()) == versions
    assert "already registered" in run_in_process(clone, "vlp", "stage", "register").stderr, (
        "the registry is still there"
    )


def test_lost_registry_is_restored_by_the_next_run(clone: Path) -> None:
    versions = (clone / "reports" / "registered.json").read_bytes()
    (clone / "mlflow.db").rename(clone / "lost.db")
    try:
        assert "didn't change" in run(clone, "dvc", "repro", "register").stdout, "DVC cannot detect it"
        done = run(clone, "vlp", "run")
        assert "MLflow has lost vlp-" in done.stderr and "registering again" in done.stderr
        assert (clone / "reports" / "registered.json").read_bytes() == versions
        assert "MLflow has lost" not in run(clone, "vlp", "run").stderr
    finally:
        (clone / "lost.db").replace(clone / "mlflow.db")


def test_checkpoint_of_another_detector_is_rejected(clone: Path, tmp_path: Path) -> None:
    from vlp_models.errors import CheckpointError
    from vlp_models.serving.bundle import write_content
    from vlp_models.serving.predictor import Predictor

    shutil.copytree(clone / "checkpoints" / "finetune" / "tden-vqa", tmp_path / "checkpoint")
    shutil.copytree(clone / "data" / "detector", tmp_path / "detector")
    features = {"source": "detector", "min_score": 0.2, "max_regions": 16, "content": "roi"}
    (tmp_path / "features.json").write_text(json.dumps(features))
    config = json.loads((tmp_path / "checkpoint" / "config.json").read_text())
    (tmp_path / "checkpoint" / "config.json").write_text(json.dumps({**config, "detector_id": "another"}))
    (tmp_path / "checkpoint" / "SHA256SUMS").unlink()
    write_content(tmp_path, [])
    with pytest.raises(CheckpointError, match="trained on features of detector another"):
        Predictor(tmp_path)
