"""Execute the code blocks of a section of CONTRIBUTING.md in a clone of the project."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

from test_pipeline import ROOT, run

BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.M | re.S)
LINE = re.compile(r"The line, in `(\w+)` of (\S+):\n\Z")
FILE = re.compile(r"[Ii]n\s(\S+\.\w+):\n\Z")


def new_clone(folder: Path) -> Path:
    """Copy the tracked files, and the tests that CONTRIBUTING.md copies, to a new git and DVC project."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=True).stdout.decode()
    for name in filter(None, listed.split("\0")):
        wanted = not name.startswith("tests/") or name.startswith(("tests/toy_model/", "tests/toy_task/"))
        if wanted and (ROOT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, folder / name)
    identity = ["-c", "user.name=test", "-c", "user.email=test@example.org"]
    for command in (["init", "-q"], ["add", "-A"], [*identity, "commit", "-qm", "clone"]):
        subprocess.run(["git", *command], cwd=folder, check=True)
    return folder


def do(clone: Path, section: str) -> None:
    """Write files, add lines to their tables and run commands, in the order of the page."""
    text = (clone / "CONTRIBUTING.md").read_text(encoding="utf-8")
    text = text.split(f"## {section}\n")[1].partition("\n## ")[0]
    done = 0
    for block in BLOCK.finditer(text):
        before, (language, body) = text[: block.start()], block.groups()
        if language == "bash":
            run(clone, "bash", "-ec", body)
        elif line := LINE.search(before):
            add_line(clone / line[2], line[1], body)
        else:
            file = FILE.search(before)
            assert file is not None, f"{section}: no target for this block:\n{body}"
            (clone / file[1]).write_text(body, encoding="utf-8")
        done += 1
    assert done >= 2


def add_line(file: Path, table: str, line: str) -> None:
    """Add one line to a table of names."""
    assert line.count("\n") == 1
    text = file.read_text(encoding="utf-8")
    found = re.findall(rf"^{table}\b[^=]*= \{{\n", text, re.M)
    assert len(found) == 1, f"{file}: no {table}"
    file.write_text(text.replace(found[0], found[0] + line), encoding="utf-8")
