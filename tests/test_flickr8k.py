"""presets/flickr8k.yaml and daquar.yaml from raw files to scores, on drawn photos in the layouts that users download.

Eyes and words are small ones with random weights: what the presets' packages hold is not needed for this.
"""

from __future__ import annotations

import importlib
import json
import shutil
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from bert_folders import HEADS, HIDDEN, INTERMEDIATE, write_bert
from PIL import Image
from timm_toys import SMALL, write_weights

from vlp_models.data.tables import read_table
from vlp_models.overlay import apply_overlay
from vlp_models.params import Params, load_params
from vlp_models.workspace.paths import Workspace

ROOT = Path(__file__).parent.parent
COLOURS = {"red": (220, 30, 30), "green": (30, 180, 30), "blue": (30, 30, 220)}
WORDS = ("a", "image", "is", "it", "what", "picture", "wall", "in", "of", "the", "##s", ".", "?", *COLOURS)
SIZES = {"hidden": HIDDEN, "heads": HEADS, "intermediate": INTERMEDIATE, "max_positions": 32}
LAYERS = {"object_layers": 1, "sentence_layers": 2, "encoder_layers": 1, "decoder_layers": 1}


def draw(path: Path, colour: str, shade: int) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    picture = Image.new("RGB", (64, 48), COLOURS[colour])
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
            colour, other = (sorted(COLOURS)[(number + k) % 3] for k in (0, 1))
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
    """The preset's runs, each two updates of a model that fits the toy BERT."""
    changes: dict[str, Any] = {
        "features.timm": f"{{model: {SMALL}, weights: eyes.safetensors}}",
        "features.max_regions": 9,
        "tokenizer.vocab": "bert",
        "trainer.precision": "32-true",
        "trainer.log_every_steps": 1,
        "evaluate.bootstrap": 20,
        "tracking.uri": "",
        "validate.near_duplicates.bits": -1,  # pictures of one colour are all alike
        "validate.near_duplicates.keypoints": False,
    }
    for name in params.models:
        changes[f"models.{name}.words"] = "bert"
        changes |= {f"models.{name}.config.{key}": value for key, value in (SIZES | LAYERS).items()}
    for kind in ("pretrain", "finetune"):
        changes[f"defaults.{kind}.max_regions"] = 9
        for name in getattr(params, kind):
            changes |= {f"{kind}.{name}.max_steps": 2, f"{kind}.{name}.batch_size": 8}
    return [f"{key}={json.dumps(value) if isinstance(value, bool) else value}" for key, value in changes.items()]


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    shutil.copy(ROOT / "params.yaml", tmp_path)
    write_weights(tmp_path / "eyes.safetensors")
    vocabulary = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *WORDS]
    write_bert(tmp_path / "bert", vocab_size=len(vocabulary), max_position_embeddings=32)
    (tmp_path / "bert" / "vocab.txt").write_text("".join(f"{word}\n" for word in vocabulary))
    return tmp_path


def go(root: Path, preset: str) -> dict[str, dict[str, float | None]]:
    """The preset's stages from prepare to evaluate. Returns run -> metric -> value on test."""
    file, workspace = root / "params.yaml", Workspace(root)
    apply_overlay(file, ROOT / "presets" / preset, [])
    apply_overlay(file, None, small(load_params(file)))
    params = load_params(file)
    runs = [("prepare", name) for name in params.data]
    runs += [(stage, "") for stage in ("validate", "detector", "features", "tokenizer", "shards")]
    for stage, names in (("initial", params.models), ("pretrain", params.pretrain)):
        runs += [(stage, name) for name in names]
    runs += [(stage, name) for name in params.finetune for stage in ("finetune", "evaluate")]
    for stage, name in runs:
        importlib.import_module(f"vlp_models.stages.{stage}").run(params, workspace, name)
    found: dict[str, dict[str, float | None]] = {}
    for name in params.finetune:
        scores = json.loads((workspace.evaluation(name) / "scores.json").read_text())
        found[name] = {s["metric"]: s["value"] for s in scores if s["split"] == "test"}
    return found


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

    captioning = ("CIDEr", "BLEU-4", "CIDEr (greedy)", "CIDEr, gain over consensus of 30 neighbours")
    for run in ("tden-captioning", "tden-captioning-scst"):
        assert all(scores[run][metric] is not None for metric in captioning)
    assert scores["tden-captioning"]["CIDEr, gain over consensus of 30 neighbours"] < 0, "after two updates"
    curve = (root / "reports" / "curves" / "finetune" / "tden-captioning-scst.csv").read_text()
    assert "reward" in curve.partition("\n")[0], "it went on by the reward"
    assert {"R@1", "R@1 (image to text)"} <= set(scores["tden-retrieval"])
    entailment = scores["tden-entailment"]
    assert {"recall (neutral)", "accuracy (image blanked)", "gain over image blanked"} <= set(entailment)
    assert "accuracy" in scores["tden-entailment-text-only"], "the control that was never shown a photo"


@pytest.mark.pipeline
def test_daquar_is_answered_word_for_word(root: Path) -> None:
    folder, lines = root / "data" / "raw" / "daquar", []
    for number in range(40):
        colour = sorted(COLOURS)[number % 3]
        draw(folder / "images" / f"image{number}.jpg", colour, number)
        lines += [f"what is the picture in the image{number} ?", colour]
    (folder / "all_qa_pairs.txt").write_text("\n".join(lines) + "\n")
    for split, numbers in (("train", range(32)), ("test", range(32, 40))):
        (folder / f"{split}_images_list.txt").write_text("".join(f"image{number}\n" for number in numbers))
    scores = go(root, "daquar.yaml")["tden-vqa"]
    assert images_of(root)["test"] == 8
    assert scores["accuracy"] in {100 * right / 8 for right in range(9)}, "met exactly or not"
    assert "WUPS@0.9" in scores, "null where there is no WordNet"
