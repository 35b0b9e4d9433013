"""The preset language-model-decoder on the demo's project, by the real commands: trained, judged, served, exported."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from cloned_project import copy_project, run, run_in_process
from language_model_folders import write_language_model

from vlp_models import VLP

pytestmark = [pytest.mark.pipeline, pytest.mark.slow, pytest.mark.timeout(1200)]


def test_a_language_model_runs_like_the_five_and_needs_its_folder_only_for_training(
    built_project: Path, tmp_path: Path
) -> None:
    project = copy_project(built_project, tmp_path / "project")
    run_in_process(project, "vlp", "promote", "captioning")
    preset = ("vlp", "use", "language-model-decoder", "--set", "finetune.language-model-captioning.max_epochs=1")
    before = (project / "params.yaml").read_bytes()
    refused = run_in_process(project, *preset, check=False)
    assert "`models.language-model.init: data/raw/language-model`: no such folder" in refused.stderr
    assert (project / "params.yaml").read_bytes() == before
    folder = write_language_model(project / "data" / "raw" / "language-model", "llama")
    run_in_process(project, *preset)
    run(project, "vlp", "run")
    shutil.rmtree(folder)

    # judged against TDEN, which params.yaml no longer has, on the same test images
    run_in_process(project, "vlp", "promote", "captioning", check=False)
    decision = json.loads((project / "reports" / "promotion" / "captioning.json").read_text())
    assert (decision["run_model"], decision["champion_run_model"]) == ("language-model", "tden")
    metric = ("--metric", "scenes test CIDEr")
    compared = run_in_process(project, "vlp", "compare", "tden-captioning", "language-model-captioning", *metric)
    assert "8 items" in compared.stdout
    page = (project / "reports" / "index.html").read_text(encoding="utf-8")
    assert "language_model_decoder, init data/raw/language-model" in page

    lineage = json.loads(run_in_process(project, "vlp", "lineage", "vlp-captioning/2", "--json").stdout)
    (weights,) = [parent for parent in lineage["parents"] if parent["role"] == "imported weights"]
    assert (lineage["family"], weights["path"]) == ("language_model_decoder", "data/raw/language-model")

    # served and exported without the folder
    photo = str(sorted((project / "data" / "raw" / "scenes" / "images").glob("*.png"))[-1])
    served = run_in_process(project, "vlp", "caption", "--model", "vlp-captioning/2", photo).stdout
    out = tmp_path / "exported"
    refused = run_in_process(project, "vlp", "export", "vlp-captioning/2", str(out), check=False)
    assert "unknown license: imported `data/raw/language-model`" in refused.stderr
    run_in_process(project, "vlp", "export", "vlp-captioning/2", str(out), "--accept-unknown-license")
    caption = VLP.from_pretrained(str(out)).caption(photo)
    assert caption and " ".join(served.split()).endswith(" ".join(caption.split()))
    assert "It needs `pip install transformers`, too." in (out / "README.md").read_text(encoding="utf-8")
