"""A short run of `make fuzz`, and tests of its detectors."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from fuzz_run import CORPUS, Fuzzer, seeds_of, with_hypothesis
from targets import TARGETS
from targets.checkpoints import TOY
from watch import Watch, workplace

from vlp_models.errors import DataError
from vlp_models.models import FAMILIES

INPUTS = 8  # per target, besides its corpus; `make fuzz` draws 10,000 in all


@pytest.fixture(scope="module")
def fuzzer() -> Iterator[Fuzzer]:
    torch.set_flush_denormal(False)  # a training in this process may have: hypothesis draws subnormals, too
    with workplace() as folder, pytest.MonkeyPatch.context() as patch:
        patch.setitem(FAMILIES, "toy", TOY)  # targets add it themselves; here it is removed afterwards
        yield Fuzzer(folder)


@pytest.mark.slow
@pytest.mark.parametrize("name", TARGETS)
def test_nothing_hostile_gets_through(name: str, fuzzer: Fuzzer) -> None:
    target = TARGETS[name]
    known = seeds_of(target, fuzzer)
    with_hypothesis(fuzzer, target, len(known) + INPUTS, seed=1)
    assert not [finding for finding in fuzzer.findings.values() if finding.target == name]
    assert fuzzer.counts[name] > len(known)


def test_every_target_has_a_corpus() -> None:
    assert {path.name for path in CORPUS.iterdir()} == set(TARGETS)
    assert sum(path.stat().st_size for path in CORPUS.rglob("*")) < 2**20
    for name, target in TARGETS.items():  # corpus.py deletes what is none of these
        kept = {path.name for path in (CORPUS / name).iterdir() if not path.name.startswith("found-")}
        assert kept <= {"sound", *target.hostile}


@pytest.fixture(scope="module")
def watched() -> Iterator[Watch]:
    with workplace() as folder:
        yield Watch(folder)


def reads_outside(data: bytes) -> None:
    Path("../outside/secret.txt").read_text()


def writes_outside(data: bytes) -> None:
    Path("../elsewhere.txt").write_bytes(data)


def removes(data: bytes) -> None:
    Path("../elsewhere.txt").unlink(missing_ok=True)


def connects(data: bytes) -> None:
    with socket.socket() as probe:
        probe.connect_ex(("127.0.0.1", 9))


def starts_a_program(data: bytes) -> None:
    os.posix_spawn("/bin/true", ["true"], {})


def spins(data: bytes) -> None:
    while True:
        pass


def divides(data: bytes) -> float:
    return 1 / len(data)


def refuses(data: bytes) -> None:
    raise DataError("no")


@pytest.mark.parametrize(
    ("attempt", "kind"),
    [
        (reads_outside, "escape"),
        (writes_outside, "escape"),
        (removes, "escape"),
        (connects, "escape"),
        (starts_a_program, "escape"),
        (spins, "hang"),
        (divides, "crash"),
        (refuses, ""),
    ],
)
def test_watch_detects(
    attempt: Callable[[bytes], object], kind: str, watched: Watch, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("watch.LONGEST", 0.3)
    found = {finding.kind for finding in watched.run("test", attempt, b"")}
    assert found == ({kind} if kind else set())


def test_what_a_thread_of_another_test_does_is_no_finding(watched: Watch, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("watch.LONGEST", 0.3)
    stop = threading.Event()

    def look_at_a_socket() -> None:
        while not stop.wait(0.001):
            connects(b"")

    thread = threading.Thread(target=look_at_a_socket)
    thread.start()
    try:
        assert {finding.kind for finding in watched.run("test", spins, b"")} == {"hang"}
    finally:
        stop.set()
        thread.join()
