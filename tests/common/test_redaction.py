"""No secret leaves the process: messages, logs, files, MLflow, webhooks, exceptions, tracebacks."""

from __future__ import annotations

import json
import logging
import subprocess
import sys
import traceback
from pathlib import Path
from typing import Any

import pytest
import yaml

from vlp_models.common.log import StderrHandler
from vlp_models.common.redaction import redact, redact_yaml, redacted, without_secrets
from vlp_models.flows.process import StageFailed, TimedOut, run_supervised
from vlp_models.params import TrackingParams
from vlp_models.registry import mlflow_run
from vlp_models.registry.client import tracking_errors
from vlp_models.registry.evaluations import log_lineage

SECRET = "hunter2-s3cr3t"
URI = f"http://ann:{SECRET}@127.0.0.1:9/mlflow?token={SECRET}&page=2"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (f"MLflow at https://ann:{SECRET}@host/x: no", "MLflow at https://***@host/x: no"),
        (f"postgresql+psycopg2://ann:p@{SECRET}@db:5432/mlflow", "postgresql+psycopg2://***@db:5432/mlflow"),
        (f"https://host/x?a=1&access_token={SECRET}&b=2", "https://host/x?a=1&access_token=***&b=2"),
        (f"https://b.s3/x?X-Amz-Signature={SECRET}", "https://b.s3/x?X-Amz-Signature=***"),
        (f"{{'Authorization': 'Bearer {SECRET}'}}", "{'Authorization': 'Bearer ***'}"),
        (f"curl -H 'authorization: Basic {SECRET}'", "curl -H 'authorization: Basic ***'"),
        ("git@host:x.git, a@b.org, sqlite:////home/x/mlflow.db", None),
        ("the token of step 3 is 5; tokens: 7; mlflow ui --backend-store-uri sqlite:///mlflow.db", None),
    ],
)
def test_secrets_are_removed_and_other_text_stays(text: str, expected: str | None) -> None:
    assert redact(text) == (text if expected is None else expected)
    assert redact(redact(text)) == redact(text)


def test_environment_variables_and_keys_are_secrets_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_PASSWORD", SECRET)
    monkeypatch.setenv("TOKENIZERS_PARALLELISM", "falsely")
    assert redact(f"wrong password {SECRET}!, falsely") == "wrong password ***!, falsely"
    hook = "https://hooks.example.org/services/T0/B0/xyz"
    params = {"flow": {"webhook": hook, "notify": "all"}, "a": [{"password": "abc"}], "other": {"webhook": "env:HOOK"}}
    assert redacted(params) == {
        "flow": {"webhook": "***", "notify": "all"},
        "a": [{"password": "***"}],
        "other": {"webhook": "env:HOOK"},
    }
    assert redact_yaml("{ not: yaml: at all") == "{ not: yaml: at all"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("{webhook: https://h.org/x, notify: all}  # https://h.org/x", '{webhook: "", notify: all}  # ***'),
        ("webhook: |\n  https://h.org/x\npassword: 'a: b'", 'webhook: ""\npassword: "***"'),
        ("a: [{token: &t abcdef}]\nb: &m {password: 1, c: *m}", 'a: [{token: "***"}]\nb: &m {password: 1, c: *m}'),
        ("webhook: env:HOOK\npassword: ''", "webhook: env:HOOK\npassword: ''"),
    ],
)
def test_yaml_without_its_secrets_is_valid(text: str, expected: str) -> None:
    """A plain `***` would be an alias."""
    assert redact_yaml(text) == expected
    yaml.safe_load(expected)


def test_messages_and_state_of_an_mlflow_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from vlp_models.errors import TrackingError

    def connect(*_: Any) -> None:
        raise OSError(f"{URI} refused")

    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)  # MLflow sets it
    monkeypatch.setattr(mlflow_run, "connect", connect)
    with pytest.raises(TrackingError) as caught, tracking_errors(URI):
        raise OSError(f"Error: {URI} refused")
    params = TrackingParams(uri=URI, artifacts="x", experiment="toy", model_prefix="toy", metric={})
    run = mlflow_run.MLflowRun(params, tmp_path, tmp_path, title="x", run_params={"webhook": SECRET}, tags={})
    run.sync(tmp_path / "log.jsonl")
    log = capsys.readouterr().err
    assert "127.0.0.1" in log and SECRET not in log
    state = (tmp_path / mlflow_run.STATE).read_text()
    assert "127.0.0.1" in state and "127.0.0.1" in str(caught.value)
    assert SECRET not in state + str(caught.value) + run.uri
    again = mlflow_run.MLflowRun(params, tmp_path, tmp_path, title="x", run_params={}, tags={})
    assert again.key == run.key, "the same server, so the same run"


def test_lineage_stored_with_a_version() -> None:
    kept: dict[str, str] = {}

    class Client:
        def log_text(self, run_id: str, text: str, file: str) -> None:
            kept[file] = text

    record = {"params": {"tracking": {"uri": URI}, "flow": {"webhook": f"https://hook/{SECRET}"}}}
    files = {"params.yaml": f"tracking: {{uri: '{URI}'}}\nflow:\n  webhook: https://hook/{SECRET}\n"}
    client: Any = Client()
    log_lineage(client, "1", record, files)
    assert set(kept) == {"lineage/lineage.json", "lineage/params.yaml"}
    assert SECRET not in json.dumps(kept) and "127.0.0.1" in kept["lineage/params.yaml"]


def test_failed_part(tmp_path: Path) -> None:
    lines: list[str] = []
    with pytest.raises(StageFailed) as caught:
        run_supervised(
            tmp_path, [sys.executable, "-c", f"import sys; print('{URI}'); sys.exit('at {URI}')"], lines.append
        )
    output = "".join(lines) + str(caught.value).partition("exited with code")[2]
    assert "127.0.0.1" in output and SECRET not in output


def test_exception_of_any_type_leaves_without_secrets() -> None:
    """Its message becomes a flow's state, which a server stores."""

    class Odd(Exception):
        def __init__(self, url: str, code: int) -> None:
            super().__init__(f"{code} at {url}")

    plain = OSError(28, "No space left on device", "a.txt")
    for error, kind, words in (
        (TimedOut(f"no response of {URI}"), TimedOut, "no response of http://***@127"),
        (ConnectionError(f"{URI} refused"), ConnectionError, "http://***@127"),
        (Odd(URI, 503), RuntimeError, "Odd: 503 at http://***@127"),
        (plain, OSError, "a.txt"),
    ):
        with pytest.raises(kind) as caught, without_secrets():
            raise error
        shown = "".join(traceback.format_exception(caught.value))
        assert words in str(caught.value) and SECRET not in shown
        assert (caught.value is error) == (error is plain)


def test_errors_and_tracebacks_of_the_command_line(tmp_path: Path) -> None:
    code = f"""
import sys
import vlp_models.cli.main as cli
from vlp_models.errors import DataError
def app():
    raise {{}}("at {URI}")
cli.app = app
cli.main()
"""
    for error, exit_code in (("DataError", 2), ("RuntimeError", 1)):
        command = [sys.executable, "-c", code.format(error)]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
        assert done.returncode == exit_code
        assert "127.0.0.1" in done.stderr and SECRET not in done.stderr.replace(f'raise {error}("at {URI}")', "")


def test_log_is_redacted(capsys: pytest.CaptureFixture[str]) -> None:
    record = logging.LogRecord("vlp_models.x", logging.WARNING, "x.py", 1, "cannot reach %s", (URI,), None)
    StderrHandler().handle(record)
    assert capsys.readouterr().err == "warning: cannot reach http://***@127.0.0.1:9/mlflow?token=***&page=2\n"
