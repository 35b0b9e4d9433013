"""The page of `vlp audit` over HTTP: what it shows, what it saves, and whom it refuses."""

from __future__ import annotations

import http.client
import itertools
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from email.message import Message
from io import BytesIO
from typing import Any, NamedTuple
from urllib.parse import quote, urlsplit

import pytest
import yaml
from audited_project import ROOT, Audited
from PIL import Image

from vlp_models.contrib.audit.decisions import DECISIONS, REPORT, read_decisions
from vlp_models.contrib.audit.page import MAX_BODY, serving
from vlp_models.errors import ParamsError
from vlp_models.params import to_plain

JSON = {"Content-Type": "application/json"}


class Site(NamedTuple):
    project: Audited
    port: int
    token: str

    def ask(self, method: str, path: str, body: Any = None, **headers: str) -> tuple[int, bytes, Message]:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=20)
        sent = {name.replace("_", "-"): value for name, value in headers.items()}
        connection.request(method, path, body if body is None or isinstance(body, bytes) else json.dumps(body), sent)
        response = connection.getresponse()
        content = response.read()
        connection.close()
        return response.status, content, response.headers

    def decide(self, caption_id: str, decision: str, **headers: str) -> int:
        body = {"caption_id": caption_id, "decision": decision}
        return self.ask("POST", "/decide", body, X_Token=self.token, **(JSON | headers))[0]


@pytest.fixture
def site(copied: Callable[[], Audited]) -> Iterator[Site]:
    project = copied()
    report = project.workspace.root / REPORT
    rows = project.rows()
    rows[0]["text"] = "<script>alert(1)</script> a ball"
    report.write_text("".join(f"{json.dumps(row)}\n" for row in rows), encoding="utf-8")
    with served(project) as opened:
        yield opened


@contextmanager
def served(project: Audited) -> Iterator[Site]:
    with serving(project.workspace, host="127.0.0.1", port=0) as address:
        url = urlsplit(address)
        assert url.port
        yield Site(project, url.port, url.query.removeprefix("token="))


def finding(kind: str, score: float) -> dict[str, Any]:
    return {"kind": kind, "score": score, "reason": "r"}


def test_pairs_have_thumbnails_and_reasons_and_decisions_are_saved_at_once(site: Site) -> None:
    row = site.project.rows()[0]
    status, content, headers = site.ask("GET", f"/?token={site.token}")
    html = content.decode()
    assert status == 200 and row["findings"][0]["reason"] in html
    assert "<script>alert" not in html and "&lt;script&gt;alert" in html, "captions are escaped"
    assert "default-src 'none'" in headers["Content-Security-Policy"] and "http://" not in html.replace("127.0.0.1", "")
    status, content, headers = site.ask("GET", f"/image?token={site.token}&id={quote(row['image_id'])}")
    assert status == 200 and headers["Content-Type"] == "image/jpeg"
    assert max(Image.open(BytesIO(content)).size) <= 260

    assert site.decide(row["caption_id"], "remove") == 200
    file = site.project.workspace.root / DECISIONS
    assert read_decisions(file) == {row["caption_id"]: "remove"}
    assert site.decide(row["caption_id"], "accept", Origin=f"http://127.0.0.1:{site.port}") == 200
    assert read_decisions(file) == {row["caption_id"]: "accept"}
    assert 'class="chosen"' in site.ask("GET", f"/?token={site.token}")[1].decode()
    # another server continues with the decisions
    with served(site.project) as again:
        assert 'class="chosen"' in again.ask("GET", f"/?token={again.token}")[1].decode()


def test_pages_and_kinds(site: Site) -> None:
    html = site.ask("GET", f"/?token={site.token}&kind=empty")[1].decode()
    assert html.count("<section") == len(site.project.planted["empty"])
    html = site.ask("GET", f"/?token={site.token}&page=2")[1].decode()
    assert 'aria-label="Pair 51"' in html and "Page 2 of" in html
    assert "Page 1 of" in site.ask("GET", f"/?token={site.token}&page=x")[1].decode()
    assert "No pair has this finding" in site.ask("GET", f"/?token={site.token}&kind=nothing")[1].decode()


def test_a_kind_is_sorted_by_its_own_score(site: Site) -> None:
    """A pair may have a low score of this kind, and a high one of another kind that ranks it first among all pairs."""
    report, rows = site.project.workspace.root / REPORT, site.project.rows()[:2]
    rows[0]["findings"] = [finding("language", 0.9), finding("swapped", 0.1)]
    rows[1]["findings"] = [finding("swapped", 0.6)]
    report.write_text("".join(f"{json.dumps(row)}\n" for row in rows), encoding="utf-8")
    with served(site.project) as other:
        of_kind = {kind: other.ask("GET", f"/?token={other.token}&kind={kind}")[1].decode() for kind in ("", "swapped")}
    for kind, ranks in (("", ["1", "2"]), ("swapped", ["2", "1"])):
        assert re.findall(r'aria-label="Pair (\d+)"', of_kind[kind]) == ranks
    assert "All (2)" in of_kind[""] and "Swapped (2)" in of_kind[""] and "Other language (1)" in of_kind[""]


def test_a_copy_is_shown_next_to_the_first_image(site: Site) -> None:
    report, (row, other_row) = site.project.workspace.root / REPORT, site.project.rows()[:2]
    copy_of = {"copy_of": "other/first", "copy_of_path": other_row["path"]}
    line = json.dumps({**row, "findings": [finding("near_duplicate", 0.5)], **copy_of})
    report.write_text(f"{line}\n", encoding="utf-8")
    with served(site.project) as other:
        assert "id=other/first" in other.ask("GET", f"/?token={other.token}")[1].decode()
        assert other.ask("GET", f"/image?token={other.token}&id=other/first")[0] == 200
    report.write_text("", encoding="utf-8")
    with served(site.project) as other:
        assert "found no pair that looks wrong" in other.ask("GET", f"/?token={other.token}")[1].decode()


@pytest.mark.parametrize("width", [1280, 390])
def test_the_page_in_a_browser(site: Site, browser: Any, width: int) -> None:
    """Nothing is cut off; the keyboard decides; a decision that was not saved is reported wherever one has scrolled."""
    from playwright.sync_api import expect

    page = browser.new_page(viewport={"width": width, "height": 844})
    page.goto(f"http://127.0.0.1:{site.port}/?token={site.token}")
    assert page.evaluate("document.documentElement.scrollWidth") == width
    outside = "e => { const box = e.getBoundingClientRect(); return box.right > innerWidth + 1 || box.left < -1; }"
    assert page.evaluate(f"[...document.querySelectorAll('body *')].filter({outside}).length") == 0
    button = page.locator("section button[data-decision=remove]").last
    button.focus()
    page.keyboard.press("Enter")
    expect(page.locator("#removed")).to_have_text("1")
    assert button.get_attribute("aria-pressed") == "true"
    assert list(read_decisions(site.project.workspace.root / DECISIONS).values()) == ["remove"]
    page.route("**/decide", lambda route: route.abort())
    button.press("Shift+Tab")
    page.keyboard.press("Space")
    expect(page.locator("#problem")).to_contain_text("Not saved")
    box = page.locator("#problem").bounding_box()
    assert page.evaluate("scrollY") > 844 and 0 <= box["y"] < 844, "in view"
    assert page.locator("#accepted").inner_text() == "0" and button.get_attribute("aria-pressed") == "true"
    page.close()


def test_strangers_are_refused(site: Site) -> None:
    """Other users of the machine, other sites in the browser, and requests that are no decision."""
    caption = site.project.rows()[0]["caption_id"]
    body = {"caption_id": caption, "decision": "remove"}
    assert site.ask("GET", "/")[0] == 403
    assert site.ask("GET", "/?token=guess")[0] == 403
    assert site.ask("GET", f"/?token={site.token}", Host=f"evil.example:{site.port}")[0] == 421
    assert site.ask("POST", "/decide", body, **JSON)[0] == 403
    assert site.decide(caption, "remove", Origin="http://evil.example") == 403
    assert site.ask("POST", "/decide", body, X_Token=site.token, Content_Type="text/plain")[0] == 415
    for wrong in (b"{", b"[]", b'{"caption_id": "x/1", "decision": "remove"}', b"[" * 5000):
        assert site.ask("POST", "/decide", wrong, X_Token=site.token, **JSON)[0] == 422
    assert site.decide(caption, "erase") == 422
    assert site.ask("POST", "/decide", b"x" * (MAX_BODY + 1), X_Token=site.token, **JSON)[0] == 413
    assert not (site.project.workspace.root / DECISIONS).exists(), "nothing was saved"


def test_only_images_of_the_report_are_sent(site: Site) -> None:
    (site.project.workspace.root / "secret.jpg").write_bytes(b"private")
    for name in ("secret.jpg", "../secret.jpg", "/etc/passwd", "scenes/nothing"):
        assert site.ask("GET", f"/image?token={site.token}&id={quote(name)}")[0] == 404
    assert site.ask("GET", f"/reports/audit.jsonl?token={site.token}")[0] == 404


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 128 + signal.SIGTERM), (signal.SIGINT, 0)])
def test_signals_close_the_page(site: Site, number: int, code: int) -> None:
    root = site.project.workspace.root
    (root / "params.yaml").write_text(yaml.safe_dump(to_plain(site.project.params)), encoding="utf-8")
    command = [sys.executable, "-m", "vlp_models.cli.main", "audit", "--page-only", "--port", "0"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    process = subprocess.Popen(command, cwd=root, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    assert process.stdout is not None
    lines = list(itertools.takewhile(lambda line: not line.startswith(b"press Ctrl-C"), process.stdout))
    assert process.poll() is None, lines
    process.send_signal(number)
    rest, _ = process.communicate(timeout=60)
    assert (process.returncode, rest) == (code, b"")


def test_a_port_in_use_is_one_sentence(site: Site) -> None:
    with (
        pytest.raises(ParamsError, match=r"port \d+: Address already in use; choose others with --host and --port"),
        serving(site.project.workspace, host="127.0.0.1", port=site.port),
    ):
        pass
