"""Data of params.yaml that neither git nor DVC has, so that another copy of the project lacks it."""

from __future__ import annotations

import os
import shlex
from pathlib import Path

from vlp_models.common.workspace import Workspace, run_git
from vlp_models.params import Params
from vlp_models.pipeline.dvc.external import files_outside_root


def find_untracked(params: Params, workspace: Workspace, *, strict: bool = False) -> list[str]:
    """Return a sentence for each folder or file of data in the project that neither git nor DVC tracks.

    `dvc exp run --temp`, a clone and a colleague get what one of them tracks. Data outside the project is not listed.

    Args:
        strict: as for `explain_sizes`; nothing here is an error.
    """
    root = workspace.root.absolute()
    named: list[tuple[str, str]] = []  # keys of params.yaml and the paths that they name
    for name, source in params.data.items():
        if source.root != params.ingest.dataset:  # to which `vlp ingest` adds its batches
            named.append((f"data.{name}.root", source.root))
        named += [(f"data.{name}", path) for path in files_outside_root(source)]
    if params.features.path:
        named.append(("features.path", params.features.path))
    # A generator writes these folders again in each copy of the project.
    generated = [workspace.raw(name).absolute() for name in params.generate]
    sentences: dict[Path, str] = {}
    for key, name in named:
        path = Path(os.path.normpath(root / name))
        inside = path.is_relative_to(root) and path != root and path.exists() and path not in sentences
        covered = any(path.is_relative_to(folder) for folder in (*generated, *sentences))
        if inside and not covered and _is_untracked(path, root):
            sentences[path] = (
                f"`{key}: {name}` is in neither git nor DVC, so a clone, a colleague and `dvc exp run --temp` will not "
                f"have it: {_explain_tracking(path, root, key)}"
            )
    return list(sentences.values())


def _is_untracked(path: Path, root: Path) -> bool:
    """Return whether a path is in no .dvc file and no commit; False if git does not work here."""
    # DVC may track the path, a folder around it, or files in it
    folders = [path, *(folder for folder in path.parents if folder.is_relative_to(root) and folder != root)]
    if any(folder.with_name(f"{folder.name}.dvc").is_file() for folder in folders) or any(path.glob("*.dvc")):
        return False
    # Empty output: git works and tracks nothing there; None: git failed.
    return run_git(root, "ls-files", "--", str(path)) == b""


def _explain_tracking(path: Path, root: Path, key: str) -> str:
    """Return how to track a path: DVC refuses a .dvc file that git ignores, git one that is in another clone."""
    name = path.relative_to(root).as_posix()
    folders = [folder for folder in path.parents if folder.is_relative_to(root) and folder != root]
    if clone := next((folder for folder in folders if (folder / ".git").exists()), None):
        return (
            f"copy it out of the git clone {clone.relative_to(root).as_posix()}, for example to data/raw/{path.name}, "
            f"and name the copy in `{key}`"
        )
    # the command, or first what makes it fail
    quoted = shlex.quote(name)
    add = f"dvc add {quoted} && git add {shlex.quote(f'{name}.dvc')}"
    # `git check-ignore` fails for a path that is not ignored.
    if run_git(root, "check-ignore", "-q", f"{name}.dvc") is None:
        return f"run `{add}`"
    check = f"git check-ignore -v {shlex.quote(f'{name}.dvc')}"
    return f"run `{check}` to see which line of .gitignore to change, then `{add}`"
