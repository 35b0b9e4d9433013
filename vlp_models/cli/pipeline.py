"""Commands that change and run the pipeline: run, use, plan, stage."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from vlp_models.common.environment import command_environment, program_environment
from vlp_models.common.plugins import Table, import_target
from vlp_models.common.portable import choose_instructions
from vlp_models.common.supervise import supervise_commands
from vlp_models.errors import DataError, ParamsError, TrackingError, VLPError, explain_access, last_words, shorten_list

if TYPE_CHECKING:
    from vlp_models.common.workspace import Workspace
    from vlp_models.params import Params
    from vlp_models.pipeline.stages.plan import PlanFacts

# What a run writes to, if it exists.
WRITTEN = (
    *("params.yaml", "dvc.yaml", "dvc.lock", "mlflow.db", "mlartifacts"),
    *("data", "checkpoints", "reports", "promotions"),
    *(".work", ".work/run.lock", ".work/locks", ".work/params", ".dvc", ".dvc/tmp", ".dvc/tmp/lock", ".dvc/tmp/rwlock"),
    *(".dvc/cache", ".dvc/cache/files", ".dvc/cache/files/md5"),
)
PLAN_NOTES = Table("plan_notes", {})  # name -> `module:function` that returns sentences on the data of params.yaml
# name -> `module:function` that returns presets that the data of params.yaml needs besides the one that is applied
FITTING_PRESETS = Table("fitting_presets", {})
BEFORE_REPRO = Table("before_repro", {})  # name -> `module:function` that runs some stages first; returns an exit code
LAUNCHED_STAGES = ("pretrain", "finetune")  # by `trainer.launcher`


def run(
    targets: Annotated[list[str] | None, typer.Argument(help="DVC stages to bring up to date; default: all.")] = None,
) -> None:
    """Bring the whole pipeline up to date, then show the results.

    Runs `dvc repro`: if nothing changed, it exits within seconds. Example: `vlp run evaluate@tden-vqa`
    """
    from vlp_models.cli.results import print_next_steps, print_places, print_results, read_scores
    from vlp_models.common.packages import require_module
    from vlp_models.common.progress import clock
    from vlp_models.common.user import require_home
    from vlp_models.common.workspace import Workspace
    from vlp_models.params import load_params
    from vlp_models.pipeline.dvc.consistency import clear_records
    from vlp_models.pipeline.dvc.external import check_files, check_roots
    from vlp_models.pipeline.dvc.lock_file import LOCK_FILE, repair
    from vlp_models.registry.client import tracking_uri

    start_time, targets = time.time(), targets or []
    # What this machine lacks, and data that does not exist, before DVC starts: its own messages name no way out.
    require_module("dvc", "`vlp run`")
    require_home()
    params, workspace = load_params(), Workspace()
    if problem := explain_permissions(workspace.root) or explain_git(workspace.root):
        raise DataError(problem)
    tracking_uri(params.tracking, workspace.root)  # raises where MLflow's database cannot be
    if datasets := _datasets_of(targets, params):
        check_roots(params, workspace.root, datasets)
    with run_lock(workspace, "run"):
        summary = workspace.reports / "summary.json"
        before = read_scores(summary)  # DVC deletes the file before the stage `report`
        updated, facts = write_plan(params, workspace)
        if updated:
            print("dvc.yaml updated from params.yaml", file=sys.stderr)
        if not targets:
            check_files(params, workspace.root, regions=facts.regions)
        # Later, `vlp plan` prints what too few images rule out.
        is_first = not (workspace.root / LOCK_FILE).exists()
        notes = import_target(PLAN_NOTES["sizes"])(params, workspace) if is_first and "sizes" in PLAN_NOTES else []
        for line in [*notes, *repair(workspace.root)]:
            print(line, file=sys.stderr)
        clear_records(workspace.root)
        code = _reproduce(params, workspace, targets, start_time)
        if not code:
            print()
            if summary.exists():
                print_results(summary, before)
            print_places(params, workspace)
            print(f"took       {clock(time.time() - start_time)}")
            print_next_steps(params, workspace)
    raise typer.Exit(code)


def _datasets_of(targets: list[str], params: Params) -> list[str]:
    """Return the datasets that the targets read: every stage after `prepare` reads all of them."""
    # An option of `dvc repro`, such as `--force`, is no stage.
    stages = [target for target in targets if not target.startswith("-")]
    if stages and all(target.startswith(("plan", "generate", "prepare@")) for target in stages):
        return [name for name in params.data if f"prepare@{name}" in stages]
    return list(params.data)


def _reproduce(params: Params, workspace: Workspace, targets: list[str], start_time: float) -> int:
    """Run `dvc repro`, then bring MLflow up to date: metrics that it missed, versions that it lost. Return the code."""
    from vlp_models.common.workspace import REGISTERED
    from vlp_models.pipeline.dvc.repro import REPRO
    from vlp_models.registry.mlflow_run import end_dead_runs, send_unsent
    from vlp_models.registry.receipts import find_lost_versions

    # VLP_GRACE: seconds that a training has to save: large models need time, and no scheduler kills it first.
    environment = {"VLP_GRACE": "600", **command_environment()}
    end_dead_runs(workspace.root)  # a training that resumes continues its run
    code = 0
    if not targets:
        # What was trained in parallel is up to date for the `dvc repro` after it.
        for target in BEFORE_REPRO.values():
            code = code or import_target(target)(params, workspace.root, environment, supervise_commands)
    code = code or supervise_commands([[*REPRO, *targets]], environment)
    if code:
        print(
            "\nThe pipeline stopped at the stage above. Finished stages are kept; run the same command again to "
            "continue (training resumes from its last checkpoint).",
            file=sys.stderr,
        )
    # Metrics of runs that ended while MLflow was down are still in .work/mlflow.
    send_unsent(params.tracking, workspace.root)
    end_dead_runs(workspace.root)
    if code or (targets and "register" not in targets):
        return code
    # MLflow takes seconds to import, so it is not asked about versions that this run has registered itself. A stage
    # whose result is taken from DVC's cache does not touch the file.
    touched = workspace.root / REGISTERED
    if touched.exists() and touched.stat().st_mtime >= start_time:
        return 0
    try:
        lost = find_lost_versions(params.tracking, workspace.root)
    except TrackingError as error:
        print(f"cannot check whether the registered versions still exist: {error}", file=sys.stderr)
        return 0
    if not lost:
        return 0
    print(f"MLflow has lost {', '.join(lost)}; registering again", file=sys.stderr)
    # Forced, since DVC finds the stage up to date, and `register` alone.
    return supervise_commands([[*REPRO, "--force", "--single-item", "register"]], environment)


def complete_preset() -> list[str]:
    from vlp_models.cli.presets import list_presets

    return list(list_presets())


def use(
    preset: Annotated[
        str,
        typer.Argument(
            help="A preset to merge into params.yaml: a name from `vlp use --list`, or your own YAML file.",
            autocompletion=complete_preset,
        ),
    ] = "",
    assign: Annotated[list[str] | None, typer.Option("--set", "-S", help="`key.path=value`, after the preset.")] = None,
    list_all: Annotated[bool, typer.Option("--list", help="List the presets and change nothing.")] = False,
) -> None:
    """Apply a preset or single values to params.yaml, and update dvc.yaml.

    The result is checked before anything is written; comments are kept. Your own presets are YAML files in presets/.
    Example: `vlp use vlmo --set trainer.devices=4`
    """
    from vlp_models.cli.presets import describe_preset, find_preset, list_presets, merge_overlay
    from vlp_models.common.io import write_together
    from vlp_models.common.workspace import Workspace
    from vlp_models.params import load_params
    from vlp_models.pipeline.dvc.dvc_yaml import FILE
    from vlp_models.pipeline.dvc.external import explain_roots

    if list_all:
        for name, path in list_presets().items():
            print(f"{name:22} {describe_preset(path)}")
        return
    workspace, file = Workspace(), Path("params.yaml")
    with run_lock(workspace, "use"):
        notes_before: list[str] = []
        with suppress(VLPError):  # params.yaml may be invalid, and this command may repair it
            notes_before = _notes(load_params(), workspace)
        preset_file, assignments = find_preset(preset) if preset else None, assign or []
        # Nothing is written before the merged params and the plan have been checked.
        merged = merge_overlay(file, preset_file, assignments)
        fitting = [import_target(target) for target in FITTING_PRESETS.values() if preset_file]
        if further := [path for find in fitting for path in find(file, preset_file, assignments, merged)]:
            merged = merge_overlay(file, preset_file, assignments, further)
        planned = plan_files(merged.params, workspace, merged.facts, merged.raw)
        # Together: params.yaml and dvc.yaml must not contradict each other.
        write_together({file: merged.text, **planned})
    for line in merged.changes:
        print(line)
    if workspace.root / FILE in planned:
        print(f"{FILE} updated")
    for line in explain_roots(merged.params, workspace.root):
        print(f"before `vlp run`: {line}", file=sys.stderr)
    for sentence in _notes(merged.params, workspace):
        # Only what this change has caused.
        if sentence not in notes_before:
            print(sentence, file=sys.stderr)


def plan() -> None:
    """Regenerate dvc.yaml after editing params.yaml. Checks params.yaml, its data folders and listings first.

    Lists the data that is in neither git nor DVC with the command that tracks it, and what too few images rule out.
    """
    from vlp_models.common.workspace import Workspace
    from vlp_models.params import load_params
    from vlp_models.pipeline.dvc.dvc_yaml import is_generated
    from vlp_models.pipeline.dvc.external import check_roots

    params, workspace = load_params(), Workspace()
    # `vlp ingest` creates its dataset with the first batch, which a flow does after this.
    check_roots(params, workspace.root, ingested=False)
    notes = _notes(params, workspace, strict=True)
    if write_plan(params, workspace)[0]:
        print("dvc.yaml updated")
    elif is_generated(Path.cwd()):
        print("dvc.yaml is up to date")
    for sentence in notes:
        print(sentence, file=sys.stderr)


def _notes(params: Params, workspace: Workspace, *, strict: bool = False) -> list[str]:
    """Return sentences on the data: what another copy of the project would not have, what there is too little of."""
    return [line for target in PLAN_NOTES.values() for line in import_target(target)(params, workspace, strict=strict)]


def complete_stage() -> list[str]:
    from vlp_models.pipeline.dvc.graph import STAGES

    return list(STAGES)


def stage(
    name: Annotated[
        str,
        typer.Argument(
            help="A stage of dvc.yaml: prepare, pretrain, ...; `all` runs every one in order, without DVC.",
            autocompletion=complete_stage,
        ),
    ],
    key: Annotated[str, typer.Argument(help="The dataset, model or run, for stages that have several.")] = "",
    params: Annotated[str, typer.Option(help="The params file.")] = "params.yaml",
) -> None:
    """Run a single stage, as `dvc repro` does.

    Without DVC nothing decides what is stale: `vlp stage all` runs every stage, and interrupted ones resume.
    Example: `vlp stage pretrain tden`
    """
    if name != "all":
        run_stage(name, key, params)
        return
    from vlp_models.common.packages import is_installed
    from vlp_models.common.workspace import Workspace
    from vlp_models.params import load_params
    from vlp_models.pipeline.dvc.dvc_yaml import read_pipeline

    # Before the plan below, which imports NumPy.
    values, workspace = load_params(params), Workspace()
    choose_instructions(values.trainer.reproducible)
    with run_lock(workspace, "stage all"):
        write_plan(load_params(), workspace)
        stages = read_pipeline(workspace.root)
        # `vlp stage all` also works without the extra `pipeline`.
        if not is_installed("mlflow"):
            stages.pop("register", None)
        for stage_name, entry in stages.items():
            for stage_key in entry.get("foreach", [""]):
                print(f"stage {stage_name} {stage_key}".rstrip(), file=sys.stderr)
                run_stage(stage_name, stage_key, params)


def run_stage(name: str, key: str, params_file: str) -> None:
    """Run one stage.

    Raises:
        ParamsError: no such stage, or its params were edited while it ran, so that DVC would record the new ones.
        DataError: the dataset that `prepare` read was changed while it ran.
    """
    from vlp_models.common.packages import check_own_record
    from vlp_models.common.workspace import Workspace
    from vlp_models.params import load_params

    try:
        params, workspace = load_params(params_file), Workspace()
    except ParamsError:
        _check_stage(name)  # a wrong name is the more likely mistake
        raise
    # Before the import of NumPy below.
    choose_instructions(params.trainer.reproducible)
    from vlp_models.pipeline.dvc.consistency import unchanged_inputs
    from vlp_models.pipeline.dvc.graph import STAGES
    from vlp_models.pipeline.guard import LAUNCHED, guarded, run_by_dvc

    _check_stage(name)
    if run_by_dvc():
        check_own_record(workspace.root)
    # DVC records params and data as they are at the end, so a stage fails if they were edited while it ran.
    unchanged = unchanged_inputs(workspace, params_file, name, key) if run_by_dvc() else nullcontext(params)
    # A launcher starts this command again on its nodes, with LAUNCHED set: there the stage itself runs.
    launching = name in LAUNCHED_STAGES and params.trainer.launcher != "local" and LAUNCHED not in os.environ
    with guarded(workspace, f"{name}@{key}" if key else name, launching=launching), unchanged as params:
        if launching:
            from vlp_models.pipeline.engines import launch_training

            if code := launch_training(params, workspace, name, key, params_file):
                raise SystemExit(code)
        else:
            import_target(STAGES[name])(params, workspace, key)


def _check_stage(name: str) -> None:
    """Raise a ParamsError that names the nearest stage if this one does not exist."""
    from vlp_models.params.schema import suggestion
    from vlp_models.pipeline.dvc.graph import STAGES

    if name not in STAGES:
        raise ParamsError(f"no stage `{name}`{suggestion(name, STAGES)}")


def write_plan(params: Params, workspace: Workspace) -> tuple[bool, PlanFacts]:
    """Write dvc.yaml from params.yaml and record the packages it uses.

    Returns:
        Whether dvc.yaml changed, and what the check of params.yaml found out.
    """
    from vlp_models.common.io import write_together
    from vlp_models.pipeline.dvc.dvc_yaml import FILE
    from vlp_models.pipeline.stages.plan import check_params

    facts = check_params(params)
    files = plan_files(params, workspace, facts)
    write_together(files)
    return workspace.root / FILE in files, facts


def plan_files(
    params: Params, workspace: Workspace, facts: PlanFacts, raw: Mapping[str, Any] | None = None
) -> dict[Path, str]:
    """Return path -> new text of dvc.yaml, dvc.lock and the records of packages, those that must change.

    Args:
        facts: of these params, from their check.
        raw: params.yaml as plain data; default: read it.
    """
    from vlp_models.common.io import is_same_text
    from vlp_models.common.packages import outdated_records, own_record
    from vlp_models.common.source_hash import outdated_plugin_records
    from vlp_models.pipeline.dvc.dvc_yaml import FILE, is_generated, parse_pipeline
    from vlp_models.pipeline.dvc.external import named_sources
    from vlp_models.pipeline.dvc.lock_file import LOCK_FILE, drop_former_inputs
    from vlp_models.pipeline.stages.plan import check_regions, planned
    from vlp_models.registry.curve_loggers import check_sinks

    # Before anything is written: what is missing would stop a stage or a training later.
    check_regions(params, facts)
    check_sinks(params.tracking)
    sources = named_sources(params, regions=facts.regions)
    code = own_record(workspace.root) | outdated_plugin_records(facts.used.plugins(params), workspace.root)
    files = outdated_records(sources, workspace.root) | code
    _print_upgrades(workspace, code)
    file = workspace.root / FILE
    if not is_generated(workspace.root):
        print(
            f"{FILE} is not updated: its first line does not mark it as generated; delete the file to have it written",
            file=sys.stderr,
        )
        return files
    text = planned(params, workspace, raw, facts)
    if not file.exists() or not is_same_text(file, text):
        files[file] = text
    if lock := drop_former_inputs(workspace.root, parse_pipeline(text)):
        files[workspace.root / LOCK_FILE] = lock
    return files


def _print_upgrades(workspace: Workspace, records: Mapping[Path, str]) -> None:
    """Print what another version of this package, or of one of plugins, makes stale if one was recorded.

    Args:
        records: path -> new text.
    """
    from vlp_models.common.io import read_json_or_none
    from vlp_models.pipeline.stages.plan import changed_code

    steps = []
    for path, text in records.items():
        old, new = read_json_or_none(path), json.loads(text)
        if isinstance(old, dict) and old.get("version"):
            before, now = old["version"], new["version"]
            steps.append(f"{new['package']} {f'{before} -> {now}' if before != now else f'{now}, changed'}")
    if steps:
        changed = changed_code(workspace)
        effect = (
            f"other code for {shorten_list(changed, 6)}; their stages are stale" if changed else "nothing becomes stale"
        )
        print(f"{', '.join(steps)}: {effect}", file=sys.stderr)


def run_lock(workspace: Workspace, command: str) -> AbstractContextManager[int]:
    """Return the lock that `vlp run`, `vlp use`, `vlp forget` and every flow hold: one of them uses a workspace."""
    from vlp_models.common.lock import HELD_LOCK, file_lock

    if os.environ.get(HELD_LOCK) == os.fspath(workspace.lock.resolve()):
        return nullcontext(-1)  # the flow that started this command holds it
    return file_lock(workspace.lock, f"`vlp {command}`")


def explain_permissions(root: Path) -> str:
    """Return which of the paths that a run writes to belongs to another user, and the way out; empty if none does."""
    paths = [root, *(root / name for name in WRITTEN)]
    return next(filter(None, map(explain_access, paths)), "")


def explain_git(root: Path) -> str:
    """Return what DVC lacks in a folder, and the way out: git, its own folder, or a repository; empty if nothing."""
    if shutil.which("git") is None:
        return "git: not found; install it, DVC needs it"
    if not (root / ".dvc").is_dir():
        return f"{root}: no .dvc folder; run in the project root, or run `dvc init`"
    # Also recognizes a repository whose root is above the project.
    command = ["git", "rev-parse", "--show-toplevel"]
    done = subprocess.run(command, cwd=root, env=program_environment(), capture_output=True)
    if not done.returncode:
        return ""
    if b"dubious ownership" in done.stderr:
        return f"{root}: another user's repository: run `git config --global --add safe.directory {root}`"
    if b"not a git repository" in done.stderr:
        return f"{root}: not a git repository: run `git init`; DVC and the ledger need it"
    return f"{root}: git does not read the repository: {last_words(done.stderr, done.stdout)}"
