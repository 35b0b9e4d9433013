"""`vlp doctor` reports problems together with the fix."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from vlp_models.cli import doctor
from vlp_models.errors import ParamsError
from vlp_models.params import load_params


def test_missing_java_is_a_note_about_the_metrics_that_need_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    findings = {finding.subject: finding for finding in doctor.examine(tmp_path)}
    assert findings["java"].level == "note"
    assert "METEOR" in findings["java"].text
    assert findings["git"].level == "problem"


@pytest.mark.parametrize(
    ("package", "release", "reason"),
    [("lightning", "2.6.3", "malicious"), ("fastapi", "0.155.1", "Prefect"), ("sqlalchemy", "2.1.9", "scheduler")],
)
def test_releases_with_known_problems_are_reported(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, package: str, release: str, reason: str
) -> None:
    real = doctor._version
    monkeypatch.setattr(doctor, "_version", lambda name: release if name == package else real(name))
    problems = [finding for finding in doctor.examine(tmp_path) if finding.level == "problem"]
    assert any(finding.subject == package and reason in finding.text for finding in problems)


def test_a_full_disk_is_a_problem(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(doctor, "NEEDED_GB", 10**9)
    assert any(f.subject == "disk" and f.level == "problem" for f in doctor.examine(tmp_path))


def test_a_busy_port_is_reported_with_the_fix(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        monkeypatch.setattr(doctor, "PORTS", {port: "mlflow server"})
        findings = {finding.subject: finding for finding in doctor.examine(tmp_path)}
    assert f"--port {port + 1}" in findings[f"port {port}"].text


def test_a_package_of_another_checkout_is_reported_with_the_fix(tmp_path: Path) -> None:
    (tmp_path / "vlp_models" / "cli").mkdir(parents=True)
    (tmp_path / "params.yaml").write_text("generate: {}\n")
    with pytest.raises(ParamsError, match=f"has its own code .* set PYTHONPATH={tmp_path}"):
        load_params(tmp_path / "params.yaml")
    findings = {finding.subject: finding for finding in doctor.examine(tmp_path)}
    assert findings["code"].level == "problem" and str(tmp_path) in findings["code"].text
