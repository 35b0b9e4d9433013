"""What `dvc status` answers, and what each caller does if it fails: run or note."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from vlp_models.cli.status import Status, _collect_stale
from vlp_models.flows.process import is_stale
from vlp_models.pipeline.dvc import stale

CHANGED = '{"prepare": [{"changed deps": {"a": "modified", "b": "new"}}, "changed command"]}'


@pytest.mark.parametrize(
    ("script", "stages", "note"),
    [
        (f"echo '{CHANGED}'", {"prepare": ["changed deps", "changed command"]}, ""),
        ("echo '{}'", {}, ""),
        ("echo 'ERROR: rwlock is busy' >&2; exit 255", None, "dvc status: a stage is running"),
        ("echo 'ERROR: no dvc.yaml' >&2; exit 255", None, "dvc status: no dvc.yaml"),
        ("echo '{}'; exit 1", None, "dvc status: no output"),
        ("echo '[1]'", None, "dvc status: no output"),
    ],
    ids=["changed", "nothing", "busy", "error", "exit code", "no mapping"],
)
def test_each_caller_has_its_rule_for_a_failure(
    script: str, stages: dict[str, list[str]] | None, note: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    python = tmp_path / "python"
    python.write_text(f"#!/bin/sh\n{script}\n")
    python.chmod(0o755)
    monkeypatch.setattr(stale, "sys", SimpleNamespace(executable=str(python)))
    assert is_stale(tmp_path, []) == (stages != {}), "a failure is stale, so that `dvc repro` reports it"
    result = Status()
    _collect_stale(tmp_path, result)
    assert result.stale == {name: ["changed deps", "changed command"] for name in stages or {}}
    assert result.notes == ([note] if note else [])


def test_a_slow_answer_and_a_missing_program_are_errors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(stale.DataError, match="timed out after 0 s"):
        stale.read_stale(tmp_path, timeout=0.01)
    monkeypatch.setattr(stale, "sys", SimpleNamespace(executable=str(tmp_path / "none"), path=sys.path))
    with pytest.raises(stale.DataError, match="failed to start"):
        stale.read_stale(tmp_path)


def test_dvc_error_has_neither_the_warnings_nor_the_hints_around_it() -> None:
    stderr = (
        "WARNING: the cache is slow\nERROR: unexpected error - Forbidden (403)\nHaving any troubles? Hit us up!\n"
        "sys:1: RuntimeWarning: coroutine was never awaited\n"
    )
    assert stale.dvc_error(stderr) == "unexpected error - Forbidden (403)"
    assert stale.dvc_error("Traceback:\nKeyError: 'a'\n") == "KeyError: 'a'"
