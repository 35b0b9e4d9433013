"""`vlp upgrade`."""

from __future__ import annotations

import difflib
import os
import subprocess
import sys
from pathlib import Path
from typing import Annotated

import typer

from vlp_models.cli.project import MERGED, copy_file, template_files
from vlp_models.common.environment import program_environment
from vlp_models.common.packages import own_version
from vlp_models.errors import DataError

NEVER_MERGED = ("README.md", "data/README.md")  # yours from the start


def upgrade(
    apply: Annotated[bool, typer.Option("--apply", help="Merge the changes into this project's files.")] = False,
) -> None:
    """Show what the installed version's template would change in this project.

    Your own edits stay: with --apply the changes are merged as git merges, and conflicts are marked in the file.
    """
    root = Path.cwd()
    merged = root / MERGED
    if not merged.is_dir():
        raise DataError(f"{merged}: not found; `vlp upgrade` works in a project made by `vlp init`")
    new = template_files()
    old = {path.relative_to(merged).as_posix(): path for path in merged.rglob("*") if path.is_file()}
    changed = []
    # Files whose template has not changed since the last merge are skipped, whatever you changed in them.
    for name in sorted(new.keys() - set(NEVER_MERGED)):
        if name not in old or old[name].read_bytes() != new[name].read_bytes():
            changed.append(name)
    # Files that you deleted stay deleted; those that the template no longer has stay until you delete them.
    deleted = [name for name in changed if name in old and not (root / name).exists()]
    dropped = sorted(old.keys() - new.keys())
    changed = [name for name in changed if name not in deleted]
    for name in deleted:
        print(f"{name}: deleted in this project, so the template's change is left out")
    for name in dropped:
        if (root / name).exists():
            print(f"{name}: no longer in the template; delete it unless you use it")
    # The base of a file is the template's last version; a file is reported until the next --apply.
    if apply:
        for name in deleted:
            copy_file(new[name], merged / name)
        for name in dropped:
            old[name].unlink()
    if not changed:
        print(f"the template of vlp-flows {own_version()} changes nothing in this project")
        return
    conflicts = [name for name in changed if not _merge(root, name, old.get(name), new[name], apply)]
    if not apply:
        count = "1 file" if len(changed) == 1 else f"{len(changed)} files"
        print(f"\n{count}; `vlp upgrade --apply` merges these changes into yours", file=sys.stderr)
        return
    # The new base, also of files with conflicts: those are marked in the file.
    for name in changed:
        copy_file(new[name], merged / name)
    print(f"merged: {', '.join(changed)}; run `vlp plan`, look at `git diff`, and commit")
    if conflicts:
        raise DataError(f"{', '.join(conflicts)}: your edits and the template's meet; resolve the marked conflicts")


def _merge(root: Path, name: str, old: Path | None, new: Path, apply: bool) -> bool:
    """Merge the change of one file, or print it. Return whether it merges without a conflict."""
    if not apply:
        # A file that is new in the template is shown as an addition.
        before = old.read_text(encoding="utf-8").splitlines(keepends=True) if old else []
        after = new.read_text(encoding="utf-8").splitlines(keepends=True)
        sys.stdout.writelines(difflib.unified_diff(before, after, f"{name} (before)", f"{name} (new template)"))
        return True
    file = root / name
    # The file is new, or you have not changed it, so the new one replaces it.
    if not file.exists() or (old is not None and file.read_bytes() == old.read_bytes()):
        copy_file(new, file)
        return True
    labels = ("-L", "yours", "-L", "before", "-L", "new template")
    base = old or Path(os.devnull)  # a file that the template did not have, and you do
    # git merge-file writes the result into `file`; its exit code is the number of conflicts.
    done = subprocess.run(
        ["git", "merge-file", *labels, file, base, new], env=program_environment(), capture_output=True
    )
    return done.returncode == 0


COMMANDS = {"Make a project": {"upgrade": upgrade}}
WORK = {"upgrade": "comparing with the template"}
