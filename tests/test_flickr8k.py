"""presets/flickr8k.yaml, the designs beside it, and daquar.yaml, from raw files to scores, on drawn photos in the
layouts that users download.

Eyes and words are small ones with random weights: what the presets' packages hold is not needed for this.
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

ROOT = Path(__file__).parent.parent
COLORS = {"red": (220, 30, 30), "green": (30, 180, 30), "blue": (30, 30, 220)}
WORDS = ("a", "image", "is", "it", "what", "picture", "wall", "in", "of", "the", "##s", ".", "?", *COLORS)
EYES, POSITIONS = "eyes.safetensors", 40
SIZES = {"hidden": HIDDEN, "heads": HEADS, "intermediate": INTERMEDIATE, "max_positions": POSITIONS}
OWN_SIZES: dict[str, dict[str, Any]] = {
    "tden": {"object_layers": 1, "sentence_layers": 2, "encoder_layers": 1, "decoder_layers": 1},
    "xgpt": {"layers": 2},
    "unified_vlp": {"layers": 2, "region_slots": 9},
    "soho": {"layers": 2, "dictionary_size": 8, "height": 64, "width": 64, "backbone": SMALL},
    "vlmo": {"layers": 2, "vl_start": 1, "side": 64, "stem_backbone": SMALL},
}
METRICS = {  # of every run of the task
    "captioning": ("CIDEr", "BLEU-4", "CIDEr (greedy)", "CIDEr (beam)", "CIDEr, gain over nearest-neighbor caption"),
    "retrieval": ("R@1", "median rank", "R@1 (image to text)", "median rank (image to text)"),
    "entailment": ("accuracy", "recall (neutral)", "accuracy (blind baseline)", "gain over blind baseline"),
}
Scores = dict[str, dict[str, float | None]]  # run -> metric -> value on test


def draw(path: Path, colour: str, shade: int) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    picture = Image.new("RGB", (64, 48), COLORS[colour])
    for x in range(64):  # no two are copies of each other
        picture.putpixel((x, (x * shade) % 48), (shade * 5 % 256, x * 3, 255 - shade))
    picture.save(path, quality=95)


def write_flickr8k(root: Path) -> dict[str, list[str]]:
    """captions.txt, the official lists and esnlive.csv. Returns the photos of each list."""
    photos = {"train": [f"{1000 + i}_ab.jpg" for i in range(48)], "dev": [f"{2000 + i}_cd.jpg" for i in range(8)]}
    captions, pairs = ["image,caption"], ["split,pairID,Flickr30kID,image,hypothesis,gold_label,explanation"]
    for names in photos.values():
        for name in names:
            number = int(name[:4])
            colour, other = (sorted(COLORS)[(number + k) % 3] for k in (0, 1))
            draw(root / "Images" / name, colour, number % 97)
            captions += [f"{name},a {colour} picture .", f"{name},it is {colour}"]
            own = f"{name[:4]}.jpg"
            said = {"entailment": f"it is {colour}", "contradiction": f"it is {other}", "neutral": "a wall"}
            pairs += [f"train,{own}#0r1{k[0]},{own},{name},{text},{k},so" for k, text in said.items()]
    (root / "captions.txt").write_text("\n".join(captions) + "\n")
    (root / "esnlive.csv").write_text("\n".join(pairs) + "\n")
    for split, names in photos.items():
        (root / f"Flickr_8k.{split}Images.txt").write_text("".join(f"{name}\n" for name in names))
    return photos


def small(params: Params) -> list[str]:
    """The preset's runs, each two updates, or one an objective, of a model that fits the toy BERT and the toy CNN."""
    changes: dict[str, Any] = {
        "features.timm": f"{{model: {SMALL}, weights: {EYES}}}",
        "features.max_regions": 9,
        "tokenizer.vocab": "bert",
        "trainer.precision": "32-true",
        "trainer.log_every_steps": 1,
        "evaluate.bootstrap": 20,
        "tracking.uri": "",
        "validate.near_duplicates.max_hash_distance": -1,  # pictures of one colour are all alike
        "validate.near_duplicates.keypoints": False,
    }
    for name, model in params.models.items():
        changes |= {f"models.{name}.config.{key}": v for key, v in (SIZES | OWN_SIZES[model.family]).items()}
        changes |= {f"models.{name}.text_init": "bert"} if model.text_init else {}
        changes |= {f"models.{name}.image_init": EYES} if model.image_init else {}
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
    write_weights(tmp_path / EYES)
    vocabulary = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *WORDS]
    write_bert(tmp_path / "bert", vocab_size=len(vocabulary), max_position_embeddings=POSITIONS)
    (tmp_path / "bert" / "vocab.txt").write_text("".join(f"{word}\n" for word in vocabulary))
    return tmp_path


@pytest.fixture
def without_java(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """METEOR would load its tables for seconds at each evaluation; tests/metrics/test_caption.py has it."""
    monkeypatch.setenv("PATH", str(root))


def content(preset: str) -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load((ROOT / "presets" / preset).read_text())
    return found


def go(root: Path, *presets: str, without: Sequence[str] = ()) -> Scores:
    """The stages from prepare to evaluate, the presets laid one on top of the other.

    without: runs that are dropped, as `finetune.tden-captioning`.
    """
    file, workspace = root / "params.yaml", Workspace(root)
    for preset in presets:
        apply_overlay(file, ROOT / "presets" / preset, [])
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


def beside_tden(root: Path, *presets: str) -> None:
    """Presets on top of flickr8k.yaml, whose own runs are dropped; its models stay, and with them what shards hold.

    Every run of these presets has learnt what it was to learn, and has the scores of its task.
    """
    write_flickr8k(root / "data" / "raw" / "flickr8k")
    below = content("flickr8k.yaml")
    own = [f"{kind}.{name}" for kind in ("pretrain", "finetune") for name in below[kind]]
    scores = go(root, "flickr8k.yaml", *presets, without=own)
    for preset in map(content, presets):
        for name, run in preset.get("pretrain", {}).items():
            objectives = set(run["recipe"]["objectives"])
            assert objectives <= filled(root, f"pretrain/{name}"), name
        for name, run in preset["finetune"].items():
            lacking = [metric for metric in METRICS[run["task"]] if scores[name].get(metric) is None]
            assert not lacking, f"{name}: {lacking}"
            if name.endswith("-scst"):
                assert {"reward", "zero_rewards"} <= filled(root, f"finetune/{name}"), f"{name} went on by the reward"


def filled(root: Path, run: str) -> set[str]:
    """The columns of a training's curve that have values."""
    with Workspace(root).curve(run).open() as lines:
        return {name for row in csv.DictReader(lines) for name, value in row.items() if value}


def images_of(root: Path) -> dict[str, int]:
    """Split -> photos that validation let pass."""
    return Counter(row["split"] for row in read_table("images", root / "data" / "validated").to_pylist())


@pytest.mark.pipeline
def test_flickr8k_goes_from_captions_to_scores_of_every_task(root: Path) -> None:
    photos = write_flickr8k(root / "data" / "raw" / "flickr8k")
    scores = go(root, "flickr8k.yaml")
    images = images_of(root)
    assert images["test"] == 2 * len(photos["dev"]), "dev is tested on, in both datasets"
    assert images["train"] + images["val"] == 2 * len(photos["train"]) and images["val"], "a part of train is chosen on"

    for run in ("tden-captioning", "tden-captioning-scst"):
        assert all(scores[run][metric] is not None for metric in METRICS["captioning"])
    assert scores["tden-captioning"]["CIDEr, gain over nearest-neighbor caption"] < 0, "after two updates"
    curve = (root / "reports" / "curves" / "finetune" / "tden-captioning-scst.csv").read_text()
    assert "reward" in curve.partition("\n")[0], "it went on by the reward"
    assert {"R@1", "R@1 (image to text)"} <= set(scores["tden-retrieval"])
    entailment = scores["tden-entailment"]
    assert {"recall (neutral)", "accuracy (blind baseline)", "gain over blind baseline"} <= set(entailment)
    assert "accuracy" in scores["tden-entailment-text-only"], "the control that was never shown a photo"


@pytest.mark.pipeline
@pytest.mark.usefixtures("without_java")
def test_designs_that_read_regions_go_the_same_way(root: Path) -> None:
    beside_tden(root, "flickr8k-xgpt.yaml", "flickr8k-unified-vlp.yaml")


@pytest.mark.pipeline
def test_designs_that_read_pixels_go_the_same_way_and_leave_the_cnn_as_it_was(root: Path) -> None:
    beside_tden(root, "flickr8k-soho.yaml", "flickr8k-vlmo.yaml")
    eyes = load_file(root / EYES)
    for run, where in (
        ("soho-entailment", "model.backbone.net."),
        ("vlmo-entailment", "model.image_embedding.stem.backbone.net."),
        ("vlmo-retrieval", "model.image_embedding.stem.backbone.net."),
    ):
        weights = load_file(Workspace(root).checkpoint(f"finetune/{run}") / "model.safetensors")
        cnn = {name.removeprefix(where): w for name, w in weights.items() if name.startswith(where)}
        assert "bn1.running_mean" in cnn and all(torch.equal(w, eyes[name]) for name, w in cnn.items()), run


@pytest.mark.pipeline
@pytest.mark.usefixtures("without_java")
def test_what_is_left_out_can_be_compared(root: Path) -> None:
    """Runs named -fresh begin with nothing that has learnt before, the others with words."""
    beside_tden(root, "flickr8k-without.yaml")
    for model in ("tden", "tden-dual"):
        for name, learnt in ((model, {"words"}), (f"{model}-fresh", set())):
            config = json.loads((Workspace(root).checkpoint(f"initial/{name}") / "config.json").read_text())
            assert set(config["provenance"]) == learnt, name


@pytest.mark.pipeline
def test_daquar_is_answered_word_for_word(root: Path) -> None:
    folder, lines = root / "data" / "raw" / "daquar", []
    for number in range(40):
        colour = sorted(COLORS)[number % 3]
        draw(folder / "images" / f"image{number}.jpg", colour, number)
        lines += [f"what is the picture in the image{number} ?", colour]
    (folder / "all_qa_pairs.txt").write_text("\n".join(lines) + "\n")
    for split, numbers in (("train", range(32)), ("test", range(32, 40))):
        (folder / f"{split}_images_list.txt").write_text("".join(f"image{number}\n" for number in numbers))
    scores = go(root, "daquar.yaml")["tden-vqa"]
    assert images_of(root)["test"] == 8
    assert scores["accuracy"] in {100 * right / 8 for right in range(9)}, "met exactly or not"
    assert "WUPS@0.9" in scores, "null where there is no WordNet"
