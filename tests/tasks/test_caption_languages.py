"""Captions that name their language are references and queries of that language; all others are of unknown language."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest
from photos import photo
from toy_dataset import Toy
from toy_tasks import make

from vlp_models.common.workspace import Workspace
from vlp_models.data.sample import Sample
from vlp_models.data.tables import LANGUAGES, read_languages, standard_language, write_table
from vlp_models.evaluation.test_set import slices_of
from vlp_models.metrics.retrieval import rank_similarities
from vlp_models.params import DatasetParams, load_params
from vlp_models.pipeline.stages import prepare, validate
from vlp_models.tasks.retrieval import _records
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
    source = DatasetParams.of(format="pairs", root="raw", pairs=f"pairs.{suffix}")
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


def test_the_language_of_a_caption_is_not_that_of_another_image(tmp_path: Path) -> None:
    """Two captions share an id, as in two files of a dataset; validation kept the first."""
    write_table(
        [{"caption_id": "p/2", "image_id": "p/1.jpg", "text": "a dog runs", "provenance": "a:2"}], "captions", tmp_path
    )
    lines = [{"image_id": f"p/{n}.jpg", "caption_id": "p/2", "language": code} for n, code in ((1, "en"), (3, "de"))]
    (tmp_path / LANGUAGES).write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert read_languages(tmp_path, {"p/1.jpg", "p/3.jpg"}) == {"en": {"p/1.jpg": ["a dog runs"]}}


def test_without_the_column_nothing_is_written(tmp_path: Path) -> None:
    workspace = workspace_with(tmp_path, lang=False)
    assert not list(workspace.root.rglob("languages.jsonl"))
    assert "languages" not in (workspace.validated / "manifest.json").read_text()
    assert read_languages(workspace.validated, {"own/0.png"}) == {}


def own_samples() -> list[Sample]:
    return [
        Sample(
            sample_id=f"own/{number}.png",
            image_id=f"own/{number}.png",
            source="own",
            values={"captions": tuple(text for image, text, _ in ROWS if image == f"{number}.png")},
        )
        for number in range(5)
    ]


def test_scores_and_slices_exist_per_language(toy: Toy, tmp_path: Path) -> None:
    workspace = workspace_with(tmp_path, lang=True)
    samples = own_samples()
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
    assert "the Penn Treebank tokenizer's English rules for references in de" in scores["BLEU-4 (de)"].note
    assert "tokenizer's English rules for references of unknown language" in scores["BLEU-4 (unknown)"].note
    assert "English" not in scores["BLEU-4 (en)"].note
    assert "no tokenizer here finds the words: scored over characters" in scores["BLEU-4 (zh-hant)"].note
    assert scores["CIDEr (de)"].kept is False and scores["CIDEr"].kept is True
    slices = [name for own in slices_of(samples, workspace.validated).values() for name in own]
    assert [name.partition("=")[2] for name in slices if name.startswith("language=")] == [
        *("several", "several", "zh-hant", "several", "unknown")
    ]


@pytest.mark.usefixtures("few_items_suffice")
def test_retrieval_scores_exist_per_language(toy: Toy, tmp_path: Path) -> None:
    """The German captions find their images, the English ones do not. An image's other captions are not in the way."""
    workspace = workspace_with(tmp_path, lang=True)
    samples = own_samples()
    #                  images: 0    1    2    3    4
    similarity_TI = np.array(
        [
            [0.1, 0.8, 0.7, 0.9, 0.6],  # image 0, en: its image comes last
            [0.9, 0.1, 0.1, 0.1, 0.1],  # image 0, de
            [0.2, 0.9, 0.1, 0.1, 0.1],  # image 1, de
            [0.2, 0.7, 0.1, 0.8, 0.1],  # image 1, de-at: second to image 3
            [0.0, 0.0, 0.9, 0.0, 0.0],  # image 2, zh-hant
            [0.5, 0.5, 0.5, 0.4, 0.5],  # image 3, en: its image comes last
            [0.0, 0.0, 0.0, 0.95, 0.0],  # image 3, unknown
            [0.0, 0.0, 0.0, 0.0, 0.3],  # image 4, unknown
        ],
        dtype=np.float32,
    )
    image_ids = [sample.image_id for sample in samples]
    owners = [sample.image_id for sample in samples for _ in sample["captions"]]
    predictions = _records(rank_similarities(image_ids, similarity_TI, owners), None, samples)
    context = EvalContext(source="own", validated=workspace.validated)
    task_model = make(toy, "retrieval")
    found = task_model.score(predictions, samples, context)
    scores = {score.metric: score for score in found.scores}
    ranks = {metric: (s.value, s.n) for metric, s in scores.items() if "median" in metric}
    assert ranks == {
        "median rank": (1, 8),
        "median rank (image to text)": (1, 5),
        "median rank (de)": (1, 2),
        "median rank (de, image to text)": (1, 2),
        "median rank (de-at)": (2, 1),
        "median rank (de-at, image to text)": (2, 1),  # after English 0; its German caption does not count
        "median rank (en)": (5, 2),
        "median rank (en, image to text)": (3, 2),  # of 0: 0.1, after 0.2, 0.2 and 0.5; of 3: after 0.9 and 0.8
        "median rank (unknown)": (1, 2),
        "median rank (unknown, image to text)": (2, 2),  # of 3: first; of 4: after 0.6, 0.5
        "median rank (zh-hant)": (1, 1),
        "median rank (zh-hant, image to text)": (1, 1),
    }
    assert scores["R@1 (de)"].value == 100 and scores["R@1 (en)"].value == 0
    assert scores["R@1 (de)"].kept is False and scores["R@1"].kept is True, "gates read the whole"
    assert found.baseline_values("R@1 (de)") == {"chance": 20.0}
    assert found.baseline_values("R@1 (de, image to text)") == {"chance": pytest.approx(100 / 7, abs=1e-3)}, (
        "7 of 8 captions"
    )

    without = EvalContext(source="own", validated=tmp_path / "none")
    assert [s.metric for s in task_model.score(predictions, samples, without).scores] == list(scores)[:8]
