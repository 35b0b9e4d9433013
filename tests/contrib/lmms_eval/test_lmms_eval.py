"""Registered models in lmms-eval. Without lmms-eval, a stand-in takes the place of the two classes that are used of it.

The last test runs the real command in the environment whose Python VLP_LMMS_PYTHON names: `make test-lmms` makes one.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
from PIL import Image

from vlp_models.common.workspace import Workspace
from vlp_models.contrib.compare.read import read_runs
from vlp_models.contrib.export.layout import write_export
from vlp_models.contrib.lmms_eval.requests import CLASS_PATH, MODEL_ID, ModelArgs, find_text, manifest
from vlp_models.data.tables import read_table
from vlp_models.errors import DataError, MissingToolError, ParamsError
from vlp_models.serving.predictor import Predictor

ROOT = Path(__file__).parents[3]
MODULE, CLASS = CLASS_PATH.rsplit(".", 1)
PYTHON = os.environ.get("VLP_LMMS_PYTHON", "")
POST_PROMPT = "\nAnswer the question using a single word or phrase."
QUESTIONS = ("is there a red circle?", "how many squares are there?", "what color is the star?", "is it large?")


class StandIn:
    """What `lmms_eval.api.model.lmms` gives the class."""

    rank = 0

    def __init__(self) -> None:
        self.task_dict: dict[str, Any] = {}
        self.cache_hook = SimpleNamespace(add_partial=lambda *_: None)


@pytest.fixture
def model_class(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    contents = {"lmms_eval": {}, "lmms_eval.api": {}, "lmms_eval.api.model": {"lmms": StandIn}, "lmms_eval.models": {}}
    contents["lmms_eval.models.registry_v2"] = {"ModelManifest": SimpleNamespace}
    for name, members in contents.items():
        module = ModuleType(name)
        vars(module).update(members)
        monkeypatch.setitem(sys.modules, name, module)
    yield getattr(importlib.import_module(MODULE), CLASS)
    del sys.modules[MODULE]


@pytest.fixture
def photos(here: Workspace) -> list[str]:
    """Return photos of the project, which gets the params.yaml with the registry's address."""
    shutil.copy(ROOT / "params.yaml", here.root)
    return [str(here.root / path) for path in read_table("images", here.validated)["path"].to_pylist()[:4]]


def ask(model: Any, documents: list[dict[str, Any]], post_prompt: str = POST_PROMPT) -> list[str]:
    """Send the requests of a task, as lmms-eval does."""
    model.task_dict = {"local": {"test": documents}}
    show = lambda document: [Image.open(path) for path in document["paths"]]  # noqa: E731
    requests = [
        SimpleNamespace(args=(document["question"] + post_prompt, {"until": ["\n"]}, show, number, "local", "test"))
        for number, document in enumerate(documents)
    ]
    return model.generate_until(requests)  # type: ignore[no-any-return]


# ---- Without lmms-eval ----------------------------------------------------------------------------------------------


def test_entry_point_names_the_class_and_imports_no_torch(model_class: Any) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    module, _, name = project["entry-points"]["lmms_eval.models"][MODEL_ID].partition(":")
    assert getattr(importlib.import_module(module), name) is manifest
    assert vars(manifest()) == {"model_id": "vlp_flows", "simple_class_path": CLASS_PATH}
    assert issubclass(model_class, StandIn)
    code = "import vlp_models.contrib.lmms_eval.requests, sys; "
    code += "print('HEAVY', sorted({'torch', 'mlflow'} & set(sys.modules)))"
    assert "HEAVY []" in subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT).stdout


@pytest.mark.parametrize(
    ("given", "request_"),
    [
        ({"version": "vlp-vqa/3"}, "vlp-vqa/3"),
        ({"version": "captioning"}, "captioning"),
        ({"model": "vlp-vqa", "version": 3}, "vlp-vqa/3"),
        ({"model": "vlp-vqa", "version": "champion"}, "vlp-vqa@champion"),
        ({"model": "vlp-vqa", "device": None, "batch_size": "8"}, "vlp-vqa"),
    ],
)
def test_arguments_name_a_version(given: dict[str, Any], request_: str) -> None:
    args = ModelArgs.parse(given)
    assert args.request == request_ and args.batch_size == int(given.get("batch_size", 1))


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({}, "name either a registered version"),
        ({"version": "vqa", "pretrained": "export"}, "name either a registered version"),
        ({"verison": "vqa"}, "unknown argument `verison`; did you mean `version`"),
        ({"version": "vqa", "batch_size": "auto"}, "--batch_size auto: must be a whole number"),
        ({"version": "champion"}, "version=champion: name its model"),
        ({"version": 3}, "version=3: name its model"),
    ],
)
def test_invalid_arguments_are_refused(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ParamsError, match=message):
        _ = ModelArgs.parse(given).request


def test_question_is_the_documents_without_the_tasks_instructions() -> None:
    prompt = "<image>\nWhat color is it?\nAnswer in one word."
    assert find_text(prompt, {"question": "what color is it?"}) == "what color is it?"
    assert find_text(prompt, {"question": "another"}) == "What color is it? Answer in one word."
    assert find_text("<image 1>Is it red?", {}) == "Is it red?"


@pytest.mark.slow
@pytest.mark.parametrize("batch_size", [1, 3])
def test_champion_captions_whatever_the_prompt_is(
    batch_size: int, model_class: Any, here: Workspace, photos: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    model = model_class(version="vlp-captioning@champion", project=str(here.root), batch_size=batch_size, device="cpu")
    assert "vlp_flows: vlp-captioning version 1, a captioning model, on cpu" in capsys.readouterr().err
    known = [p["caption"] for p in Predictor(here.root / "bundles/captioning/bundle").predict(photos)]
    assert ask(model, [{"question": "Describe it.", "paths": [path]} for path in photos]) == known


@pytest.mark.slow
def test_vqa_model_answers_the_question(model_class: Any, here: Workspace, photos: list[str]) -> None:
    model = model_class(model="vqa", version=1, project=str(here.root), batch_size="2")
    bundle = Predictor(here.root / "bundles/vqa/bundle")
    known = [found["answer"] for found in bundle.predict(photos, QUESTIONS)]
    documents = [{"question": text, "paths": [path]} for text, path in zip(QUESTIONS, photos, strict=True)]
    assert ask(model, documents) == known == ask(model, documents, post_prompt="")


@pytest.mark.slow
def test_version_of_a_server_and_an_export(
    model_class: Any, here: Workspace, photos: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_export(here.root / "bundles/captioning/bundle", tmp_path / "export", "# card\n")
    documents = [{"question": "", "paths": [path]} for path in photos]
    address = f"sqlite:///{here.root / 'mlflow.db'}"
    by_address = model_class(version="vlp-captioning/1", project=address)
    monkeypatch.setitem(sys.modules, "mlflow", None)  # an export needs none
    by_folder = model_class(pretrained=str(tmp_path / "export"))
    assert ask(by_address, documents) == ask(by_folder, documents)
    (here.root / ".work" / "registry" / "served.json").unlink(missing_ok=True)
    with pytest.raises(MissingToolError, match=r"mlflow is not installed in lmms-eval's environment: pip install"):
        model_class(version="vlp-captioning/1", project=str(here.root))


@pytest.mark.slow
def test_what_cannot_be_scored_is_refused(model_class: Any, here: Workspace, photos: list[str], tmp_path: Path) -> None:
    project = str(here.root)
    with pytest.raises(DataError, match="vlp-captioning/9: no such version"):
        model_class(version="vlp-captioning/9", project=project)
    with pytest.raises(ParamsError, match="models of the task retrieval are not supported in lmms-eval"):
        model_class(version="vlp-retrieval@champion", project=project)
    with pytest.raises(DataError, match=r"no params\.yaml; name the project's folder"):
        model_class(version="vlp-captioning@champion", project=str(tmp_path))
    model = model_class(version="captioning", project=project)
    with pytest.raises(DataError, match="local document 0 has 2 images; the captioning model takes 1"):
        ask(model, [{"question": "", "paths": photos[:2]}])
    Image.fromarray(np.zeros((2, 2, 3), np.uint8)).save(tmp_path / "small.png")
    with pytest.raises(DataError, match="local document 1: the image: 2x2 pixels"):
        ask(model, [{"question": "", "paths": [path]} for path in (photos[0], tmp_path / "small.png")])
    for method in (model.loglikelihood, model.generate_until_multi_round):
        with pytest.raises(ParamsError, match="vlp_flows answers"):
            method([])


# ---- With lmms-eval -------------------------------------------------------------------------------------------------

FUNCTIONS = """
from PIL import Image

def images(doc):
    return [Image.open(doc["path"])]

def prompt(doc, lmms_eval_specific_kwargs):
    return doc["question"] + lmms_eval_specific_kwargs["post_prompt"]

def score(doc, results):
    return {"words": len(results[0].split()), "correct": float(results[0] == doc["answer"])}
"""


def write_task(folder: Path, name: str, documents: list[dict[str, str]]) -> None:
    """Write a local task of lmms-eval: a YAML file, its functions, and its documents as JSON lines."""
    folder.mkdir(exist_ok=True)
    (folder / "utils.py").write_text(FUNCTIONS)
    data = folder / f"{name}.jsonl"
    data.write_text("".join(json.dumps(document) + "\n" for document in documents))
    metrics = [{"metric": m, "aggregation": "mean", "higher_is_better": True} for m in ("words", "correct")]
    settings = {
        **{"task": name, "dataset_path": "json", "dataset_kwargs": {"data_files": {"test": str(data)}}},
        **{"test_split": "test", "output_type": "generate_until", "doc_to_target": "answer", "metric_list": metrics},
        "lmms_eval_specific_kwargs": {"default": {"post_prompt": POST_PROMPT}},
    }
    lines = [f"{key}: {json.dumps(value)}" for key, value in settings.items()]
    functions = {"doc_to_visual": "images", "doc_to_text": "prompt", "process_results": "score"}
    lines += [f"{key}: !function utils.{function}" for key, function in functions.items()]
    (folder / f"{name}.yaml").write_text("\n".join(lines) + "\n")


@pytest.mark.slow
@pytest.mark.skipif(not PYTHON, reason="VLP_LMMS_PYTHON names no environment with lmms-eval: `make test-lmms`")
@pytest.mark.parametrize("task", ["captioning", "vqa"])
def test_real_command_scores_a_registered_version(
    task: str, here: Workspace, photos: list[str], tmp_path: Path
) -> None:
    predictor = Predictor(here.root / "bundles" / task / "bundle")
    texts = list(QUESTIONS) if task == "vqa" else None
    known = [found["answer" if task == "vqa" else "caption"] for found in predictor.predict(photos, texts)]
    right = [known[0], "none of these", *known[2:]]  # all but the second
    rows = [
        {"path": path, "question": question, "answer": answer}
        for path, question, answer in zip(photos, QUESTIONS, right, strict=True)
    ]
    write_task(tmp_path / "tasks", "local", rows)
    version = "vlp-captioning@champion" if task == "captioning" else "vlp-vqa/1"
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    environment |= {"HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path / "hf"), "TQDM_DISABLE": "1"}
    command = [PYTHON, "-m", "lmms_eval", "--model", MODEL_ID, "--model_args", f"version={version},project={here.root}"]
    command += ["--tasks", "local", "--include_path", str(tmp_path / "tasks"), "--batch_size", "3"]
    command += ["--output_path", str(tmp_path / "out"), "--log_samples"]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    log = done.stdout + done.stderr
    assert done.returncode == 0 and f"vlp_flows: vlp-{task} version 1, a {task} model" in log, log[-4000:]
    (results,) = (tmp_path / "out").glob("*_results.json")
    assert json.loads(results.read_text())["results"]["local"]["correct,none"] == 0.75
    (samples,) = (tmp_path / "out").glob("*_samples_local.jsonl")
    written = [json.loads(line)["filtered_resps"] for line in samples.read_text().splitlines()]
    assert written == known
    (run,) = read_runs(samples)
    assert run.metrics["correct"].parts_NK[:, 0].tolist() == [1, 0, 1, 1] and set(run.metrics) == {"correct", "words"}
    assert run.notes == ["items: doc_id", "clusters: input_media"]
