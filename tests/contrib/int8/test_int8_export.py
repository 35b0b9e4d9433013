"""An export with weights of 8 bits is smaller, almost the same, and made only if a test shows that it is as good."""

from __future__ import annotations

from pathlib import Path

import pytest
from cloned_project import copy_project, run_in_process
from torch import Tensor

from vlp_models import VLP
from vlp_models.common.io import hash_path
from vlp_models.common.workspace import Workspace
from vlp_models.contrib.export.layout import write_export
from vlp_models.contrib.int8.equivalence import Equivalence, int8_bundle
from vlp_models.serving.predictor import Predictor


def test_int8_export_is_smaller_and_almost_the_same(
    page_project: Workspace, photo: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("vlp_models.contrib.int8.layers.SMALLEST", 1)
    bundle = page_project.root / "bundles" / "vqa" / "bundle"
    weights = bundle / "checkpoint" / "model.safetensors"
    before, size = hash_path(bundle), weights.stat().st_size
    with int8_bundle(bundle, tmp_path / "work") as smaller:
        write_export(smaller, tmp_path / "export", "")
    assert list((tmp_path / "work").iterdir()) == [] and hash_path(bundle) == before
    assert (tmp_path / "export" / "model.safetensors").stat().st_size < size
    wanted = dict(Predictor(bundle).predict([photo], ["what color is it?"])[0]["top"])
    found = dict(VLP(tmp_path / "export").predict(photo, "what color is it?")["top"])
    assert found != wanted and found == pytest.approx(wanted, abs=0.02)


@pytest.mark.parametrize(
    ("low", "high", "shown"), [(-0.4, 0.9, True), (-1.1, 0.2, False), (0.2, 1.0, False), (-3.0, 3.0, False)]
)
def test_equivalence_takes_the_whole_interval_within_the_margin(low: float, high: float, shown: bool) -> None:
    found = Equivalence(metric="CIDEr on test", before=50.0, after=50.1, low=low, high=high, margin=1.0)
    assert found.shown == shown and (", within 1" in str(found)) == shown


def shuffled(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.flip(0) if "word" in name else tensor for name, tensor in weights.items()}


@pytest.mark.pipeline
@pytest.mark.slow
def test_command_exports_weights_of_8_bits_that_are_as_good(
    built_project: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    project = copy_project(built_project, tmp_path / "project")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{project}/mlflow.db")
    photo = sorted((project / "data" / "raw" / "scenes").rglob("*.png"))[-1]
    int8 = ["vlp", "export", "captioning", str(tmp_path / "int8"), "--weights", "int8"]
    few = run_in_process(project, *int8, check=False)
    assert few.returncode == 2 and "cannot be tested: CIDEr on test has no interval" in few.stderr
    monkeypatch.setattr("vlp_models.metrics.bootstrap.MIN_GROUPS", 1)
    done = run_in_process(project, *int8, "--margin", "1000")
    assert "with weights of 8 bits" in done.stdout and ", within 1000" in done.stdout
    assert "CIDEr on test: " in (tmp_path / "int8" / "README.md").read_text()
    assert VLP(tmp_path / "int8").caption(photo)
    monkeypatch.setattr("vlp_models.contrib.int8.equivalence.quantize_linears", lambda _, weights: shuffled(weights))
    int8[3] = str(tmp_path / "bad")
    refused = run_in_process(project, *int8, "--margin", "0.001", check=False)
    assert refused.returncode == 2 and ", not within 0.001; export it with float32" in refused.stderr
    assert not (tmp_path / "bad").exists()
