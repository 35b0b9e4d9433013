"""Run the code blocks of a documentation page in a shell, in their order, in a clone of the project.

All blocks of one part of a page run in one shell, as in a reader's terminal, with the project's environment activated.
The clone's `.venv/bin` holds a few programs of its own (PROGRAMS): they apply the tiny sizes after `vlp use`, open a
server once and stop it, or check a command that needs root, the network or a cluster.
"""

from __future__ import annotations

import os
import re
import shlex
import signal
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from cloned_project import BIN, environment

FENCE = re.compile(r"^```(bash|console)\n(.*?)^```$", re.M | re.S)
HELPERS = Path(__file__).parent
IDENTITY = {f"GIT_{role}_{key}": "test@example.org" for role in ("AUTHOR", "COMMITTER") for key in ("NAME", "EMAIL")}


@dataclass(frozen=True)
class Command:
    """A command as the page has it, and the output below it in a console block."""

    text: str
    line: int
    console: bool = False
    output: tuple[str, ...] = ()


@dataclass(frozen=True)
class Block:
    line: int
    commands: tuple[Command, ...]

    @property
    def first(self) -> str:
        return self.commands[0].text


def read_blocks(page: Path) -> list[Block]:
    """Return the page's `bash` and `console` blocks, in order."""
    text = page.read_text(encoding="utf-8")
    found = []
    for fence in FENCE.finditer(text):
        line = text[: fence.start()].count("\n") + 1
        found.append(Block(line, tuple(_commands(fence[2], line + 1, console=fence[1] == "console"))))
    return found


def _commands(body: str, first: int, *, console: bool) -> Iterator[Command]:
    lines = list(enumerate(body.splitlines(), first))
    while lines:
        number, text = lines.pop(0)
        assert not console or text.startswith("$ "), f"line {number}: output before the first command"
        text = text.removeprefix("$ ")
        while text.endswith("\\"):
            text += "\n" + lines.pop(0)[1]
        output = []
        while console and lines and not lines[0][1].startswith("$ "):
            output.append(lines.pop(0)[1])
        if text.strip():
            yield Command(text, number, console, tuple(output))


# Programs of the clone's .venv/bin that stand in for the real ones. REAL: the folder with the real programs.
PROGRAMS = {
    "vlp": """
case "$1" in
  use) REAL/vlp "$@" && exec REAL/python HELPERS/stand_ins.py tiny-sizes ;;
  demo | label | audit) exec REAL/python HELPERS/stand_ins.py open-once REAL/vlp "$@" ;;
esac
exec REAL/vlp "$@"
""",
    "mlflow": """
test "$1" = ui || exec REAL/mlflow "$@"
exec REAL/python HELPERS/stand_ins.py open-once REAL/mlflow "$@"
""",
    # The environment is installed: check the lock file, and that its packages are installed if the page uses them.
    "uv": 'exec REAL/python HELPERS/stand_ins.py uv "$@"',
    # Nothing of this machine is changed: units are copied to .work/units and verified there.
    "sudo": r"""
case "$1 $2" in
  "cp deploy/systemd"*)
    mkdir -p .work/units && cp "${@:2:$#-2}" .work/units && test "${@: -1}" = /etc/systemd/system ;;
  "systemctl daemon-reload") exit 0 ;;
  "systemctl enable")
    unit=.work/units/${@: -1}.service
    sed -i "s|/srv/vlp-flows/.venv/bin/prefect|REAL/prefect|; s|/srv/vlp-flows|$PWD|; s|^User=.*|User=$(id -un)|" $unit
    if command -v systemd-analyze; then systemd-analyze verify --man=no $unit
    else echo "systemd-analyze is not installed: not verified"; test -s $unit; fi ;;
  *) echo "sudo $*: not expected"; exit 1 ;;
esac
""",
    "journalctl": 'test "$1 $3" = "-u -f" && test -s ".work/units/$2.service"',
    # `create --dry-run=client` prints the object without a cluster, which `apply` needs even then: its file is checked.
    "kubectl": r"""
test "$1 $2" != "apply -f" || exec REAL/python HELPERS/stand_ins.py kubernetes "$3"
real=$(type -ap kubectl | grep -v /.venv/bin/ | head -1)
test "$real" || { echo "kubectl is not installed: not run"; exit 0; }
object=$(mktemp)
"$real" "$@" --dry-run=client -o yaml > "$object" || exit
exec REAL/python HELPERS/stand_ins.py kubernetes "$object"
""",
    "aws": r"""
real=$(type -ap aws | grep -v /.venv/bin/ | head -1)
test "$real" || { echo "the AWS CLI is not installed: not run"; exit 0; }
exec "$real" "$@"
""",
    # No cluster is started: the options are checked, if Ray is installed.
    "ray": r"""
REAL/python -c "import ray" 2> /dev/null || { echo "Ray is not installed: not run"; exit 0; }
test "$1" = start || { echo "ray $*: not expected"; exit 1; }
exec REAL/python -c "import sys; from ray.scripts.scripts import start; start.make_context('start', sys.argv[2:])" "$@"
""",
}


def write_environment(project: Path) -> None:
    """Write a .venv with PROGRAMS, which `make` takes for an installed one."""
    folder = project / ".venv" / "bin"
    folder.mkdir(parents=True)
    for name, text in PROGRAMS.items():
        text = text.strip().replace("REAL", str(BIN)).replace("HELPERS", str(HELPERS))
        (folder / name).write_text(f"#!/bin/bash\n{text}\n")
        (folder / name).chmod(0o755)
    (folder / "activate").write_text(f"export PATH=$PWD/.venv/bin:{BIN}:$PATH PYTHONPATH=$PWD\n")
    installed = project / ".venv" / ".installed"
    installed.touch()
    os.utime(installed, (4e9, 4e9))  # newer than every lock file


@dataclass(frozen=True)
class Change:
    """How a run differs from the page: texts to replace, commands to run first and at the end, expected exit codes."""

    replace: dict[str, str]
    before: dict[str, str]  # the start of a command -> what runs before its first occurrence
    exit_codes: dict[str, int]  # a command, with `$ ` in a console block -> the exit code that the page names
    after: str = ""


def script(blocks: list[Block], change: Change) -> str:
    """Return the shell script that runs the blocks and stops at the first command with another exit code."""
    before = dict(change.before)
    lines = [
        "set -o pipefail",
        "source .venv/bin/activate",
        'ended() { test $1 = $3 || { echo "@@ line $2: exit code $1, not $3"; exit 1; }; echo "@@ after $SECONDS s"; }',
    ]
    for command in (command for block in blocks for command in block.commands):
        text = command.text
        if text.startswith("cat ") and command.output:  # a file that the reader has written
            lines.append("\n".join([f"cat > {text.split()[1]} <<'CONTENT'", *command.output, "CONTENT"]))
        for start in [start for start in before if text.startswith(start)]:
            lines += [replaced(before.pop(start), change.replace), f"ended $? '{command.line} (preparation)' 0"]
        text = replaced(text, change.replace)
        lines += [f"printf '%s\\n' {shlex.quote(f'@@ line {command.line}: {text}')}", text]
        lines.append(f"ended $? {command.line} {change.exit_codes.get('$ ' * command.console + command.text, 0)}")
    if change.after:
        lines += [change.after, "ended $? end 0"]
    return "\n".join(lines) + "\n"


def replaced(text: str, values: dict[str, str]) -> str:
    for old, new in values.items():
        text = text.replace(old, new)
    return text


def run_blocks(project: Path, blocks: list[Block], change: Change, *, timeout: float, **variables: str) -> str:
    """Run the blocks; return what the shell printed. Servers that they started are stopped."""
    if not (project / ".venv").exists():
        write_environment(project)
    log = project.parent / f"{project.name}.log"
    env = environment(project) | IDENTITY | variables
    with log.open("w") as output:
        command = ["bash", "-c", script(blocks, change)]
        shell = subprocess.Popen(
            command,
            cwd=project,
            env=env,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            code: int | str = shell.wait(timeout)
        except subprocess.TimeoutExpired:
            code = f"timeout after {timeout:.0f} s"
        finally:
            _stop(shell.pid)
            shell.wait()
            if (project / ".work" / "stack").exists():  # `vlp up`'s processes outlive their shell
                subprocess.run([str(BIN / "vlp"), "down"], cwd=project, env=env, check=False, timeout=300)
    text = log.read_text(errors="replace")
    assert code == 0, f"{code}\n{text[-6000:]}"
    for printing in (command for block in blocks for command in block.commands if command.output):
        section = text.partition(f"@@ line {printing.line}: ")[2].partition("@@ after")[0]
        for line in printing.output:
            pattern = re.sub(r"\d+", r"\\d+", re.escape(line))  # other numbers will do
            assert re.search(pattern, section), f"line {printing.line}: not printed: {line}\n{section[-2000:]}"
    return text


def _stop(group: int) -> None:
    """Stop what the shell left running."""
    for number, seconds in ((signal.SIGTERM, 3), (signal.SIGKILL, 0)):
        try:
            os.killpg(group, number)
        except ProcessLookupError:
            return
        time.sleep(seconds)
