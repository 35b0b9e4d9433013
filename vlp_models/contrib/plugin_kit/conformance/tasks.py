"""Checks of a task, on the first family that supports it. See the package."""

from __future__ import annotations

import json
import tempfile
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from vlp_models.contrib.plugin_kit.conformance.checks import Problem, Result, run_check, shorten_names
from vlp_models.contrib.plugin_kit.conformance.scenes import SOURCE, SPLIT, SampleScenes
from vlp_models.contrib.plugin_kit.conformance.trial import (
    Trial,
    build_trial,
    check_task_updates,
    make_task,
    small_config,
    supported_tasks,
)
from vlp_models.errors import ParamsError
from vlp_models.models import FAMILIES
from vlp_models.models.checkpoint import write_checkpoint
from vlp_models.tasks import task_class
from vlp_models.tasks.base import TaskModel, load_task_model
from vlp_models.tasks.scoring import EvalContext


def try_task(task: str, scenes: SampleScenes, family: str = "") -> Iterator[Result]:
    """Run the checks of a task on the first family that supports it, or on `family`, and yield each result."""
    trials: list[tuple[Trial, TaskModel]] = []

    def build() -> str:
        trial = trial_for(task, scenes, family)
        trials.append((trial, make_task(trial, task)))
        return f"on {trial.family}"

    result = run_check("builds", build)
    yield result
    if result.problem:
        return
    trial, task_model = trials[0]
    yield run_check("training", lambda: check_task_updates(trial, task))
    predictions: list[dict[str, Any]] = []
    result = run_check("prediction", lambda: check_predictions(trial, task_model, predictions))
    yield result
    if result.problem:
        return
    yield run_check("scores", lambda: check_scores(trial, task_model, predictions))
    yield run_check("official file", lambda: check_official_file(trial, task_model, predictions))
    yield run_check("save and load", lambda: check_saved_task(trial, task_model))


def trial_for(task: str, scenes: SampleScenes, family: str = "") -> Trial:
    """Build a family that supports a task."""
    for name in [family] if family else FAMILIES:
        # Families are tried in the order of their table.
        try:
            trial = build_trial(name, small_config(name), scenes)  # its config may decide which tasks it supports
        except ParamsError:  # a family whose architecture is that of a folder
            if family:
                raise
            continue
        if task in supported_tasks(trial.model):
            return trial
    needed = " or ".join(protocol.__name__ for protocol in task_class(task).needs)
    raise Problem(f"no family implements {needed} (`needs` of {task_class(task).__name__})")


def check_predictions(trial: Trial, task_model: TaskModel, predictions: list[dict[str, Any]]) -> str:
    """Predict for the scenes; the records are added to `predictions`."""
    samples = _scored_samples(trial, task_model)
    records = task_model.predict(task_model.collate(samples), samples)
    if len(records) != len(samples):
        raise Problem(f"predict returns {len(records)} records for {len(samples)} samples")
    records = task_model.postprocess(records, samples)
    for sample, record in zip(samples, records, strict=True):
        if record.get(task_model.id_key) != sample.sample_id:
            wrong = f"{record.get(task_model.id_key)!r} under `{task_model.id_key}` (`id_key`)"
            raise Problem(f"a prediction has {wrong} instead of the sample's id {sample.sample_id!r}")
        # Fields that are predicted again for the blind baseline must be in every record.
        missing = [name for name in task_model.blind_fields if name not in record]
        if missing:
            raise Problem(
                f"`blind_fields` names {missing[0]}, which predictions do not have: {shorten_names(list(record))}"
            )
    try:
        json.dumps(records)
    except (TypeError, ValueError) as error:
        raise Problem(f"predictions are not JSON: {error}; convert tensors and arrays in `predict`") from None
    predictions += records
    example = textwrap.shorten(task_model.format_prediction(records[0])[0], 60, placeholder=" ...")
    return f"{len(records)} records, such as: {example}"


def _scored_samples(trial: Trial, task_model: TaskModel) -> list[Any]:
    samples = trial.scenes.samples(task_model.prediction_view, task_model.reader)
    return [sample for sample in samples if task_model.can_score(sample)]


def check_scores(trial: Trial, task_model: TaskModel, predictions: Sequence[Mapping[str, Any]]) -> str:
    """Score the predictions."""
    context = EvalContext(source=SOURCE, validated=trial.scenes.root / "validated")
    scores = {
        score.metric: score
        for score in task_model.score(predictions, _scored_samples(trial, task_model), context).scores
    }
    for name in (task_model.metric, *task_model.headlines):
        if name not in scores and not name.startswith("gain over"):
            raise Problem(
                f"`score` returns no {name!r}, which `metric` or `headlines` names, only {shorten_names(scores)}"
            )
    metric = scores[task_model.metric]
    if metric.value is None:
        raise Problem(f"{task_model.metric}: {metric.note}")
    # The promotion gate resamples items, so a total is not enough.
    if metric.evidence is None:
        raise Problem(f"{task_model.metric} has no `evidence` per item, so the gate cannot compare two models by it")
    return f"{task_model.metric} {metric.value:.1f}"


def check_official_file(trial: Trial, task_model: TaskModel, predictions: Sequence[Mapping[str, Any]]) -> str:
    """Write the official result file and read it back."""
    context = EvalContext(source=SOURCE, validated=trial.scenes.root / "validated")
    with tempfile.TemporaryDirectory() as folder:
        path = task_model.write_official(predictions, context, SPLIT, Path(folder))
        if path is None:
            return "none written"
        if not path.is_file():
            raise Problem(f"write_official returns {path.name}, which it did not write")
        text = path.read_text(encoding="utf-8")
        if not text.strip():
            raise Problem(f"write_official wrote an empty {path.name} for {len(predictions)} predictions")
        try:
            entries = json.loads(text) if path.suffix == ".json" else text.splitlines()
        except ValueError as error:
            raise Problem(f"write_official wrote {path.name}, which is not valid JSON: {error}") from None
    return f"{path.name}, {len(entries)} entries"


def check_saved_task(trial: Trial, task_model: TaskModel) -> None:
    """Check that a saved task loads and predicts the same."""
    samples = _scored_samples(trial, task_model)
    batch = task_model.collate(samples)
    expected = task_model.postprocess(task_model.predict(batch, samples), samples)
    with tempfile.TemporaryDirectory() as folder:
        write_checkpoint(Path(folder), task_model, task_model.info, trial.scenes.tokenizer, task_model.labels)
        loaded = load_task_model(Path(folder))
    if loaded.postprocess(loaded.predict(batch, samples), samples) != expected:
        raise Problem("other predictions after saving and loading: keep all state in parameters, buffers and labels")
