"""Captions that name their language are references for that language; all others are of unknown language."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
from photos import photo
from toy_dataset import Toy
from toy_tasks import make

from vlp_models.common.workspace import Workspace
from vlp_models.data.sample import Sample
from vlp_models.data.tables import read_languages, standard_language
from vlp_models.evaluation.test_set import slices_of
from vlp_models.params import SourceParams, load_params
from vlp_models.pipeline.stages import prepare, validate
from vlp_models.tasks.scoring import EvalContext

ROOT = Path(__file__).parents[2]
ROWS = [
    ("0.png", "a red dog on green grass", "en"),
    ("0.png", "ein roter Hund auf dem Gras", "DE"),
    ("1.png", "zwei Kinder auf einer Schaukel", "de"),
    ("1.png", "Kinder auf einer alten Schaukel", "de_AT"),
    ("2.png", "一只红色的狗在草地上", "zh-Hant"),
    ("3.png", "two boats in a quiet harbor", "EN"),
    ("3.png", "boats in the harbor at night", ""),
    ("4.png", "a child with a yellow kite", "English, I think"),
]


CODES = {"de": "de", " PT_br ": "pt-br", "zh-Hant": "zh-hant", "gsw": "gsw"}
NOT_CODES = ("", "und", "German", "NaN", None, 3, float("nan"))


@pytest.mark.parametrize(
    ("given", "language"), [*CODES.items(), *((other, "unknown") for other in NOT_CODES)], ids=repr
)
def test_language_codes(given: object, language: str) -> None:
    assert standard_language(given) == language


def workspace_with(root: Path, *, lang: bool, suffix: str = "csv") -> Workspace:
    (root / "raw").mkdir(parents=True)
    for number in range(5):
        photo(number).save(root / "raw" / f"{number}.png")
    rows = [{"image": i, "caption": c, "split": "test", **({"lang": name} if lang else {})} for i, c, name in ROWS]
    if suffix == "csv":
        lines = [",".join(rows[0]), *(",".join(f'"{value}"' for value in row.values()) for row in rows)]
    else:
        lines = [json.dumps({name: None if value == "" else value for name, value in row.items()}) for row in rows]
    (root / "raw" / f"pairs.{suffix}").write_text("\n".join(lines), encoding="utf-8")
    params = load_params(ROOT / "params.yaml")
    rules = dataclasses.replace(params.validate, min_caption_words=1)
    source = SourceParams(format="pairs", root="raw", pairs=f"pairs.{suffix}")
    params = dataclasses.replace(params, data={"own": source}, validate=rules)
    workspace = Workspace(root)
    prepare.run(params, workspace, "own")
    validate.run(params, workspace)
    return workspace


@pytest.mark.parametrize("suffix", ["csv", "jsonl"])
def test_captions_are_grouped_by_image_and_language(tmp_path: Path, suffix: str) -> None:
    workspace = workspace_with(tmp_path, lang=True, suffix=suffix)
    found = read_languages(workspace.validated, {f"own/{number}.png" for number in range(5)})
    assert {language: {i: len(texts) for i, texts in own.items()} for language, own in found.items()} == {
        "de": {"own/0.png": 1, "own/1.png": 1},
        "de-at": {"own/1.png": 1},
        "en": {"own/0.png": 1, "own/3.png": 1},
        "unknown": {"own/3.png": 1, "own/4.png": 1},
        "zh-hant": {"own/2.png": 1},
    }
    manifest = json.loads((workspace.interim("own") / "manifest.json").read_text())
    assert manifest["counts"]["languages"] == 6
    assert manifest["counts"]["notes"] == {"captions whose `lang` is blank or no language code: unknown": 2}


def test_without_the_column_nothing_is_written(tmp_path: Path) -> None:
    workspace = workspace_with(tmp_path, lang=False)
    assert not list(workspace.root.rglob("languages.jsonl"))
    assert "languages" not in (workspace.validated / "manifest.json").read_text()
    assert read_languages(workspace.validated, {"own/0.png"}) == {}


def test_scores_and_slices_exist_per_language(toy: Toy, tmp_path: Path) -> None:
    workspace = workspace_with(tmp_path, lang=True)
    samples = [
        Sample(
            sample_id=f"own/{number}.png",
            image_id=f"own/{number}.png",
            source="own",
            values={"captions": tuple(text for image, text, _ in ROWS if image == f"{number}.png")},
        )
        for number in range(5)
    ]
    german = {0: "ein roter Hund auf dem Gras", 1: "zwei Kinder auf einer Schaukel"}
    predictions = [{"image_id": s.image_id, "caption": german.get(n, "something else")} for n, s in enumerate(samples)]
    context = EvalContext(source="own", validated=workspace.validated)
    scores = {s.metric: s for s in make(toy, "captioning").score(predictions, samples, context).scores}
    assert scores["ROUGE-L (de)"].value == pytest.approx(100), "only the German references count"
    assert scores["ROUGE-L (en)"].value < 20, "the German caption of image 0 has no word of its English reference"
    assert {name: scores[f"CIDEr ({name})"].n for name in ("de", "de-at", "en", "unknown", "zh-hant")} == {
        "de": 2,
        "de-at": 1,
        "en": 2,
        "unknown": 2,
        "zh-hant": 1,
    }
    assert scores["CIDEr"].n == 5
    assert "English tokenizer for references in de" in scores["BLEU-4 (de)"].note
    assert "English tokenizer for references of unknown language" in scores["BLEU-4 (unknown)"].note
    assert "English" not in scores["BLEU-4 (en)"].note
    assert "no tokenizer here finds the words: scored over characters" in scores["BLEU-4 (zh-hant)"].note
    assert scores["CIDEr (de)"].kept is False and scores["CIDEr"].kept is True
    slices = [name for own in slices_of(samples, workspace.validated).values() for name in own]
    assert [name.partition("=")[2] for name in slices if name.startswith("language=")] == [
        *("several", "several", "zh-hant", "several", "unknown")
    ]
