"""`vlp label` as it is used: a process, requests of several browsers, a kill, and requests of strangers."""

from __future__ import annotations

import csv
import io
import signal
import socket
import threading
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
import requests
from label_project import Client, LabelServer, make_project
from PIL import Image
from typer.testing import CliRunner

from vlp_models.cli.main import app
from vlp_models.contrib.label.server import host_pattern
from vlp_models.curation.duplicates.hashes import hash_image_file
from vlp_models.errors import VLPError

pytestmark = pytest.mark.slow
Start = Callable[..., LabelServer]


def rows(server: LabelServer) -> list[dict[str, str]]:
    with server.listing.open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def test_two_browsers_caption_all_photos_and_lose_nothing(tmp_path: Path, start: Start) -> None:
    server = start(make_project(tmp_path, 24))
    images: dict[str, list[str]] = {"browser-1": [], "browser-2": []}

    def work(name: str) -> None:
        client = server.client(name)
        shown = client.post("/next")["shown"]
        assert client.post("/next")["shown"]["image"] == shown["image"], "a reload shows the same photo"
        while shown is not None:
            images[name].append(shown["image"])
            shown = client.answer(shown["image"], f"photo {shown['image']} by {name}", by=name)["shown"]

    threads = [threading.Thread(target=work, args=(name,)) for name in images]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=120)
    written = rows(server)
    assert Counter(row["image"] for row in written) == {f"img/{number:03}.jpg": 1 for number in range(24)}
    assert not set(images["browser-1"]) & set(images["browser-2"])
    for row in written:
        assert row["caption"] == f"photo {row['image']} by {row['labeled_by']}"
        assert row["labeled_at"].endswith("Z") and row["image"] in images[row["labeled_by"]]
    # Both may caption one photo all the same: both captions stay.
    for name in images:
        server.client(name).answer("img/000.jpg", f"another caption of {name}")
    assert Counter(row["image"] for row in rows(server))["img/000.jpg"] == 3
    output = server.stop()
    assert server.process.returncode == 128 + signal.SIGTERM
    assert "26 captions saved" in output and "24 of 24 photos have a caption\nnext: `vlp run`" in output


def test_a_killed_server_continues_and_an_answer_sent_twice_is_written_once(tmp_path: Path, start: Start) -> None:
    server = start(make_project(tmp_path, 6))
    client = server.client("browser-1")
    first = client.post("/next")["shown"]["image"]
    label = client.answer(first, "two dogs play in snow")["label"]
    server.stop(signal.SIGKILL)
    server.start()
    # The open page has the cookie of the server before, and repeats what was not acknowledged.
    result = client.answer(first, "two dogs play in snow")
    assert len(rows(server)) == 1 and result["shown"]["image"] != first
    assert result["progress"]["labeled"] == 1
    # Skipped photos come after the others, and a label can be taken back.
    skipped = result["shown"]["image"]
    shown, seen_images = client.post("/skip", image=skipped)["shown"], []
    while shown["image"] != skipped:
        seen_images.append(shown["image"])
        shown = client.answer(shown["image"], f"a photo of {shown['image']}")["shown"]
    assert len(seen_images) == 4
    assert client.post("/undo", 200, **_undo(label))["shown"]["image"] == first
    assert first not in {row["image"] for row in rows(server)}
    assert "no longer in pairs.csv" in client.post("/undo", 422, **_undo(label))["problem"]


def _undo(label: dict[str, str]) -> dict[str, str]:
    return {name: label[name] for name in ("image", "caption", "by", "at", "draft")}


def test_drafts_of_similar_photos_and_the_active_order(tmp_path: Path, start: Start) -> None:
    project = make_project(tmp_path, 20)
    copies = project / "data/raw/own/img"
    for number in range(3):  # a copy of each captioned photo
        Image.open(copies / f"{number:03}.jpg").resize((100, 75)).save(copies / f"copy-{number}.png")
    (project / "data/raw/own/pairs.csv").write_text(
        "image,caption,split\n"
        + "".join(f"img/{number:03}.jpg,a drawing number {number},train\n" for number in range(3))
    )
    server = start(project)
    client = server.client("browser-1")
    progress = server.wait_for(client, "order", "photos unlike the labeled ones first")
    assert progress["labeled"] == 3 and "no model is registered yet" in progress["notes"]["drafts"]
    server.wait_for(client, "gain", "40 labels are needed for an estimate, 3 are there")
    for number in range(3):
        shown = client.get("/progress", params={"image": f"img/copy-{number}.png"}).json()["shown"]
        assert shown["draft"]["text"] == f"a drawing number {number}"
        assert shown["draft"]["origin"] == f"the caption of img/{number:03}.jpg"
    offered = []
    shown = client.post("/next")["shown"]
    while shown is not None:
        offered.append(shown["image"])
        draft = shown["draft"]
        caption = draft["text"] if len(offered) % 2 else f"{draft['text']} indeed"
        shown = client.answer(shown["image"], caption, draft=draft["text"], origin=draft["origin"])["shown"]
    assert not any("copy" in image for image in offered[:9]), "copies are nothing new"
    states = [row["label_draft"].rpartition(", ")[2] for row in rows(server)[3:]]
    assert states == ["accepted", "edited"] * 10 and {row["split"] for row in rows(server)} == {"train"}
    # A restart reads the features from the cache.
    assert (project / ".work/label/own/features.npz").exists()
    server.stop(signal.SIGKILL)
    server.start()
    assert server.wait_for(client, "order", "photos unlike the labeled ones first")["labeled"] == 23


def test_evaluation_photos_get_no_draft(tmp_path: Path, start: Start) -> None:
    project = make_project(tmp_path, 20)
    (project / "data/raw/own/pairs.csv").write_text("image,caption\nimg/000.jpg,a drawing\n")
    client = (server := start(project)).client("browser-1")
    server.wait_for(client, "order", "photos unlike")
    names = [f"img/{number:03}.jpg" for number in range(20)]
    shown = [client.get("/progress", params={"image": name}).json()["shown"] for name in names]
    splits = Counter(photo["split"] for photo in shown)
    assert splits["train"] > 10 and splits["val"] and splits["test"]
    for photo in shown:
        assert photo["draft"]["text"] == ("a drawing" if photo["split"] == "train" else "")
        assert ("evaluation data" in photo["reason"]) == (photo["split"] != "train")


def test_a_photo_that_was_forgotten_is_refused_and_one_that_is_damaged_left_out(tmp_path: Path, start: Start) -> None:
    withdrawn = pytest.importorskip("vlp_models.contrib.forgetting.withdrawn")
    project = make_project(tmp_path, 5)
    folder = project / "data/raw/own/img"
    (folder / "004.jpg").write_bytes((folder / "004.jpg").read_bytes()[:2000])
    (folder / "page.png").write_text("<html>not a photo</html>")
    server = start(project, "--order", "file")
    client = server.client("browser-1")
    image = client.post("/next")["shown"]["image"]
    assert image == "img/000.jpg"
    # While it is on the screen, `vlp forget` withdraws it; then a copy of another photo.
    for file in ("000.jpg", "002.jpg"):
        hashes = hash_image_file(folder / file, 10**8)
        entry = withdrawn.WithdrawnImage.create(
            hashes.sha256.hex(), hashes.pixels.hex(), hashes.fingerprint, [f"own/img/{file}"], keep_fingerprint=False
        )
        withdrawn.withdraw(project / "data/withdrawn.jsonl", [entry])
    Image.open(folder / "002.jpg").save(folder / "003.jpg", quality=60)
    refused = client.answer(image, "two dogs play in snow", 422)
    assert refused["problem"].startswith("img/000.jpg was withdrawn by `vlp forget` (byte for byte)")
    assert client.get("/photo", params={"image": image}).status_code == 422
    assert not server.listing.exists()
    result = client.post("/next")
    assert result["shown"]["image"] == "img/001.jpg"
    assert client.answer("img/003.jpg", "two dogs play in snow", 422)["problem"].startswith("img/003.jpg was withdrawn")
    result = client.answer("img/001.jpg", "two dogs play in snow")
    assert result["shown"] is None and [row["image"] for row in rows(server)] == ["img/001.jpg"]
    assert result["progress"]["left_out"] == 5
    assert result["progress"]["reasons"][0].startswith("img/000.jpg was withdrawn")


def test_strangers_and_malformed_requests_are_refused(tmp_path: Path, start: Start) -> None:
    server = start(make_project(tmp_path, 2))
    (tmp_path / "secret.jpg").write_bytes((tmp_path / "data/raw/own/img/000.jpg").read_bytes())
    client, stranger = server.client("browser-1"), Client(server.address, requests.Session(), "browser-2")
    body = {"browser": "browser-1", "image": "img/000.jpg", "caption": "two dogs play", "by": "Zoë"}
    json_type = {"Content-Type": "application/json"}

    def status(sender: Client, path: str, **more: object) -> int:
        return int(sender.session.post(server.address + path, timeout=60, **more).status_code)  # type: ignore[arg-type]

    assert stranger.get("/").status_code == stranger.get("/", params={"token": "x" * 43}).status_code == 403
    assert stranger.get("/photo", params={"image": "img/000.jpg"}).status_code == 403
    assert stranger.get("/progress", params={"token": server.token}).status_code == 403, "the token opens the page only"
    assert status(stranger, "/answer", json=body) == 403
    # A site whose name resolves to this machine, another port of it, and a form of another site
    assert client.get("/", headers={"Host": f"evil.example:{server.port}"}).status_code == 421
    assert status(client, "/answer", json=body, headers={"Host": "evil.example"}) == 421
    assert status(client, "/answer", json=body, headers={"Origin": "http://evil.example"}) == 403
    assert status(client, "/answer", json=body, headers={"Origin": "http://127.0.0.1:1"}) == 403
    assert status(client, "/answer", json=body, headers={"Origin": "null"}) == 403
    assert status(client, "/answer", data=body) == 415
    # Sizes and types
    assert status(client, "/answer", json={**body, "caption": "x" * 70_000}) == 413
    assert status(client, "/answer", data=iter([b"{}"]), headers=json_type) == 413, "of unknown length"
    for changed in ({"caption": "x" * 3000}, {"by": "x" * 100}, {"browser": "<script>"}, {"caption": 1}, {"more": 1}):
        assert status(client, "/answer", json={**body, **changed}) == 422
    for malformed in (b"[" * 60_000, b"{", b"\xff"):
        assert status(client, "/answer", data=malformed, headers=json_type) in (400, 422)
    for caption, reason in {"https://example.org": "URL", "dog\x00 and cat": "control", "\n": "empty"}.items():
        assert reason in client.answer("img/000.jpg", caption, 422)["problem"]
    for image in (
        "../../../secret.jpg",
        str(tmp_path / "secret.jpg"),
        "img/../img/000.jpg",
        "img/%2e",
        "pairs.csv",
        "",
    ):
        assert client.get("/photo", params={"image": image}).status_code == 422
        assert client.answer(image, "two dogs play", 422)["problem"] == "This photo is not in the dataset."
    assert not server.listing.exists()
    # A name becomes one printable line, and nothing of the page is from elsewhere or may be framed.
    client.answer("img/000.jpg", "two dogs play", by="Zoë\u202e\n Müller")
    assert rows(server)[0]["labeled_by"] == "Zoë\\u202e Müller"
    page = client.get("/")
    assert "default-src 'none'" in page.headers["Content-Security-Policy"]
    assert page.headers["X-Frame-Options"] == "DENY" and "http://" not in page.text.replace(server.address, "")
    photo = client.get("/photo", params={"image": "img/000.jpg"})
    assert photo.headers["Content-Type"] == "image/jpeg" and Image.open(io.BytesIO(photo.content)).size == (200, 150)
    assert (tmp_path / ".work/label/token").stat().st_mode & 0o077 == 0


@pytest.mark.parametrize(
    ("arguments", "data", "message"),
    [
        (["other"], {}, "vlp label other: not a dataset of the format pairs; params.yaml has own"),
        ([], {"pairs": "*/pairs.jsonl"}, "'*/pairs.jsonl' is not a single file"),
        (["--split", "val"], {}, "names no splits, so photos are divided by a hash"),
        (["--lang", "klingon!"], {}, "vlp label --lang klingon!: not a language code"),
        ([], {"root": "data/raw/nothing"}, "no such folder; put the photos there"),
        (["--host", "192.0.2.1"], {}, "vlp label: 192.0.2.1 port 7861"),
    ],
)
def test_what_cannot_be_labeled_is_an_error_in_one_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str], data: dict[str, str], message: str
) -> None:
    monkeypatch.chdir(make_project(tmp_path, 1, **data))
    result = CliRunner().invoke(app, ["label", *arguments])
    assert isinstance(result.exception, VLPError) and message in str(result.exception)
    assert not (tmp_path / "data/raw/own/pairs.csv").exists()


def test_a_server_has_its_addresses_and_the_names_of_the_machine() -> None:
    machine = socket.gethostname()
    for address in ("127.0.0.1", "0.0.0.0", "::"):
        hosts = host_pattern(address)
        for own in ("127.0.0.1:7861", "localhost:7861", "LOCALHOST", "[::1]:7861", "[::1]"):
            assert hosts.fullmatch(own)
        assert bool(hosts.fullmatch(f"{machine}:7861")) == (address != "127.0.0.1")
        for other in ("evil.example:7861", "localhost.evil.example", "127.0.0.1.evil.example", "127x0.0.1", "", "::1"):
            assert not hosts.fullmatch(other)
