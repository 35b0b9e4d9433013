"""`vlp replay`: compute a bundle's figures again: from its items, from the weights, or from the data by training.

| level   | computes again                             | needs                                                      |
|---------|--------------------------------------------|------------------------------------------------------------|
| score   | scores of all items and of the unseen ones | the bundle alone                                           |
| predict | predictions and scores                     | the run's weights and data, in the project or the bundle   |
| train   | everything, in a copy of the project       | the project's plugins, and the data that params.yaml names |
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np

from vlp_models.common.environment import program_environment
from vlp_models.common.io import hash_file, scratch_directory, symlink_or_copy
from vlp_models.common.packages import PREFIX, weights_dependency
from vlp_models.common.plugins import FOLDER as PLUGINS
from vlp_models.common.workspace import WITHDRAWN, Workspace
from vlp_models.contrib.bundles.run_bundle import ITEMS, PARAMS, SCORES, RunBundle, environment
from vlp_models.errors import DataError
from vlp_models.metrics.bootstrap import interval
from vlp_models.metrics.score import EXTRA, STATISTICS, ItemScores
from vlp_models.metrics.unseen import score_unseen
from vlp_models.params import Params, parse_params
from vlp_models.pipeline.dvc.external import (
    check_files,
    check_roots,
    files_outside_root,
    find_generator,
    named_sources,
)
from vlp_models.pipeline.stages.plan import check_params
from vlp_models.tasks import TASKS
from vlp_models.tasks.judging import judging_of
from vlp_models.tasks.scoring import read_item_scores

Level = Literal["score", "predict", "train"]
ROUNDING = 1.1e-4  # scores.json has four decimals, of which two computations may round the last one differently
COMPARED_ALONE = ("value", "low", "high", "n")  # of a score that was computed again, without training data
COMPARED = (*COMPARED_ALONE, "baselines", "leakage")
SHOWN = 5


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One thing that was computed again. equal: to what the bundle has; None: it cannot be computed at this level."""

    subject: str
    equal: bool | None
    text: str


def replay(bundle: RunBundle, level: Level, workspace: Workspace) -> list[Finding]:
    """Compute a bundle's figures again and compare.

    Raises:
        DataError: what the level needs is not in the workspace; the message names it.
    """
    if level == "score":
        return score(bundle)
    params = parse_params(bundle.params(), f"{bundle.path}: {PARAMS}", workspace.root)
    if level == "predict":
        return predict(bundle, params, workspace)
    return train(bundle, params, workspace)


def score(bundle: RunBundle) -> list[Finding]:
    """Recompute the values and intervals whose scores per item are in the bundle; list the other scores.

    A score needs items if its metric has items on another split, or is the task's main one. A metric of a built-in task
    needs its own statistic; a plugin's metric names its statistic itself. A test item that was left out, and is not in
    the score's `n`, is found only at level predict.

    Raises:
        DataError: items.parquet cannot be read, or a metric cannot be computed from it.
    """
    # Scores are popped as their items are found; the rest has no items.
    records, items = _records(bundle.json(SCORES)), _bundle_items(bundle)
    main = _main_metric(bundle.task)
    with_items = {main, *(scores.metric for scores in items)}
    checked: dict[str, list[str]] = {}  # dataset and split -> metrics
    wrong, count = [], 0
    for scores in items:
        where = f"{scores.metric} on {scores.dataset} {scores.split}"
        record = records.pop((scores.dataset, scores.split, scores.metric), None)
        if record is None:
            wrong.append(f"{where}: has items, but no score")
            continue
        if record["n"] != len(scores.items):
            wrong.append(f"{where}: n is {record['n']}, and it has {len(scores.items)} items")
        is_extra = bool(record.get(EXTRA)) and scores.metric != main
        # An extra metric's statistic is named by its plugin; a built-in metric must have its own, or any number would
        # pass.
        statistic = None if is_extra else _own_statistic(bundle.task, scores.metric)
        if statistic and scores.statistic != statistic:
            wrong.append(f"{where}: its items have the statistic {scores.statistic}, not {statistic}")
        try:
            evidence = scores.evidence()
            # (N, K) parts per item -> (1, K): the statistic is a function of the sums, such as a ratio.
            value = float(evidence.statistic(evidence.parts_NK.sum(axis=0, keepdims=True))[0])
            # The same seed draws the same resamples, so the ends are equal up to rounding.
            ends = interval(evidence, resamples=bundle.manifest["bootstrap"], seed=record["seed"]) or (None, None)
            others = list(_baselines(bundle, scores, record))
        except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
            raise DataError(f"{bundle.path}: {ITEMS}: cannot compute {where}: {error}") from None
        for name, number in zip(("value", "low", "high"), (value, *ends), strict=True):
            # Ends are None where the set is too small for an interval.
            count += number is not None
            if not _equal(record[name], number):
                wrong.append(f"{where}: {name} {record[name]}, from its items {number}")
        for name, stated, number in others:
            count += 1
            if not _equal(stated, number):
                wrong.append(f"{where}: {name} {json.dumps(stated)}, from its items {json.dumps(number)}")
        name = scores.metric if statistic else f"{scores.metric}, by its statistic {scores.statistic!r}"
        checked.setdefault(f"{scores.dataset} {scores.split}", []).append(name)
    # The other scores have no items; a headline score without them could be any number.
    for dataset, split, metric in [key for key, record in records.items() if record["value"] is not None]:
        if metric in with_items:
            wrong.append(f"{metric} on {dataset} {split}: has a score, but no items")
            del records[dataset, split, metric]
    if not items:
        wrong.append("no score has items")
    names = "; ".join(f"{where}: {', '.join(metrics)}" for where, metrics in checked.items())
    text = f"{count} values and ends of intervals follow from their items ({names})"
    findings = [Finding(subject="scores", equal=not wrong, text=_list(wrong) or text)]
    if records:
        names = _list([f"{metric} ({split})" for _, split, metric in records])
        text = f"{len(records)} scores have no items, such as {names}; --level predict computes them"
        findings.append(Finding(subject="other scores", equal=None, text=text))
    return findings


def _baselines(bundle: RunBundle, scores: ItemScores, record: Mapping[str, Any]) -> Iterator[tuple[str, Any, Any]]:
    """Yield what is stated of a score's baselines and of its unseen items: name, stated, computed from the items."""
    evidence = scores.evidence()
    for name, parts_NK in scores.baselines.items():
        value = float(evidence.statistic(parts_NK.sum(axis=0, keepdims=True))[0])
        yield f"baseline {name}", record["baselines"].get(name), value
    leakage = record.get("leakage") or {}
    subsets = [leakage[name] for name in ("without_images", "without_both") if leakage.get(name)]
    # Bundles that were packed earlier do not say which items are seen.
    if any("baselines" in subset for subset in subsets):
        names = dict.fromkeys(name for subset in subsets for name in subset["baselines"])
        constants = {name: record["baselines"][name] for name in names if name not in scores.baselines}
        resampling = {"resamples": bundle.manifest["bootstrap"], "seed": record["seed"]}
        yield "leakage", leakage, score_unseen(scores, constants, **resampling)


def _bundle_items(bundle: RunBundle) -> list[ItemScores]:
    return read_item_scores(bundle.files[ITEMS], name=f"{bundle.path}: {ITEMS}")


def _records(scores: list[dict[str, Any]]) -> dict[tuple[str, str, str], dict[str, Any]]:
    return {(record["dataset"], record["split"], record["metric"]): record for record in scores}


def predict(bundle: RunBundle, params: Params, workspace: Workspace) -> list[Finding]:
    """Predict and score again with the project's weights and data, or with the bundle's if the project has others."""
    from vlp_models.pipeline.stages import evaluate

    try:
        _check_weights_and_data(bundle, workspace)
    except DataError:
        if not bundle.is_standalone:
            raise
        return [score(bundle)[0], *predict_alone(bundle, params, workspace)]
    with scratch_directory(workspace.root / ".work" / "replay") as folder:
        copy = Workspace(folder)
        # Evaluate in a folder of links: the project's own reports stay as they are.
        for name in ("data", "checkpoints", "plugins", "packages"):
            if (workspace.root / name).exists():
                symlink_or_copy(workspace.root / name, copy.root / name)
        evaluate.run(params, copy, bundle.run)
        return [score(bundle)[0], *_compare_evaluations(bundle, copy)]


def predict_alone(bundle: RunBundle, params: Params, workspace: Workspace) -> list[Finding]:
    """Predict and score again with the weights and the test data of a standalone bundle."""
    from vlp_models.contrib.bundles.standalone import unpack
    from vlp_models.data.shards.write import index_name
    from vlp_models.pipeline.stages import evaluate

    splits = [split for split in params.evaluate.splits if f"data/shards/{index_name(split)}" in bundle.files]
    params = replace(params, evaluate=replace(params.evaluate, splits=splits))
    with scratch_directory(_folder_of_copies(workspace)) as folder:
        copy = Workspace(folder)
        unpack(bundle.files, copy, bundle.run)
        evaluate.run(params, copy, bundle.run)
        return _compare_evaluations(bundle, copy, alone=True)


def _check_weights_and_data(bundle: RunBundle, workspace: Workspace) -> None:
    """Check that a project has the weights and the data of a bundle.

    Raises:
        DataError: names what is missing or different, and how to get it.
    """
    from vlp_models.evaluation.test_set import hash_shards

    run, record = bundle.run, bundle.json(SCORES)[0]
    # Hashes are checked for the run's own weights; the checkpoints it started from need only exist.
    for name, digest in bundle.manifest["weights"].items():
        if not (workspace.root / name).is_file():
            raise DataError(f"{name}: not in this project; `dvc pull` with the bundle's dvc.lock, or use --level train")
        if name.startswith(f"checkpoints/finetune/{run}/") and hash_file(workspace.root / name) != digest:
            raise DataError(
                f"{name}: not the bundle's weights; check out its commit and `dvc pull`, or use --level train"
            )
    # `data` is the hash of the shards that the scores were computed on.
    if (digest := hash_shards(workspace.shards)) != record["data"]:
        raise DataError(
            f"data/shards is {digest}, the bundle's {record['data']}; `dvc pull` with the bundle's dvc.lock"
        )


def train(bundle: RunBundle, params: Params, workspace: Workspace) -> list[Finding]:
    """Run the pipeline up to the run's evaluation in a new project with the bundle's params.yaml."""
    with scratch_directory(_folder_of_copies(workspace)) as folder:
        project = folder / "project"
        _vlp(folder, "init", str(project))
        (project / PARAMS).write_bytes(bundle.files[PARAMS])
        _link_inputs(params, workspace, project)
        try:
            check_roots(params, project)
            check_files(params, project, regions=check_params(params).regions)
        except DataError as error:
            raise DataError(f"{error}; run the command in a project that has what the run reads") from None
        _vlp(project, "use", "--set", "tracking.uri=")  # nothing is registered
        _vlp(project, "run", f"evaluate@{bundle.run}")
        copy, findings = Workspace(project), []
        for name, digest in bundle.manifest["weights"].items():
            path = project / name
            equal = path.is_file() and hash_file(path) == digest
            findings.append(Finding(subject=name, equal=equal, text="bit-identical" if equal else "other weights"))
        again = [score(bundle)[0], *_compare_evaluations(bundle, copy)]
        return [*findings, *again, *_explain(bundle, params, findings)]


def _folder_of_copies(workspace: Workspace) -> Path:
    """Return where copies of the project are made, the same at each replay, which removes those of killed ones."""
    # Inside a project, copies go where its other scratch files are.
    if (workspace.root / ".work").is_dir():
        return workspace.root / ".work" / "replay"
    folder = Path(tempfile.gettempdir()) / f"vlp-replay-{os.getuid()}"
    # /tmp is shared: a folder that somebody else created, or a link, could redirect what is written there.
    folder.mkdir(mode=0o700, exist_ok=True)
    if folder.is_symlink() or folder.stat().st_uid != os.getuid():
        raise DataError(f"{folder}: not a folder of yours; set TMPDIR to one")
    return folder / "replay"


def _local_inputs(params: Params) -> list[str]:
    """Return the folders and files that params.yaml names and no stage writes, relative to the project root.

    Absolute paths, packages, downloads and the raw data that a generator writes are left out.
    """
    datasets = [source for name, source in params.data.items() if not find_generator(params, name)]
    # roots, files outside them, weights and vocabularies, imported features
    named = [source.root for source in datasets if source.root and not source.is_remote]
    named += [path for source in datasets for path in files_outside_root(source)]
    sources = [source for source, _ in named_sources(params, regions=True)]
    named += [source for source in sources if weights_dependency(source) and not source.startswith(PREFIX)]
    named += [path for path in (params.features.path, params.features.timm.classes) if path]
    return sorted({os.path.normpath(path) for path in named if not Path(path).is_absolute()})


def _link_inputs(params: Params, workspace: Workspace, project: Path) -> None:
    """Copy plugins; link the list of withdrawn images, and the data and files that params.yaml names, if they exist.

    The records of packages are not linked: `vlp use` writes them, in the copy.
    """
    if (plugins := workspace.root / PLUGINS).is_dir():  # not a link: Python would have its modules by two paths
        ignored = shutil.ignore_patterns("__pycache__")
        shutil.copytree(plugins, project / PLUGINS, ignore=ignored, ignore_dangling_symlinks=True)
    for name in sorted({WITHDRAWN, *_local_inputs(params)}):  # a folder before what is in it
        source, target = workspace.root / name, project / name
        if Path(name).parts[:1] == ("..",):
            raise DataError(f"{name}: outside of the project, so a copy of the project cannot have it")
        # A parent folder was linked before, so the target is already reachable through it.
        is_in_linked = not target.resolve().is_relative_to(project.resolve())
        if is_in_linked or not source.exists() or Path(name).is_relative_to(PLUGINS):
            continue
        if target.exists():
            raise DataError(f"{name}: every project has it, so a copy of the project cannot have this one's")
        symlink_or_copy(source.resolve(), target)


def _vlp(folder: Path, *words: str) -> None:
    """Run a command with its output on this terminal."""
    done = subprocess.run([sys.executable, "-m", "vlp_models.cli.main", *words], cwd=folder, env=program_environment())
    if done.returncode:
        raise DataError(f"`vlp {' '.join(words)}` failed in the copy of the project, with exit code {done.returncode}")


def _compare_evaluations(bundle: RunBundle, workspace: Workspace, *, alone: bool = False) -> list[Finding]:
    """Compare what an evaluation wrote with the bundle's: predictions, scores per item, scores (`COMPARED`).

    Args:
        alone: it was with rounded weights and without training data, maybe on fewer splits. What was not computed, and
            probabilities, are not compared.
    """
    folder, findings = workspace.evaluation(bundle.run), []
    written = {path.name for path in folder.glob("predictions-*.jsonl")}
    packed_names = {name for name in bundle.files if name.startswith("predictions-")}
    if not packed_names:
        text = "not in the bundle (`vlp pack --scores-only`)"
        findings.append(Finding(subject="predictions", equal=None, text=text))
    # A split may have predictions only in the bundle or only now: then every line differs.
    for name in sorted(written if alone else written | packed_names) if packed_names else ():
        before = bundle.files.get(name, b"").decode().splitlines()
        after = (folder / name).read_text(encoding="utf-8").splitlines() if name in written else []
        # Lines that differ, and lines that only one of the two has.
        pairs = zip(before, after, strict=False)
        differ = sum(not _predictions_equal(a, b, alone) for a, b in pairs) + abs(len(before) - len(after))
        text = f"{differ:,} of {len(before):,} differ" if differ else f"all {len(before):,} are equal"
        findings.append(Finding(subject=name, equal=not differ, text=text))
    computed = _records(json.loads((folder / SCORES).read_text(encoding="utf-8")))
    packed = _records(bundle.json(SCORES))
    # Without training data some scores cannot be computed, such as a gain over the captions of training images.
    splits = {split for _, split, _ in computed}
    absent = sorted(packed.keys() - computed.keys()) if alone else []
    packed = {key: record for key, record in packed.items() if key not in absent}
    wrong = [] if _items_equal(bundle, folder / "items.parquet", absent) else [ITEMS]
    for key in {**packed, **computed}:
        where = f"{key[2]} on {key[0]} {key[1]}"
        if key not in packed or key not in computed:
            wrong.append(f"{where}: only {'in the bundle' if key in packed else 'now'}")
            continue
        for name in COMPARED_ALONE if alone else COMPARED:
            old, new = packed[key].get(name), computed[key].get(name)
            if not _equal(old, new):
                wrong.append(f"{where}: {name} {json.dumps(old)}, now {json.dumps(new)}")
    compared = "intervals and items" if alone else "intervals, items and baselines"
    text = f"all {len(packed)} scores with their {compared} are equal"
    findings.append(Finding(subject="computed again", equal=not wrong and bool(packed), text=_list(wrong) or text))
    if alone:
        others = [f"{metric} ({split})" if split in splits else f"all of {split}" for _, split, metric in absent]
        names = "; ".join(["baselines", "leakage", "probabilities", *dict.fromkeys(others)])
        text = f"{names}: the bundle has only test data and rounded weights; --level train computes them"
        findings.append(Finding(subject="the rest", equal=None, text=text))
    return findings


def _predictions_equal(before: str, now: str, alone: bool) -> bool:
    """Return whether two lines of predictions are equal. alone: except for probabilities."""
    if before == now or not alone:
        return before == now
    from vlp_models.contrib.bundles.standalone import drop_probabilities

    return bool(drop_probabilities(json.loads(before)) == drop_probabilities(json.loads(now)))


def _items_equal(bundle: RunBundle, path: Path, left_out: Collection[tuple[str, str, str]]) -> bool:
    """Return whether two items.parquet have the same items, with parts that are equal up to rounding.

    Args:
        left_out: dataset, split and metric of items that are not compared.
    """
    packed, computed = (
        {(scores.dataset, scores.split, scores.metric): scores for scores in item_scores}
        for item_scores in (_bundle_items(bundle), read_item_scores(path))
    )
    packed = {key: scores for key, scores in packed.items() if key not in left_out}
    if packed.keys() != computed.keys():
        return False
    for key, a in packed.items():
        b = computed[key]
        # Items and groups are compared in their order, as the parts below are row by row.
        if list(a.items) != list(b.items) or list(a.groups) != list(b.groups):
            return False
        # Parts are sums of floating-point numbers and may differ in their last digits between processors.
        if a.parts_NK.shape != b.parts_NK.shape or not np.allclose(a.parts_NK, b.parts_NK, rtol=1e-6, atol=1e-9):
            return False
    return True


def _explain(bundle: RunBundle, params: Params, weights: Iterable[Finding]) -> list[Finding]:
    """Explain differing weights, if there are any, by the differences between the two environments."""
    if all(finding.equal for finding in weights):
        return []
    before: Mapping[str, str] = bundle.manifest["environment"]
    now = environment(params)
    differ = [f"{name} {before[name]}, here {now[name]}" for name in before if before[name] != now.get(name)]
    if before["mode"] != "portable":
        differ.append("`trainer.reproducible` is not `portable`: digits depend on the processor")
    text = "; ".join(differ) or "nothing known differs between the two environments: the code may (see git_commit)"
    return [Finding(subject="why", equal=False, text=text)]


def _equal(before: Any, now: Any) -> bool:
    """Return whether two values of scores.json are equal, numbers up to their rounding."""
    if isinstance(before, dict) and isinstance(now, dict):
        # Baselines and leakage are nested: compare their values under the same tolerance.
        return before.keys() == now.keys() and all(_equal(before[key], now[key]) for key in before)
    # `type` rather than `isinstance`: True is not the number 1.
    if type(before) in (int, float) and type(now) in (int, float):
        return bool(abs(before - now) <= ROUNDING + 1e-6 * abs(before))
    return bool(before == now)


def _list(wrong: list[str]) -> str:
    return "; ".join(wrong[:SHOWN]) + (f"; and {len(wrong) - SHOWN} more" if len(wrong) > SHOWN else "")


def _main_metric(task: str) -> str | None:
    """Return the metric by which versions of a built-in task are judged by default; None for a task of a plugin."""
    return judging_of(task).metric if _is_built_in(task) else None


def _own_statistic(task: str, metric: str) -> str | None:
    """Return the name of the statistic that computes a metric of a built-in task; None for a task of a plugin."""
    if not _is_built_in(task):
        return None
    # A metric with a statistic of its own shares its name; all others are means over items.
    return metric if metric in STATISTICS else "mean"


def _is_built_in(task: str) -> bool:
    """Return whether a task is of this package and no plugin replaces it."""
    return task in TASKS.builtin and TASKS[task] == TASKS.builtin[task]
