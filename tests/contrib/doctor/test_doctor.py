"""`vlp doctor` reports problems together with the fix."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest
import yaml
from cloned_project import init_dvc
from refused_calls import run_refused

from vlp_models.common.packages import INSTALL
from vlp_models.common.workspace import dvc_setting
from vlp_models.contrib.doctor import commands as doctor
from vlp_models.errors import ParamsError
from vlp_models.params import load_params

ROOT = Path(__file__).parents[3]


def test_free_ports_and_gradio_are_one_line_each(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as used, socket.socket() as closed:
        for one in (used, closed):
            one.bind(("127.0.0.1", 0))
        used.listen()
        ports = {closed.getsockname()[1]: "mlflow server"}
        monkeypatch.setattr(doctor, "PORTS", ports)
        (finding,) = doctor._ports()
        assert (finding.level, finding.subject, finding.text) == (
            "ok",
            "ports",
            f"free: {next(iter(ports))} (mlflow server)",
        )
        monkeypatch.setattr(doctor, "PORTS", ports | {used.getsockname()[1]: "prefect server"})
        (finding,) = doctor._ports()
        assert finding.level == "note" and "in use" in finding.text
    monkeypatch.setattr(doctor, "_version", lambda name: None)
    assert doctor._gradio().level == "ok"
    assert doctor._gradio().text.startswith(f"not installed; `vlp demo` needs it: `{INSTALL}")


@pytest.mark.parametrize(("is_clone", "fix"), [(True, "`make install`"), (False, 'pip install "vlp-flows[pipeline]"`')])
def test_a_missing_package_is_installed_by_what_the_folder_has(
    is_clone: bool, fix: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    if is_clone:
        (tmp_path / "vlp_models" / "cli").mkdir(parents=True)
    versions = {"fastapi": "0.151.2", "dvc": None}
    monkeypatch.setattr(doctor, "_version", lambda name: versions.get(name, "1.0"))
    findings = {finding.subject: finding.text for finding in doctor._packages(tmp_path)}
    assert findings["dvc"].endswith(fix) and "pip install 'fastapi<0.151'" in findings["fastapi"]


def test_missing_java_is_a_note_about_the_metrics_that_need_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    findings = {finding.subject: finding for finding in doctor.examine(tmp_path)}
    assert findings["java"].level == "note"
    assert "METEOR" in findings["java"].text
    assert findings["git"].level == "problem"


@pytest.mark.parametrize(
    ("script", "level", "text"),
    [
        ("echo 'Picked up _JAVA_OPTIONS: -Xmx1G' >&2; echo 'openjdk version \"17\"' >&2", "ok", 'openjdk version "17"'),
        ("printf 'openjdk version \\377\\n'", "ok", "openjdk version"),
        ("exit 0", "note", "failed to start"),
        ("echo 'Could not create the Java Virtual Machine.'; exit 1", "note", "failed to start"),
    ],
)
def test_output_of_java_is_read_whatever_it_is(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, script: str, level: str, text: str
) -> None:
    (tmp_path / "java").write_text(f"#!/bin/bash\n{script}\n")
    (tmp_path / "java").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    finding = doctor._java()
    assert finding.level == level and text in finding.text


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


def project(folder: Path, **changes: Any) -> Path:
    """Write a git and DVC project whose params.yaml is the shipped one with other top-level keys."""
    raw = yaml.safe_load((ROOT / "params.yaml").read_text(encoding="utf-8"))
    (folder / "params.yaml").write_text(yaml.safe_dump(raw | changes))
    (folder / ".dvc").mkdir()
    subprocess.run(["git", "init", "-q"], cwd=folder, check=True)
    return folder


def test_missing_data_and_packages_that_params_name_are_reported_with_their_keys(tmp_path: Path) -> None:
    photos = {"format": "pairs", "root": "data/raw/photos", "pairs": "pairs.csv"}
    vocabulary = {"source": "vocab", "vocab": "package:no-such-bert", "vocab_size": 100, "min_frequency": 1}
    vocabulary |= {"lowercase": True, "min_answer_count": 1}
    folder = project(tmp_path, data={"photos": photos}, generate={}, tokenizer=vocabulary)
    texts = [f.text for f in doctor.examine(folder) if f.subject == "params.yaml" and f.level == "problem"]
    assert any("`data.photos.root: data/raw/photos`: no such folder" in text for text in texts)
    assert any("no-such-bert`: not installed; install it with" in text for text in texts)
    (folder / "data" / "raw" / "photos").mkdir(parents=True)
    (folder / "data" / "raw" / "photos" / "pairs.csv").write_text("image,caption\n")
    untracked = "`data.photos.root: data/raw/photos` is in neither git nor DVC"
    assert any(f.level == "note" and untracked in f.text for f in doctor.examine(folder))
    (folder / "params.yaml").write_text("data: [\n")
    assert any(f.subject == "params.yaml" and "not valid YAML" in f.text for f in doctor.examine(folder))


def test_folder_outside_git_and_an_account_without_a_home_are_problems(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / ".dvc").mkdir()
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    monkeypatch.setenv("HOME", str(tmp_path / "none"))
    problems = {f.subject: f.text for f in doctor.examine(tmp_path) if f.level == "problem"}
    assert "run `git init`" in problems["git"]
    assert "set HOME" in problems["account"]


@pytest.mark.parametrize(
    ("calls", "findings"),
    [
        ("flock=37", ["problem {}: the file system has no file locks (flock: no locks available)"]),
        ("chmod=1", ["problem permissions cannot be changed (operation not permitted): git and MLflow fail here"]),
        (
            "link=31,symlink=95,fsync=22",
            ["note no hard links (too many links)", "note no symbolic links (", "note folders cannot be flushed"],
        ),
    ],
)
def test_what_a_file_system_does_not_do_is_a_line_each(tmp_path: Path, calls: str, findings: list[str]) -> None:
    code = "import sys; from pathlib import Path; from vlp_models.contrib.doctor.commands import _file_system\n"
    code += "for finding in _file_system(Path(sys.argv[1])): print(finding.level, finding.text)"
    done = run_refused(calls, [sys.executable, "-c", code, str(tmp_path)])
    if done.returncode == 86:
        pytest.skip("this machine has no seccomp")
    lines = done.stdout.splitlines()
    assert len(lines) == len(findings), done.stdout + done.stderr
    for line, start in zip(lines, findings, strict=True):
        assert line.startswith(start.format(tmp_path))
    assert not any(tmp_path.iterdir())


@pytest.mark.slow
def test_a_cache_that_the_project_cannot_link_to_is_a_problem(tmp_path: Path) -> None:
    memory = Path("/dev/shm")
    if not os.access(memory, os.W_OK) or memory.stat().st_dev == tmp_path.stat().st_dev:
        pytest.skip("needs a second file system")
    init_dvc(tmp_path)
    assert [finding.level for finding in doctor._file_system(tmp_path)] == ["ok"]
    with tempfile.TemporaryDirectory(dir=memory) as cache:
        dvc_setting.cache_clear()
        (tmp_path / ".dvc" / "config").write_text(f"[cache]\n    type = hardlink\n    dir = {cache}\n")
        (finding,) = doctor._file_system(tmp_path)
        assert finding.level == "problem" and f"works between {cache} and {tmp_path} (hardlink: " in finding.text
        dvc_setting.cache_clear()
        (tmp_path / ".dvc" / "config").write_text(f"[cache]\n    type = hardlink,symlink\n    dir = {cache}\n")
        assert [finding.level for finding in doctor._file_system(tmp_path)] == ["ok"]
    dvc_setting.cache_clear()


def test_a_missing_loopback_interface_is_a_problem() -> None:
    isolated = ["unshare", "--map-root-user", "--net"]  # its `lo` is down
    if subprocess.run([*isolated, "true"], capture_output=True).returncode:
        pytest.skip("this account may not have a network of its own")
    code = "from vlp_models.contrib.doctor import commands; print(*commands._ports())"
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run([*isolated, sys.executable, "-c", code], env=env, capture_output=True, text=True)
    assert "subject='loopback'" in done.stdout and "`ip link set lo up`" in done.stdout, done.stderr
