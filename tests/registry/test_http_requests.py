"""Requests to MLflow's server of a registered version: the guide's examples, and one sentence for what is refused."""

from __future__ import annotations

import base64
import json
import re
import shutil
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import requests

from vlp_models.common.workspace import Workspace

GUIDE = Path(__file__).parents[2] / "docs" / "guides" / "promotion.md"
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def server(page_project: Workspace) -> Iterator[str]:
    """Serve vlp-vqa's version with the application that `mlflow models serve` runs; yield its address."""
    import mlflow
    import uvicorn
    from mlflow.pyfunc import scoring_server

    with pytest.MonkeyPatch.context() as patch, socket.socket() as listening:
        patch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{page_project.root / 'mlflow.db'}")
        patch.chdir(page_project.root)
        patch.setattr(sys, "path", list(sys.path))  # MLflow adds the version's code
        application = scoring_server.init(mlflow.pyfunc.load_model("models:/vlp-vqa/1"))
        listening.bind(("127.0.0.1", 0))
        running = uvicorn.Server(uvicorn.Config(application, log_level="warning"))
        thread = threading.Thread(target=running.run, kwargs={"sockets": [listening]}, daemon=True)
        thread.start()
        while not running.started:
            assert thread.is_alive()
            time.sleep(0.05)
        yield f"http://127.0.0.1:{listening.getsockname()[1]}/invocations"
        running.should_exit = True
        thread.join(30)


def image_text(workspace: Workspace) -> str:
    return base64.b64encode(next((workspace.root / "data" / "raw").rglob("*.png")).read_bytes()).decode()


PATH = "`image`: not the base64 text of an image file; this server opens no paths"
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "bad base64": ({"image": "data:image/png;base64,@@@"}, "`image`: the image is not valid base64"),
    "half an image": ({"image": "HALF"}, r"`image`: base64 text: not a readable image \(.*\)"),
    "a path": ({"image": "/etc/passwd"}, PATH),
    "a number": (
        {"image": 5},
        "`image`: must be the base64 text of an image file, or its pixels as a list; found int.*",
    ),
    "a mapping": ({"image": {"b64": "x"}}, "`image`: must be the base64 text .*; found dict"),
    "no image": (
        {"image": ...},
        "a request for vqa needs the column `image`, the base64 text of an image file; found text",
    ),
    "no text": ({"text": ...}, "a request for vqa needs the column `text`, a question per image; found image"),
    "text is a number": ({"text": 5}, "`text`: the question must be a string; found int.*"),
    "text is null": ({"text": None}, "`text`: the question must be a string; found NoneType"),
    "text is blank": ({"text": " \t\u3000"}, "`text`: the question is blank"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_bad_request_is_refused_with_one_sentence(server: str, page_project: Workspace, name: str) -> None:
    change, expected = REFUSED[name]
    image = image_text(page_project)
    row = {"image": image, "text": "what is it ?"} | change
    row = {
        key: image[: len(image) // 2] if value == "HALF" else value for key, value in row.items() if value is not ...
    }
    found = requests.post(server, json={"dataframe_records": [row]}, timeout=60)
    assert found.status_code == 400
    answer = found.json()
    assert re.fullmatch(expected, answer["message"]), answer["message"]
    assert "stack_trace" not in answer and "Traceback" not in found.text and image[:40] not in found.text


@pytest.mark.parametrize(
    ("body", "problem"),
    [
        ({"dataframe_split": {"columns": ["image", "text"], "data": []}}, "the request has no rows"),
        ({"dataframe_records": []}, "the request has no rows"),
        ({"dataframe_records": [{"image": "x", "text": "y"}] * 65}, "the request has 65 rows; the limit is 64"),
    ],
)
def test_a_request_without_rows_or_with_too_many_is_refused(server: str, body: dict[str, Any], problem: str) -> None:
    found = requests.post(server, json=body, timeout=60)
    assert (found.status_code, found.json()["message"]) == (400, problem)


@pytest.mark.parametrize("body", ["no JSON", "[]", "{}", '{"dataframe_records": 5}', '{"inputs": 5}'])
def test_a_body_of_another_form_is_refused_without_a_stack_trace(server: str, body: str) -> None:
    found = requests.post(server, data=body, headers={"Content-Type": "application/json"}, timeout=60)
    assert found.status_code == 400 and found.json()["message"]
    assert "stack_trace" not in found.json() and "Traceback" not in found.text


def test_a_fault_of_the_server_is_500_without_its_stack_trace(
    server: str, page_project: Workspace, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise RuntimeError("a secret of the server")

    (module,) = {sys.modules[name] for name in list(sys.modules) if name == "vlp_models.serving.predictor"}
    monkeypatch.setattr(module.Predictor, "predict_opened", fail)
    body = {"dataframe_records": [{"image": image_text(page_project), "text": "what is it ?"}]}
    found = requests.post(server, json=body, timeout=60)
    assert found.status_code == 500 and "secret" not in found.text and "Traceback" not in found.text
    assert found.json()["message"] == "the model failed on this request; the server's log has the reason"


def test_the_examples_of_the_guide_work(server: str, page_project: Workspace, tmp_path: Path) -> None:
    section = GUIDE.read_text(encoding="utf-8").partition("## Serve over HTTP\n")[2].partition("\n## ")[0]
    section = section.replace("http://127.0.0.1:5001/invocations", server)
    (tmp_path / "photo.jpg").write_bytes(base64.b64decode(image_text(page_project)))
    (python,) = re.findall(r"^```python\n(.*?)^```", section, re.M | re.S)
    printed = subprocess.run([sys.executable, "-c", python], cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert printed.returncode == 0, printed.stderr
    if shutil.which("curl") is None:
        pytest.skip("curl is not on this machine")
    lines = [line[2:] for line in section.splitlines() if line.startswith(("$ echo", "$ curl"))]
    assert len(lines) == 2
    by_curl = subprocess.run(
        ["bash", "-c", "\n".join(lines)], cwd=tmp_path, capture_output=True, text=True, timeout=120, check=True
    )
    (prediction,) = json.loads(by_curl.stdout)["predictions"]
    assert prediction["answer"] == printed.stdout.strip() and prediction["top"]


def test_concurrent_requests_get_their_own_answers(server: str, page_project: Workspace) -> None:
    image = image_text(page_project)
    questions = ["what is it ?", "how many are there ?", "is it red ?"] * 4

    def ask(question: str) -> dict[str, Any]:
        bad = question.startswith("how")
        row = {"image": image[: len(image) // 2] if bad else image, "text": question}
        return dict(requests.post(server, json={"dataframe_records": [row]}, timeout=60).json())

    alone = {question: ask(question) for question in questions[:3]}
    with ThreadPoolExecutor(12) as pool:
        together = list(pool.map(ask, questions))
    for question, found in zip(questions, together, strict=True):
        wanted = alone[question]
        assert set(found) == set(wanted)
        if "predictions" in wanted:
            (one,), (other,) = found["predictions"], wanted["predictions"]
            assert one["answer"] == other["answer"]
            assert [p for _, p in one["top"]] == pytest.approx([p for _, p in other["top"]], abs=1e-5)
    assert "message" in alone["how many are there ?"]
