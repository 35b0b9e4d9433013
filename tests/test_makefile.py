"""What `make` would have `vlp` do."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

ROOT = Path(__file__).parent.parent
VLP = 'vlp() { echo "$*"; test "$1" = run || test -f "$2"; }\n'  # says how it is called; a preset has to be there


def calls(*arguments: str) -> list[str]:
    """How `make flickr8k` calls `vlp` once everything is installed, in order, up to a call that fails."""
    plain = {"PATH": os.environ["PATH"]}  # no variable or flag of a make that runs the tests

    def run(*command: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(command, cwd=ROOT, env=plain, capture_output=True, text=True, timeout=60)

    made, found = run("make", "-n", "flickr8k", *arguments), []
    for line in made.stdout.partition("requirements-photographs.lock\n")[2].splitlines():
        done = run("sh", "-c", VLP + line)
        found += done.stdout.splitlines()
        if done.returncode:
            break
    return found


def test_flickr8k_is_laid_first_then_each_design_in_order_and_then_run() -> None:
    first = "use presets/flickr8k.yaml"
    assert calls() == [first, "run"]
    assert calls("ROOT=some/where", "MODELS=xgpt soho") == [
        f"{first} --set data.flickr8k.root=some/where --set data.snli_ve.root=some/where",
        "use presets/flickr8k-xgpt.yaml",
        "use presets/flickr8k-soho.yaml",
        "run",
    ]


def test_nothing_runs_where_a_design_can_not_be_laid() -> None:
    assert calls("MODELS=xgtp soho") == ["use presets/flickr8k.yaml", "use presets/flickr8k-xgtp.yaml"]
