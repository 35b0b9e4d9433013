"""`make audit` without a network is an error, never "no known holes", and hides no known hole."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import audit
import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.skipif(audit.find() is None, reason="pip-audit is not installed")
def test_audit_without_a_network_fails_with_a_message() -> None:
    nowhere = dict.fromkeys(("HTTP_PROXY", "HTTPS_PROXY", "http_proxy", "https_proxy"), "http://127.0.0.1:9")
    done = subprocess.run(
        [sys.executable, "tests/audit.py", "requirements-uv.lock"],
        cwd=ROOT,
        env={**os.environ, **nowhere, "NO_PROXY": "", "no_proxy": ""},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == os.EX_UNAVAILABLE, done.stdout + done.stderr
    assert done.stderr.startswith("audit: requirements-uv.lock: ") and "run it again" in done.stderr
    assert "Traceback" not in done.stderr and "0 known holes" not in done.stdout


@pytest.mark.parametrize(("of_files", "code"), [((0, 0), 0), ((0, 69), 69), ((1, 69), 1), ((69, 1), 1)])
def test_known_hole_counts_even_if_another_file_could_not_be_checked(
    of_files: tuple[int, int], code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = {str(tmp_path / f"{number}.lock"): found for number, found in enumerate(of_files)}
    for file in files:
        Path(file).touch()
    monkeypatch.setattr(audit, "find", lambda: "pip-audit")
    monkeypatch.setattr(audit, "audit", lambda program, file, service: files[file])
    monkeypatch.setattr(sys, "argv", ["audit.py", *files])
    assert audit.main() == code
