"""`features.source: tower`: patches of an image tower equal transformers' own, and train a captioner that is served."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
import yaml
from cloned_project import copy_project, run, run_in_process
from drawn_workspace import make_workspace, params_with, write_captioner_bundle
from photos import photo
from test_two_towers import SIZES, TOLERANCE
from transformers import AutoModel
from two_tower_folders import PATCH, SIDE, WRITERS, write_siglip

from vlp_models import VLP
from vlp_models.cli.presets import pin_commits
from vlp_models.common.io import hash_path
from vlp_models.common.workspace import Workspace
from vlp_models.contrib.hub_models.params import TowerParams
from vlp_models.contrib.hub_models.tower_regions import TowerExtractor, check_tower
from vlp_models.contrib.hub_models.transformers_towers import library_class
from vlp_models.data import features as storage
from vlp_models.data.features import FeatureStore
from vlp_models.errors import CheckpointError, VLPError
from vlp_models.params import Params, parse_params
from vlp_models.pipeline.check_params import check_runs
from vlp_models.pipeline.stages import detector, features
from vlp_models.serving.images import open_image
from vlp_models.serving.predictor import Predictor
from vlp_models.vision.image_io import to_tensor

ROOT = Path(__file__).parents[3]
ROWS = SIDE // PATCH


def tower_params(weights: Path | str, *, pooled: bool = True, max_regions: int = ROWS * ROWS + 1) -> Params:
    tower = TowerParams(weights=str(weights), pooled=pooled)
    return params_with(features={"source": "tower", "max_regions": max_regions, "sections": {"tower": tower}})


@pytest.fixture(scope="module", params=WRITERS)
def prepared(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Workspace]:
    """Return a model's folder, which needs no tokenizer, and a workspace whose stage `detector` has read it."""
    root = tmp_path_factory.mktemp(request.param)
    folder = WRITERS[request.param](root / "model")
    (folder / "tokenizer.json").unlink()
    workspace = make_workspace(root)
    detector.run(tower_params(folder), workspace)
    return folder, workspace


def open_tower(workspace: Workspace, max_regions: int = ROWS * ROWS + 1) -> TowerExtractor:
    return TowerExtractor({"max_regions": max_regions}, workspace.detector, "cpu")


def test_pixels_and_regions_equal_those_of_transformers(prepared: tuple[Path, Workspace]) -> None:
    folder, workspace = prepared
    extractor, reference = open_tower(workspace), AutoModel.from_pretrained(folder).eval()
    kind = reference.config.model_type
    processor = library_class(kind, 2).from_pretrained(folder)
    embeddings = []
    for seed, size in enumerate(SIZES):
        # SigLIP 2 keeps the shape of an image, which is squashed here: a square is a square in both.
        image = photo(seed, size if kind != "siglip2" else (90, 90))
        inputs = processor(images=[image], return_tensors="pt")
        pixels, _ = extractor.prepare(to_tensor(image))
        if kind != "siglip2":
            assert (pixels - inputs["pixel_values"]).abs().max() <= 1e-6
        with torch.inference_mode():
            expected = reference.get_image_features(**inputs)
            patches = reference.vision_model(**inputs).last_hidden_state[:, -ROWS * ROWS :]
            embedding = F.pad(expected.pooler_output, (0, patches.shape[2] - expected.pooler_output.shape[1]))
            full, logits, grid = extractor._model(pixels, ROWS * ROWS)
            coarse, _, coarse_grid = extractor._model(pixels, 5)
        assert (grid, coarse_grid, logits.shape) == ((ROWS, ROWS), (2, 2), (len(full), 0))
        assert (full - torch.cat([embedding, patches[0]])).abs().max() <= TOLERANCE
        # one of four by four patches is the mean of two by two
        means = F.avg_pool2d(patches[0].T.unflatten(1, (ROWS, ROWS)), ROWS // 2).flatten(1).T
        assert (coarse - torch.cat([embedding, means])).abs().max() <= TOLERANCE
        (regions,) = extractor.extract([image])
        np.testing.assert_array_equal(regions.features, full.numpy().astype(np.float16))
        embeddings.append(embedding)
    # The comparison could fail: patches and images differ.
    assert patches.std(1).max() > 0.1
    assert kind == "siglip2" or (embeddings[0] - embeddings[1]).abs().max() > 1e-3


def test_boxes_are_where_the_tower_looks_at_and_features_do_not_depend_on_threads(
    prepared: tuple[Path, Workspace],
) -> None:
    folder, workspace = prepared
    image = photo(1, (200, 150))
    (regions,) = open_tower(workspace).extract([image])
    whole = [0.0, 0.0, 1.0, 1.0]
    if json.loads((folder / "config.json").read_text())["model_type"] == "clip":
        # resized to 42 x 32 pixels, of which CLIP reads 32 x 32 from the sixth column on
        whole = [5 / 42, 0.0, 37 / 42, 1.0]
    np.testing.assert_allclose(regions.boxes[0], whole, atol=1e-6)
    np.testing.assert_allclose(regions.boxes[1, :2], whole[:2], atol=1e-6)
    np.testing.assert_allclose(regions.boxes[-1, 2:], whole[2:], atol=1e-6)
    assert regions.class_probs.shape == (ROWS * ROWS + 1, 0) and set(regions.scores) == {1}
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        (again,) = open_tower(workspace).extract([image])
    finally:
        torch.set_num_threads(threads)
    np.testing.assert_array_equal(again.features, regions.features)


def test_a_bundle_serves_without_the_folder_and_other_weights_are_other_regions(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(storage, "CHUNK_IMAGES", 4)
    params, workspace = tower_params("model", max_regions=5), make_workspace(tmp_path)
    folder = write_siglip(tmp_path / "model")
    detector.run(params, workspace)
    features.run(params, workspace)
    manifest = json.loads((workspace.features / "manifest.json").read_text())
    stored, whole = FeatureStore(workspace.features).get("drawn/0"), hash_path(workspace.features)
    assert (manifest["feature_dim"], manifest["classes"], len(stored)) == (32, [], 5)
    assert "siglip with " in capsys.readouterr().err
    features.run(params, workspace)
    assert hash_path(workspace.features) == whole
    bundle = tmp_path / "bundle"
    write_captioner_bundle(bundle, params, workspace)

    # the same folder with other weights
    model = AutoModel.from_pretrained(folder)
    model.vision_model.post_layernorm.bias.data += 0.1
    model.save_pretrained(folder)
    capsys.readouterr()
    detector.run(params, workspace)
    features.run(params, workspace)
    assert "reused" not in capsys.readouterr().err
    assert json.loads((workspace.features / "manifest.json").read_text())["detector_id"] != manifest["detector_id"]

    shutil.rmtree(folder)
    shutil.rmtree(workspace.detector)
    predictor, picture = Predictor(bundle), tmp_path / "images" / "0.png"
    assert predictor.extractor is not None
    (served,) = predictor.extractor.extract([open_image(picture)])
    np.testing.assert_array_equal(served.features, stored.features)
    assert isinstance(predictor.predict([picture])[0]["caption"], str)
    weights = bundle / "detector" / "tower.safetensors"
    assert weights.is_file()
    weights.write_bytes(weights.read_bytes()[:-4] + b"\0\0\0\0")
    with pytest.raises(CheckpointError, match=r"tower\.safetensors: damaged"):
        TowerExtractor({"max_regions": 5}, bundle / "detector", "cpu")


def with_tower(weights: str, **objectives: None) -> Params:
    raw: dict[str, Any] = yaml.safe_load((ROOT / "params.yaml").read_text())
    raw["features"] |= {"source": "tower", "tower": {"weights": weights}}
    for name in objectives:
        del raw["pretrain"]["tden"]["recipe"]["objectives"][name]
    return parse_params(raw)


def test_a_folder_that_is_no_such_model_is_refused_before_anything_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = write_siglip(tmp_path / "model")
    monkeypatch.chdir(tmp_path)
    check_runs(with_tower("model", moc=None))
    with pytest.raises(VLPError, match=r"moc` needs class probabilities, which `features\.source: tower` does not"):
        check_runs(with_tower("model"))

    def rename(old: str, new: str) -> None:
        (folder / old).rename(folder / new)

    faults = {
        "": "`features.source: tower` needs `features.tower.weights`",
        "models/absent": "`features.tower.weights: models/absent`: no such folder",
        "hf://owner/name": "`features.tower.weights: hf://owner/name`: it names no commit",
        "hf://owner/name@main": "`main` is not a commit and may move",
    }
    messages = {words: weights for weights, words in faults.items()}
    changes = {
        "contains no preprocessor_config.json": ("preprocessor_config.json", "other.json"),
        "pytorch_model.bin: a pickle": ("model.safetensors", "pytorch_model.bin"),
        "open_clip's layout": ("config.json", "open_clip_config.json"),
    }
    for words in [*messages, *changes]:
        if words in changes:
            rename(*changes[words])
        with pytest.raises(VLPError) as error:
            check_tower(TowerParams(weights=messages.get(words, "model")))
        assert words in str(error.value) and "\n" not in str(error.value)
        if words in changes:
            rename(*reversed(changes[words]))


def test_vlp_use_writes_the_commit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vlp_models.data.bert_folder.hub_function", lambda *_: lambda source, key: f"{source}@abc")
    assert pin_commits(with_tower("hf://owner/name")) == ["features.tower.weights=hf://owner/name@abc"]


@pytest.mark.pipeline
@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_a_captioner_is_trained_on_the_patches_and_captions_without_the_folder(
    built_project: Path, tmp_path: Path
) -> None:
    project = copy_project(built_project, tmp_path / "project")
    folder = write_siglip(project / "data" / "raw" / "siglip")
    tower = ("features.source=tower", "features.tower.weights=data/raw/siglip", "features.tower.pooled=true")
    changes = [*tower, "features.max_regions=10", "finetune.tden-vqa=null", "detector.source=none"]
    use = ("vlp", "use", *(word for change in changes for word in ("--set", change)))
    before = (project / "params.yaml").read_bytes()
    refused = run_in_process(project, *use, check=False)
    assert "objectives.moc` needs class probabilities, which `features.source: tower` does not have" in refused.stderr
    assert (project / "params.yaml").read_bytes() == before
    run_in_process(project, *use, "--set", "pretrain.tden.recipe.objectives.moc=null")
    run(project, "vlp", "run")
    stages = yaml.safe_load((project / "dvc.yaml").read_text())["stages"]
    assert {"data/raw/siglip", "data/plan/code/detectors/tower.json"} < set(stages["detector"]["deps"])
    current = run(project, "dvc", "status", "detector", "features").stdout
    (folder / "model.safetensors").write_bytes(b"other weights")
    assert "data/raw/siglip" in run(project, "dvc", "status", "detector").stdout and "siglip" not in current
    shutil.rmtree(folder)

    picture = sorted((project / "data" / "raw" / "scenes" / "images").glob("*.png"))[-1]
    served = run_in_process(project, "vlp", "caption", "--model", "vlp-captioning/2", str(picture)).stdout
    out = tmp_path / "exported"
    run_in_process(project, "vlp", "export", "vlp-captioning/2", str(out), "--accept-unknown-license")
    caption = VLP.from_pretrained(str(out)).caption(str(picture))
    assert caption and " ".join(served.split()).endswith(" ".join(caption.split()))
    card = (out / "README.md").read_text(encoding="utf-8")
    assert "It needs `pip install transformers`, too." in card and "data/raw/siglip" in card
