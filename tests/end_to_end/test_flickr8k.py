"""The presets flickr8k* and daquar, from raw files to scores, on generated photos in the layouts that users
download. The CNN and the BERT are small and random, so that the presets' packages are not needed.
"""

from __future__ import annotations

import csv
import importlib
import json
import shutil
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from bert_folders import HEADS, HIDDEN, INTERMEDIATE, write_bert
from PIL import Image
from safetensors.torch import load_file
from timm_toys import SMALL, write_weights

from vlp_models.cli.presets import apply_overlay
from vlp_models.common.workspace import Workspace
from vlp_models.data.tables import read_table
from vlp_models.params import Params, load_params

ROOT = Path(__file__).parents[2]
COLORS = {"red": (220, 30, 30), "green": (30, 180, 30), "blue": (30, 30, 220)}
WORDS = ("a", "image", "is", "it", "what", "picture", "wall", "in", "of", "the", "##s", ".", "?", *COLORS)
CNN, POSITIONS = "cnn.safetensors", 40
SIZES = {"hidden": HIDDEN, "heads": HEADS, "intermediate": INTERMEDIATE, "max_positions": POSITIONS}
OWN_SIZES: dict[str, dict[str, Any]] = {
    "tden": {"object_layers": 1, "sentence_layers": 2, "encoder_layers": 1, "decoder_layers": 1},
    "xgpt": {"layers": 2},
    "unified_vlp": {"layers": 2, "region_slots": 9},
    "soho": {"layers": 2, "dictionary_size": 8, "height": 64, "width": 64, "backbone": SMALL},
    "vlmo": {"layers": 2, "vl_start": 1, "side": 64, "stem_backbone": SMALL},
}
METRICS = {  # that every run of the task must have
    "captioning": ("CIDEr", "BLEU-4", "CIDEr (greedy)", "CIDEr (beam)", "CIDEr, gain over nearest-neighbor caption"),
    "retrieval": ("R@1", "median rank", "R@1 (image to text)", "median rank (image to text)"),
    "entailment": ("accuracy", "recall (neutral)", "accuracy (blind baseline)", "gain over blind baseline"),
}
Scores = dict[str, dict[str, float | None]]  # run -> metric -> value on test


def draw(path: Path, color: str, shade: int) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    picture = Image.new("RGB", (64, 48), COLORS[color])
    for x in range(64):  # so that no two are near-duplicates
        picture.putpixel((x, (x * shade) % 48), (shade * 5 % 256, x * 3, 255 - shade))
    picture.save(path, quality=95)


def write_flickr8k(root: Path) -> dict[str, list[str]]:
    """Write captions.txt, the official lists and esnlive.csv. Return the photos of each list."""
    photos = {"train": [f"{1000 + i}_ab.jpg" for i in range(48)], "dev": [f"{2000 + i}_cd.jpg" for i in range(8)]}
    captions, pairs = ["image,caption"], ["split,pairID,Flickr30kID,image,hypothesis,gold_label,explanation"]
    for names in photos.values():
        for name in names:
            number = int(name[:4])
            color, other = (sorted(COLORS)[(number + k) % 3] for k in (0, 1))
            draw(root / "Images" / name, color, number % 97)
            captions += [f"{name},a {color} picture .", f"{name},it is {color}"]
            own = f"{name[:4]}.jpg"
            hypotheses = {"entailment": f"it is {color}", "contradiction": f"it is {other}", "neutral": "a wall"}
            pairs += [f"train,{own}#0r1{k[0]},{own},{name},{text},{k},so" for k, text in hypotheses.items()]
    (root / "captions.txt").write_text("\n".join(captions) + "\n")
    (root / "esnlive.csv").write_text("\n".join(pairs) + "\n")
    for split, names in photos.items():
        (root / f"Flickr_8k.{split}Images.txt").write_text("".join(f"{name}\n" for name in names))
    return photos


def small(params: Params) -> list[str]:
    """Return settings for two updates per run (one per objective) of models that fit the toy BERT and the toy CNN."""
    changes: dict[str, Any] = {
        "features.timm": f"{{model: {SMALL}, weights: {CNN}}}",
        "features.max_regions": 9,
        "tokenizer.vocab": "bert",
        "tokenizer.min_decoded_share": 0,  # the toy BERT has a dozen words
        "trainer.precision": "32-true",
        "trainer.log_every_steps": 1,
        "evaluate.bootstrap": 20,
        "tracking.uri": "",
        "validate.near_duplicates.max_hash_distance": -1,  # images of one color are all near-duplicates
        "validate.near_duplicates.keypoints": False,
    }
    for name, model in params.models.items():
        changes |= {f"models.{name}.config.{key}": v for key, v in (SIZES | OWN_SIZES[model.family]).items()}
        changes |= {f"models.{name}.text_init": "bert"} if model.text_init else {}
        changes |= {f"models.{name}.image_init": CNN} if model.image_init else {}
    for kind in ("pretrain", "finetune"):
        changes[f"defaults.{kind}.max_regions"] = 9
        for name in getattr(params, kind):
            changes |= {f"{kind}.{name}.max_steps": 2, f"{kind}.{name}.batch_size": 8}
    for name, run in params.pretrain.items():
        if run.recipe.mix == "alternate":
            changes[f"pretrain.{name}.max_steps"] = len(run.recipe.objectives)
    return [f"{key}={json.dumps(value) if isinstance(value, bool) else value}" for key, value in changes.items()]


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    shutil.copy(ROOT / "params.yaml", tmp_path)
    write_weights(tmp_path / CNN)
    vocabulary = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *WORDS]
    write_bert(tmp_path / "bert", vocab_size=len(vocabulary), max_position_embeddings=POSITIONS)
    (tmp_path / "bert" / "vocab.txt").write_text("".join(f"{word}\n" for word in vocabulary))
    return tmp_path


@pytest.fixture
def without_java(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """METEOR loads its tables for seconds in each evaluation; tests/metrics/test_caption.py covers it."""
    monkeypatch.setenv("PATH", str(root))


def content(preset: str) -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load((ROOT / "vlp_models" / "presets" / preset).read_text())
    return found


def go(root: Path, *presets: str, without: Sequence[str] = ()) -> Scores:
    """Run the stages from prepare to evaluate with these presets applied in order. Return the test scores.

    without: runs to drop, e.g. `finetune.tden-captioning`.
    """
    file, workspace = root / "params.yaml", Workspace(root)
    for preset in presets:
        apply_overlay(file, ROOT / "vlp_models" / "presets" / preset, [])
    apply_overlay(file, None, [f"{run}=null" for run in without])
    apply_overlay(file, None, small(load_params(file)))
    params = load_params(file)
    runs = [("prepare", name) for name in params.data]
    runs += [(stage, "") for stage in ("validate", "detector", "features", "tokenizer", "shards")]
    for stage, names in (("initial", params.models), ("pretrain", params.pretrain)):
        runs += [(stage, name) for name in names]
    runs += [(stage, name) for name in params.finetune for stage in ("finetune", "evaluate")]
    for stage, name in runs:
        importlib.import_module(f"vlp_models.pipeline.stages.{stage}").run(params, workspace, name)
    found: Scores = {}
    for name in params.finetune:
        scores = json.loads((workspace.evaluation(name) / "scores.json").read_text())
        found[name] = {s["metric"]: s["value"] for s in scores if s["split"] == "test"}
    return found


def run_with_flickr8k(root: Path, *presets: str) -> None:
    """Apply presets on top of flickr8k.yaml, without its runs, and check losses and scores of every run of the presets.

    The models of flickr8k.yaml are kept, so that the shards stay the same.
    """
    write_flickr8k(root / "data" / "raw" / "flickr8k")
    base = content("flickr8k.yaml")
    own = [f"{kind}.{name}" for kind in ("pretrain", "finetune") for name in base[kind]]
    scores = go(root, "flickr8k.yaml", *presets, without=own)
    for preset in map(content, presets):
        for name, run in preset.get("pretrain", {}).items():
            objectives = set(run["recipe"]["objectives"])
            assert objectives <= filled(root, f"pretrain/{name}"), name
        for name, run in preset["finetune"].items():
            lacking = [metric for metric in METRICS[run["task"]] if scores[name].get(metric) is None]
            assert not lacking, f"{name}: {lacking}"
            if name.endswith("-scst"):
                assert {"reward", "zero_rewards"} <= filled(root, f"finetune/{name}"), f"{name}: self-critical training"


def filled(root: Path, run: str) -> set[str]:
    """Return the columns of a training curve that have values."""
    with Workspace(root).curve(run).open() as lines:
        return {name for row in csv.DictReader(lines) for name, value in row.items() if value}


def images_of(root: Path) -> dict[str, int]:
    """Return the number of valid photos of each split."""
    return Counter(row["split"] for row in read_table("images", root / "data" / "validated").to_pylist())


@pytest.mark.pipeline
def test_flickr8k_from_raw_files_to_scores_of_every_task(root: Path) -> None:
    photos = write_flickr8k(root / "data" / "raw" / "flickr8k")
    scores = go(root, "flickr8k.yaml")
    images = images_of(root)
    assert images["test"] == 2 * len(photos["dev"]), "dev is the test set of both datasets"
    assert images["train"] + images["val"] == 2 * len(photos["train"]) and images["val"], "a part of train is val"

    for run in ("tden-captioning", "tden-captioning-scst"):
        assert all(scores[run][metric] is not None for metric in METRICS["captioning"])
    assert scores["tden-captioning"]["CIDEr, gain over nearest-neighbor caption"] < 0, "after two updates"
    curve = (root / "reports" / "curves" / "finetune" / "tden-captioning-scst.csv").read_text()
    assert "reward" in curve.partition("\n")[0], "self-critical training"
    assert {"R@1", "R@1 (image to text)"} <= set(scores["tden-retrieval"])
    entailment = scores["tden-entailment"]
    assert {"recall (neutral)", "accuracy (blind baseline)", "gain over blind baseline"} <= set(entailment)
    assert "accuracy" in scores["tden-entailment-text-only"], "the text-only baseline"


@pytest.mark.pipeline
@pytest.mark.usefixtures("without_java")
def test_models_that_read_regions_run_on_flickr8k(root: Path) -> None:
    run_with_flickr8k(root, "flickr8k-xgpt.yaml", "flickr8k-unified-vlp.yaml")


@pytest.mark.pipeline
def test_models_that_read_pixels_run_on_flickr8k_with_a_frozen_cnn(root: Path) -> None:
    run_with_flickr8k(root, "flickr8k-soho.yaml", "flickr8k-vlmo.yaml")
    initial = load_file(root / CNN)
    for run, where in (
        ("soho-entailment", "model.backbone.net."),
        ("vlmo-entailment", "model.image_embedding.stem.backbone.net."),
        ("vlmo-retrieval", "model.image_embedding.stem.backbone.net."),
    ):
        weights = load_file(Workspace(root).checkpoint(f"finetune/{run}") / "model.safetensors")
        cnn = {name.removeprefix(where): w for name, w in weights.items() if name.startswith(where)}
        assert "bn1.running_mean" in cnn and all(torch.equal(w, initial[name]) for name, w in cnn.items()), run


@pytest.mark.pipeline
@pytest.mark.usefixtures("without_java")
def test_ablations_without_pretraining_run_on_flickr8k(root: Path) -> None:
    """Models named -fresh start from random weights, the others from a BERT."""
    run_with_flickr8k(root, "flickr8k-without.yaml")
    for model in ("tden", "tden-dual"):
        for name, sources in ((model, {"text_init"}), (f"{model}-fresh", set())):
            config = json.loads((Workspace(root).checkpoint(f"initial/{name}") / "config.json").read_text())
            assert set(config["provenance"]) == sources, name


@pytest.mark.pipeline
def test_daquar_from_raw_files_to_scores(root: Path) -> None:
    folder, lines = root / "data" / "raw" / "daquar", []
    for number in range(40):
        color = sorted(COLORS)[number % 3]
        draw(folder / "images" / f"image{number}.jpg", color, number)
        lines += [f"what is the picture in the image{number} ?", color]
    (folder / "all_qa_pairs.txt").write_text("\n".join(lines) + "\n")
    for split, numbers in (("train", range(32)), ("test", range(32, 40))):
        (folder / f"{split}_images_list.txt").write_text("".join(f"image{number}\n" for number in numbers))
    scores = go(root, "daquar.yaml")["tden-vqa"]
    assert images_of(root)["test"] == 8
    assert scores["accuracy"] in {100 * right / 8 for right in range(9)}, "exact match"
    assert "WUPS@0.9" in scores, "null without WordNet"
