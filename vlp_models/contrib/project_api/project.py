"""The Python API of a project: run it, and read its results as data frames, from any folder or notebook.

    from vlp_models import Project
    project = Project("my-project")
    project.run()
    project.scores()

A `Project` has no state and no formats of its own: it reads the files that the report reads (docs/reference/scores.md).
"""

from __future__ import annotations

import csv
import json
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vlp_models.common.environment import program_environment
from vlp_models.common.io import read_json
from vlp_models.common.packages import require_module
from vlp_models.common.workspace import Workspace
from vlp_models.errors import DataError, ParamsError, VLPError
from vlp_models.params import Params, load_params
from vlp_models.params.schema import suggestion

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from pandas import DataFrame

SCORE_COLUMNS = (
    *("task", "run", "variant", "model", "seed", "dataset", "split", "metric"),
    *("value", "low", "high", "n", "baselines", "note"),
)
DECISION_COLUMNS = ("time", "action", "outcome", "task", "version", "run", "from", "from_run", "value", "gain", "by")


class CommandError(VLPError):
    """A `vlp` command failed; `exit_code` is the command's."""

    def __init__(self, message: str, exit_code: int) -> None:
        super().__init__(message)
        self.exit_code = exit_code


class Project:
    """A project on disk, made by `vlp init`, or a clone of the repository.

    Args:
        folder: the project's folder, or one inside it.

    Raises:
        DataError: neither the folder nor one above it has a params.yaml.
    """

    def __init__(self, folder: str | Path = ".") -> None:
        start = Path(folder).expanduser().resolve()
        root = next((path for path in (start, *start.parents) if (path / "params.yaml").is_file()), None)
        if root is None:
            raise DataError(f"{start}: no params.yaml in it or above it; `vlp init {folder}` makes a project")
        self.root = root
        self.workspace = Workspace(root)

    def __repr__(self) -> str:
        return f"Project({str(self.root)!r})"

    @property
    def params(self) -> Params:
        """params.yaml as it is now, checked: `project.params.finetune["tden-vqa"].optimizer.lr`.

        Raises:
            ParamsError: it is not valid.
        """
        return load_params(self.root / "params.yaml")

    def run(self, *targets: str) -> None:
        """Bring the pipeline up to date, as `vlp run TARGETS` does, and print its log.

        Args:
            targets: DVC stages such as `evaluate@tden-vqa`; default: all.

        Raises:
            CommandError: a stage failed. Finished stages are kept, and training resumes at the next run.
        """
        self.vlp("run", *targets)

    def vlp(self, *arguments: str, check: bool = True) -> int:
        """Run any `vlp` command in the project, print its log, and return its exit code.

        Example: `project.vlp("use", "tiny", "--set", "trainer.devices=1")`

        Args:
            check: raise an error if the command fails. `vlp promote` exits with 3 if the gate refuses.

        Raises:
            CommandError: the command failed.
        """
        command = [sys.executable, "-m", "vlp_models.cli.main", *arguments]
        last = ""
        with subprocess.Popen(
            command,
            cwd=self.root,
            env=program_environment(PYTHONUNBUFFERED="1"),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
        ) as process:
            assert process.stdout is not None
            try:
                for line in process.stdout:
                    print(line, end="", flush=True)  # a notebook shows what is printed, not what a process writes
                    last = line.strip() if line.startswith("vlp: ") else last
            except BaseException:
                process.terminate()  # training saves its state
                raise
        code = process.returncode
        if code and check:
            reason = last.removeprefix("vlp: ") or "its log is above"
            raise CommandError(f"`vlp {' '.join(arguments)}` exited with {code}: {reason}", code)
        return code

    def scores(self) -> DataFrame:
        """Return the scores of all runs of params.yaml, one row per run, dataset, split and metric.

        Columns: task, run, variant, model, seed, dataset, split, metric, value, low, high (95% interval; NaN without
        one), n (items), baselines (dict of name -> value), note. Rates are in percent.

        Raises:
            DataError: reports/summary.json does not exist yet.
        """
        frame = _pandas().DataFrame
        records = read_json(self._existing(self.workspace.reports / "summary.json"))
        rows = [{name: record[name] for name in SCORE_COLUMNS} for record in records if record["split"]]
        scores = frame(rows, columns=list(SCORE_COLUMNS))
        return scores.astype({"value": float, "low": float, "high": float})

    def predictions(self, run: str, split: str = "test") -> DataFrame:
        """Return the predictions of a fine-tuning run, one row per item, in the order of the test set.

        The columns depend on the task: image_id and caption, or question_id, image_id, answer and top (answers with
        their probabilities), and so on. `datasets.Dataset.from_pandas(project.predictions(run))` makes a Hugging Face
        dataset of them.

        Raises:
            ParamsError: no such run in params.yaml.
            DataError: the run was not evaluated on this split.
        """
        file = self._evaluation(run) / f"predictions-{split}.jsonl"
        lines = self._existing(file).read_text(encoding="utf-8").splitlines()
        return _pandas().DataFrame([json.loads(line) for line in lines])

    def items(self, run: str, metric: str = "", split: str = "") -> DataFrame:
        """Return the scores of single items, from which metrics, intervals and the gate's comparisons are computed.

        Columns: dataset, split, metric, item (image_id, question_id, ...), group (the unit that a bootstrap draws: the
        image), value (the metric of this item alone, in percent), slices (list, such as `question_type=how many`).
        The mean of `value` is the score of accuracies, CIDEr and recalls, not of BLEU, METEOR and macro F1.

        Args:
            metric, split: only this one; default: all.

        Raises:
            ParamsError, DataError: see `predictions`.
        """
        from vlp_models.tasks.scoring import read_item_scores

        frames = []
        for scores in read_item_scores(self._existing(self._evaluation(run) / "items.parquet")):
            if metric in ("", scores.metric) and split in ("", scores.split) and len(scores.items):
                metric_of = {"dataset": scores.dataset, "split": scores.split, "metric": scores.metric}
                values = scores.statistics[scores.statistic](scores.parts_NK)  # (N, K) sums of one item -> (N,)
                rows = {"item": scores.items, "group": scores.groups, "value": values, "slices": scores.slices}
                frames.append(_pandas().DataFrame(rows).assign(**metric_of))
        if not frames:
            raise DataError(f"{self._evaluation(run)}: no per-item scores of {metric or 'any metric'} {split}".rstrip())
        return _pandas().concat(frames, ignore_index=True)[[*metric_of, *rows]]

    def curve(self, run: str) -> DataFrame:
        """Return the loss curve of a training, one row per logged update.

        Columns: step, epoch, loss, then the other logged values by name; those of a validation start with `val_` and
        are NaN at steps without one.

        Args:
            run: `pretrain/tden` or `finetune/tden-vqa`; or the name alone, if only one of them has it.

        Raises:
            ParamsError: no such run in params.yaml.
            DataError: the run was not trained yet.
        """
        with self._existing(self.workspace.curve(self._training(run))).open(encoding="utf-8", newline="") as stream:
            rows = [{name: float(value or "nan") for name, value in row.items()} for row in csv.DictReader(stream)]
        return _pandas().DataFrame(rows).astype({"step": int})

    def decisions(self, task: str = "") -> DataFrame:
        """Return the decisions of the promotion gate, the newest last; see also `vlp history TASK`.

        Columns: time (UTC), action (promoted, refused, rolled back, ...), outcome (of the gate: promote, keep or
        inconclusive), task, version, run, from and from_run (the champion before), value and gain (of the metric, in
        percent), by, reasons (list).

        Raises:
            DataError: the ledger was changed; names the line.
        """
        rows = []
        for entry in self._ledger():
            if task in ("", entry["task"]):
                decision = entry.get("decision") or {}
                values = {**decision.get("numbers", {}), "outcome": decision.get("outcome", ""), **entry}
                row = {name: values.get(name) for name in DECISION_COLUMNS}
                rows.append({**row, "reasons": decision.get("reasons", [])})
        return _pandas().DataFrame(rows, columns=[*DECISION_COLUMNS, "reasons"])

    def champion(self, task: str) -> dict[str, Any] | None:
        """Return the champion of a task, from the promotion ledger; None without one.

        Keys: model (registered name, such as vlp-vqa), version, run, run_model, time and by (of the decision that made
        it the champion), value and gain (None if the gate did not measure them).

        Raises:
            DataError: the ledger was changed; names the line.
        """
        from vlp_models.registry.promotion.ledger import MOVES, replay

        entries = self._ledger()
        for model, state in replay(entries).items():
            of_model = [entry for entry in entries if entry["model"] == model]
            if state.champion is None or of_model[0]["task"] != task:
                continue
            moves = [entry for entry in of_model if entry["action"] in MOVES]
            made = next(entry for entry in reversed(moves) if entry["version"] == state.champion)
            numbers = (made.get("decision") or {}).get("numbers", {})
            about = {name: made.get(name) for name in ("model", "version", "run", "run_model", "time", "by")}
            return {**about, "value": numbers.get("value"), "gain": numbers.get("gain")}
        return None

    def plot_scores(self, split: str = "test") -> Figure:
        """Draw the metric that each task is judged by: runs with their 95% intervals, baselines as ticks.

        Returns:
            a matplotlib figure with one panel per task and dataset.

        Raises:
            MissingToolError: matplotlib is not installed.
            DataError: there are no scores of this split.
        """
        from vlp_models.registry.promotion.gate_rule import gate_metric_or_empty

        scores = self.scores()
        metrics = {task: gate_metric_or_empty(self.params, task) for task in scores["task"].unique()}
        ranked = scores[(scores["split"] == split) & (scores["metric"] == scores["task"].map(metrics))]
        panels = list(ranked.groupby(["task", "dataset"], sort=False))
        if not panels:
            raise DataError(f"{self.workspace.reports / 'summary.json'}: no scores of split {split}")
        figure, axes = _subplots(len(panels))
        for axis, ((task, dataset), rows) in zip(axes, panels, strict=True):
            names = list(dict.fromkeys(name for baselines in rows["baselines"] for name in baselines))
            for height, row in enumerate(rows.itertuples()):
                axis.plot([row.low, row.high], [height, height], color="C0", linewidth=2)  # nothing if NaN
                axis.plot(row.value, height, "o", color="C0", label="run, 95% interval" if not height else None)
                for number, name in enumerate(names, start=1):
                    value, label = row.baselines.get(name, float("nan")), name if not height else None
                    axis.plot(value, height, "|", color=f"C{number}", markersize=16, markeredgewidth=2, label=label)
            axis.set_yticks(range(len(rows)), list(rows["run"]))
            axis.set_ylim(len(rows) - 0.4, -0.6)  # the first run is on top
            axis.set_title(f"{task}: {metrics[task]} on {dataset} {split}", loc="left", fontsize=10)
            axis.legend(fontsize=7, loc="center left", bbox_to_anchor=(1, 0.5), frameon=False)
        return figure

    def plot_curve(self, run: str) -> Figure:
        """Draw the losses of a training over its updates; validation is dashed.

        Args:
            run: see `curve`.

        Returns:
            a matplotlib figure.

        Raises:
            MissingToolError: matplotlib is not installed.
            ParamsError, DataError: see `curve`.
        """
        curve = self.curve(run)
        kind, _, name = self._training(run).partition("/")
        settings = getattr(self.params, kind)[name]
        parts = ["loss", *(settings.recipe.objectives if kind == "pretrain" else [settings.task])]
        figure, (axis,) = _subplots(1, height=3.5)
        for number, part in enumerate(part for part in parts if part in curve):
            axis.plot(curve["step"], curve[part], color=f"C{number}", label=part)
            if f"val_{part}" in curve:
                validated = curve.dropna(subset=[f"val_{part}"])
                steps, values = validated["step"], validated[f"val_{part}"]
                axis.plot(steps, values, ".--", color=f"C{number}", label=f"{part}, validation")
        axis.set_xlabel("update")
        axis.set_title(f"{kind}/{name}: loss", loc="left", fontsize=10)
        axis.legend(fontsize=8)
        return figure

    def _existing(self, file: Path) -> Path:
        if not file.exists():
            raise DataError(f"{file}: not found; `project.run()` (or `vlp run`) writes it")
        return file

    def _evaluation(self, run: str) -> Path:
        runs = self.params.finetune
        if run not in runs:
            raise ParamsError(f"{self.root / 'params.yaml'}: no fine-tuning run `{run}`{suggestion(run, runs)}")
        return self.workspace.evaluation(run)

    def _training(self, run: str) -> str:
        """Return a run as `pretrain/RUN` or `finetune/RUN`."""
        params = self.params
        names = [f"{kind}/{name}" for kind in ("pretrain", "finetune") for name in getattr(params, kind)]
        matches = [name for name in names if run in (name, name.partition("/")[2])]
        if len(matches) != 1:
            reason = f"could be {' or '.join(matches)}" if matches else f"not in params.yaml{suggestion(run, names)}"
            raise ParamsError(f"run `{run}`: {reason}")
        return matches[0]

    def _ledger(self) -> list[dict[str, Any]]:
        from vlp_models.registry.promotion.ledger import Ledger

        return Ledger(self.root / self.params.promotion.ledger).entries()


def _pandas() -> Any:
    require_module("pandas", "a data frame")
    import pandas

    return pandas


def _subplots(count: int, height: float = 1.8) -> tuple[Figure, list[Any]]:
    require_module("matplotlib", "a figure")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(count, figsize=(8, height * count + 0.4), squeeze=False, layout="constrained")
    pyplot.close(figure)  # a notebook shows the returned figure, and not a second time
    return figure, list(axes[:, 0])
