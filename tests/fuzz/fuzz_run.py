"""`make fuzz`: hostile inputs to everything that reads a file or a request from outside.

python tests/fuzz/fuzz_run.py --inputs 10000 --seed 1 [--target shard ...]

Three fifths of the inputs are drawn by hypothesis from the corpus, the rest by atheris, which looks for lines that were
not reached before (only where it is installed; else hypothesis draws them all). Each runs under watch.py. Prints what
was found, by target, and exits with 1 if anything was; the inputs are kept in reports/fuzz.
"""

from __future__ import annotations

import argparse
import contextlib
import faulthandler
import hashlib
import importlib.util
import json
import os
import resource
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import redirect_stderr, redirect_stdout
from io import StringIO
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[2]))

from mutate import inputs as hostile_inputs
from targets import TARGETS, Attempt, Target
from watch import Finding, Watch, workplace

CORPUS = Path(__file__).parent / "corpus"
LAST = "last-input"
ROOM = 6 << 30  # bytes of memory beyond what the process begins with
STUCK = 120  # s of its own time a target, after which a process that hangs in one call is ended, with a traceback


class Fuzzer:
    """Counts inputs and keeps the first of each finding."""

    def __init__(self, folder: Path, keep: Path | None = None) -> None:
        self.counts: Counter[str] = Counter()
        self.findings: dict[tuple[str, str, str], Finding] = {}
        self._folder, self._keep = folder, keep
        self._watch = Watch(folder)
        self._attempts: dict[str, tuple[Attempt, bytes]] = {}

    def prepare(self, target: Target) -> bytes:
        """Makes the files around the target's input; returns a sound one."""
        if target.name not in self._attempts:
            place = self._folder / "targets" / target.name
            place.mkdir(parents=True)
            attempt, sound = self._attempts[target.name] = target.prepare(place)
            with redirect_stdout(StringIO()), redirect_stderr(StringIO()):
                attempt(sound)  # must do; and what it imports is no hang of the first input
        return self._attempts[target.name][1]

    def attempt(self, target: Target, data: bytes) -> list[Finding]:
        self.prepare(target)
        self.counts[target.name] += 1
        if self._keep is not None:
            (self._keep / LAST).write_bytes(data)  # what a crash of the whole process leaves
        found = self._watch.run(target.name, self._attempts[target.name][0], data)
        for finding in found:
            key = (finding.target, finding.kind, finding.where or finding.what)
            if key not in self.findings:
                self.findings[key] = finding
                self._save(finding, data)
        return found

    def _save(self, finding: Finding, data: bytes) -> None:
        if self._keep is not None:
            name = f"{finding.target}-{finding.kind}-{hashlib.sha256(data).hexdigest()[:12]}"
            (self._keep / name).write_bytes(data)
            print(
                f"  {finding.target}: {finding.kind}: {finding.what} {finding.where}; {self._keep / name}", flush=True
            )


def seeds_of(target: Target, fuzzer: Fuzzer) -> list[bytes]:
    """The sound input, the ones known to be hostile, and the committed corpus."""
    kept = [path.read_bytes() for path in sorted((CORPUS / target.name).glob("*"))]
    return list(dict.fromkeys([fuzzer.prepare(target), *target.hostile.values(), *kept]))


def with_hypothesis(fuzzer: Fuzzer, target: Target, count: int, seed: int) -> None:
    """The corpus, then drawn inputs, `count` together, the same ones for the same seed."""
    from hypothesis import HealthCheck, Phase, given, settings
    from hypothesis import seed as seeded

    known = seeds_of(target, fuzzer)
    for data in known:
        fuzzer.attempt(target, data)

    @seeded(seed)
    @settings(
        max_examples=max(1, count - len(known)),
        phases=[Phase.generate],
        deadline=None,
        database=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(data=hostile_inputs(target.form, known))
    def draw(data: bytes) -> None:
        fuzzer.attempt(target, data)

    draw()


def child(options: argparse.Namespace) -> None:
    """Hypothesis' part, in a process that may die of an input."""
    with workplace() as folder:
        fuzzer = Fuzzer(folder, options.reports)
        limit_memory()
        for name in options.target:
            fuzzer.prepare(TARGETS[name])
            write_answer(options.child, fuzzer, name)
            faulthandler.register(signal.SIGXCPU, chain=True)
            most = int(time.process_time()) + STUCK + options.each // 10
            resource.setrlimit(resource.RLIMIT_CPU, (most, resource.RLIM_INFINITY))
            with_hypothesis(fuzzer, TARGETS[name], round(options.each * TARGETS[name].share), options.seed)
        write_answer(options.child, fuzzer, "")


def write_answer(path: Path, fuzzer: Fuzzer, current: str) -> None:
    findings = [list(vars(finding).values()) for finding in fuzzer.findings.values()]
    value = {"counts": fuzzer.counts, "findings": findings, "current": current}
    path.write_text(json.dumps(value), encoding="utf-8")


def run_child(command: list[str], answer: Path) -> dict[str, Any]:
    """What a child has written; that it died is a finding of the target that it was at, with the last input kept."""
    answer.unlink(missing_ok=True)
    done = subprocess.run([sys.executable, *command], stderr=subprocess.PIPE, text=True)
    try:
        value: dict[str, Any] = json.loads(answer.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        raise SystemExit(f"{' '.join(command[:2])} ended with {done.returncode}: {done.stderr[-3000:]}") from None
    if done.returncode:
        kept = answer.parent / f"{value['current']}-died"
        with contextlib.suppress(FileNotFoundError):
            (answer.parent / LAST).replace(kept)
        message = " ".join(line.strip() for line in done.stderr.splitlines()[:4])
        what = f"the process ended with {done.returncode}: {message:.300}; {kept}"
        value["findings"].append([value["current"], "crash", what, ""])
    return value


def by_hypothesis(options: argparse.Namespace, names: list[str], count: int) -> Iterator[dict[str, Any]]:
    answer, shares = options.reports / "hypothesis.json", sum(TARGETS[name].share for name in names)
    each = round(count / shares) + 1
    while names:
        chosen = [word for name in names for word in ("--target", name)]
        numbers = ["--each", str(each), "--seed", str(options.seed), "--reports", str(options.reports)]
        value = run_child([__file__, "--child", str(answer), *numbers, *chosen], answer)
        yield value
        names = names[names.index(value["current"]) + 1 :] if value["current"] else []


def by_atheris(options: argparse.Namespace, names: list[str], count: int) -> dict[str, Any]:
    answer = options.reports / "atheris.json"
    script = str(Path(__file__).with_name("with_atheris.py"))
    return run_child([script, str(answer), str(count), str(options.seed), *names], answer)


def limit_memory() -> None:
    """A bomb is then an error of this process, not of the machine."""
    used = int(Path("/proc/self/statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")
    resource.setrlimit(resource.RLIMIT_AS, (used + ROOM, resource.RLIM_INFINITY))


def main() -> int:
    options = _arguments()
    unknown = set(options.target) - set(TARGETS)
    if unknown:
        raise SystemExit(f"no target {', '.join(unknown)}; there are: {', '.join(TARGETS)}")
    names = options.target or list(TARGETS)
    options.reports.mkdir(parents=True, exist_ok=True)
    faulthandler.enable()
    if options.child:
        child(options)
        return 0
    atheris = importlib.util.find_spec("atheris") is not None and not options.no_atheris
    drawn = options.inputs * 3 // 5 if atheris else options.inputs
    began, counts, findings, by = time.monotonic(), Counter[str](), list[Finding](), {"hypothesis": 0, "atheris": 0}
    for value in by_hypothesis(options, names, drawn):
        by["hypothesis"] += sum(value["counts"].values())
        counts.update(value["counts"])
        findings += [Finding(*fields) for fields in value["findings"]]
    if atheris:
        value = by_atheris(options, names, max(1, options.inputs - counts.total()) + 1)  # libFuzzer stops one before
        by["atheris"] = sum(value["counts"].values())
        counts.update(value["counts"])
        findings += [Finding(*fields) for fields in value["findings"]]
    _report(options, counts, findings, by, time.monotonic() - began)
    return int(bool(findings))


def _report(
    options: argparse.Namespace, counts: Counter[str], findings: list[Finding], by: dict[str, int], seconds: float
) -> None:
    kinds = Counter(finding.kind for finding in findings)
    for finding in findings:
        print(f"{finding.kind:7}{finding.target:20}{finding.what} {finding.where}")
    if not by["atheris"]:
        print("atheris is not installed, or was not asked: no input was looked for by what it reaches")
    print(
        f"{counts.total():,} inputs to {len(counts)} readers ({by['hypothesis']:,} by hypothesis, {by['atheris']:,} by "
        f"atheris) in {seconds:.0f} s: {kinds['crash']} crashes, {kinds['escape']} escapes, {kinds['hang']} hangs"
    )
    record = {"seed": options.seed, "counts": dict(counts), "findings": [vars(f) for f in findings], "by": by}
    (options.reports / "fuzz.json").write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--inputs", type=int, default=10_000, help="in all")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--target", action="append", default=[], help="only this one; may be given several times")
    parser.add_argument("--child", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--each", type=int, default=0, help=argparse.SUPPRESS)
    parser.add_argument("--no-atheris", action="store_true")
    parser.add_argument("--reports", type=Path, default=Path(__file__).parents[2] / "reports" / "fuzz")
    options = parser.parse_args()
    options.reports = options.reports.absolute()
    return options


if __name__ == "__main__":
    sys.exit(main())
