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
from vlp_models.models import FAMILIES, family_class
from vlp_models.models.checkpoint import (
    write_checkpoint,
)
from vlp_models.tasks import task_class
from vlp_models.tasks.base import TaskModel, load_task_model, supports_task
from vlp_models.tasks.scoring import EvalContext


def try_task(task: str, scenes: SampleScenes, family: str = "") -> Iterator[Result]:
    """Run the checks of a task on the first family that supports it, or on `family`, and yield each result."""
    trials: list[tuple[Trial, TaskModel]] = []

    def build() -> str:
        trial = trial_for(task, scenes, family)
        trials.append((trial, make_task(trial, task)))
        return f"on {trial.family}"

    built = run_check("builds", build)
    yield built
    if built.problem:
        return
    trial, made = trials[0]
    yield run_check("training", lambda: check_task_updates(trial, task))
    predictions: list[dict[str, Any]] = []
    predicted = run_check("prediction", lambda: check_predictions(trial, made, predictions))
    yield predicted
    if predicted.problem:
        return
    yield run_check("scores", lambda: check_scores(trial, made, predictions))
    yield run_check("official file", lambda: check_official_file(trial, made, predictions))
    yield run_check("save and load", lambda: check_saved_task(trial, made))


def trial_for(task: str, scenes: SampleScenes, family: str = "") -> Trial:
    """Build a family that supports a task.

    Raises:
        Problem: none does.
    """
    for name in [family] if family else FAMILIES:
        if supports_task(family_class(name), task_class(task)):
            return build_trial(name, small_config(name), scenes)
        trial = build_trial(name, small_config(name), scenes)  # a class may choose another one by its config
        if task in supported_tasks(trial.model):
            return trial
    needed = " or ".join(protocol.__name__ for protocol in task_class(task).needs)
    raise Problem(f"no family implements {needed} (`needs` of {task_class(task).__name__})")


def check_predictions(trial: Trial, made: TaskModel, predictions: list[dict[str, Any]]) -> str:
    """Predict for the scenes; the records are added to `predictions`.

    Raises:
        Problem: they are not one JSON record per sample with the sample's id and the fields of the blind baseline.
    """
    samples = _scored_samples(trial, made)
    found = made.predict(made.collate(samples), samples)
    if len(found) != len(samples):
        raise Problem(f"predict returns {len(found)} records for {len(samples)} samples")
    found = made.postprocess(found, samples)
    for sample, record in zip(samples, found, strict=True):
        if record.get(made.id_key) != sample.sample_id:
            raise Problem(
                f"a prediction has {record.get(made.id_key)!r} under `{made.id_key}` (`id_key`) instead of the "
                f"sample's id {sample.sample_id!r}"
            )
        missing = [name for name in made.blind_fields if name not in record]
        if missing:
            raise Problem(
                f"`blind_fields` names {missing[0]}, which predictions do not have: {shorten_names(list(record))}"
            )
    try:
        json.dumps(found)
    except (TypeError, ValueError) as error:
        raise Problem(f"predictions are not JSON: {error}; convert tensors and arrays in `predict`") from None
    predictions += found
    shown = textwrap.shorten(made.format_prediction(found[0])[0], 60, placeholder=" ...")
    return f"{len(found)} records, such as: {shown}"


def _scored_samples(trial: Trial, made: TaskModel) -> list[Any]:
    samples = trial.scenes.samples(made.prediction_view, made.reader)
    return [sample for sample in samples if made.can_score(sample)]


def check_scores(trial: Trial, made: TaskModel, predictions: Sequence[Mapping[str, Any]]) -> str:
    """Score the predictions.

    Raises:
        Problem: the task's `metric` is not among the scores, or has no evidence for the gate.
    """
    context = EvalContext(source=SOURCE, validated=trial.scenes.root / "validated")
    scores = {score.metric: score for score in made.score(predictions, _scored_samples(trial, made), context).scores}
    for name in (made.metric, *made.headlines):
        if name not in scores and not name.startswith("gain over"):
            raise Problem(
                f"`score` returns no {name!r}, which `metric` or `headlines` names, only {shorten_names(scores)}"
            )
    metric = scores[made.metric]
    if metric.value is None:
        raise Problem(f"{made.metric}: {metric.note}")
    if metric.evidence is None:
        raise Problem(f"{made.metric} has no `evidence` per item, so the gate cannot compare two models by it")
    return f"{made.metric} {metric.value:.1f}"


def check_official_file(trial: Trial, made: TaskModel, predictions: Sequence[Mapping[str, Any]]) -> str:
    """Write the official result file and read it back.

    Raises:
        Problem: it is missing, empty or not valid JSON.
    """
    context = EvalContext(source=SOURCE, validated=trial.scenes.root / "validated")
    with tempfile.TemporaryDirectory() as folder:
        path = made.write_official(predictions, context, SPLIT, Path(folder))
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


def check_saved_task(trial: Trial, made: TaskModel) -> None:
    """Check that a saved task loads and predicts the same.

    Raises:
        CheckpointError: it does not load. Problem: it predicts something else.
    """
    samples = _scored_samples(trial, made)
    batch = made.collate(samples)
    expected = made.postprocess(made.predict(batch, samples), samples)
    with tempfile.TemporaryDirectory() as folder:
        write_checkpoint(Path(folder), made, made.info, trial.scenes.tokenizer, made.labels)
        loaded = load_task_model(Path(folder))
    if loaded.postprocess(loaded.predict(batch, samples), samples) != expected:
        raise Problem("other predictions after saving and loading: keep all state in parameters, buffers and labels")
