"""Trainings that read their shards from an S3 server: the same to the last bit as from a folder, whatever happens."""

from __future__ import annotations

import json
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from rank_runs import result, run
from s3_server import BUCKET, Server, credentials, s3_server
from toy_dataset import KilledAt, Toy, same_weights, untimed, write_shards, write_tokenizer, write_workspace

from vlp_models.common.workspace import Workspace
from vlp_models.data.tokenizer import Tokenizer
from vlp_models.errors import DataError
from vlp_models.pipeline.stages import pretrain

pytestmark = pytest.mark.slow

WAITS = {"timeout_seconds": 90, "retry_seconds": 0.05}


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    pytest.importorskip("moto")
    with s3_server() as found:
        yield found


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """44 pairs in three shards."""
    folder = tmp_path_factory.mktemp("root")
    write_shards(folder / "shards")
    write_tokenizer(folder / "tokenizer")
    return folder


@pytest.fixture
def remote(
    server: Server, root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> dict[str, Any]:
    """`trainer.stream` for shards on the server, a copy of a test's own."""
    credentials(monkeypatch, server, tmp_path)
    return {"address": server.upload(root / "shards", f"fit/{request.node.name}"), **WAITS}


def toy_of(root: Path) -> Toy:
    return Toy(root / "shards", Tokenizer.load(root / "tokenizer"))


@pytest.fixture(scope="module")
def from_folder(root: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[torch.nn.Module, list[dict[str, Any]]]:
    folder = {"address": str(root / "shards"), **WAITS}
    model, done = toy_of(root).fit(tmp_path_factory.mktemp("work"), stream=folder)
    return model, untimed(done.rows)


@pytest.mark.parametrize("workers", [0, 1, 2])
def test_streaming_from_a_server_equals_a_folder(
    root: Path, remote: dict[str, Any], from_folder: Any, tmp_path: Path, workers: int
) -> None:
    model, done = toy_of(root).fit(tmp_path / "work", stream=remote, num_workers=workers)
    assert same_weights(model, from_folder[0]) and untimed(done.rows) == from_folder[1]


@pytest.mark.long  # resuming in one process: test_truncated_shard_stops_the_run_and_resumes_once_fixed
@pytest.mark.timeout(600)
@pytest.mark.parametrize(("ranks", "workers"), [(1, 1), (2, 0)], ids=["one-with-a-worker", "two"])
def test_streamed_run_resumes_after_kill_within_an_epoch(
    root: Path, remote: dict[str, Any], from_folder: Any, ranks: int, workers: int
) -> None:
    """The fourth of an epoch's six updates is saved, and then all processes are killed at once, workers too."""
    work = f"killed-{ranks}"
    settings = {"devices": ranks, "num_workers": workers, "stream": remote, "batch_size": 8}
    kill = {"step": 4, "number": signal.SIGKILL, "to": "group"}
    code, stderr = run(root, work, signal=kill, **settings)
    assert code != 0 and not (root / work / "rows.json").exists(), stderr
    code, stderr = run(root, work, **settings)
    assert code == 0, stderr
    weights, resumed_from, rows = result(root, work, ranks)
    assert resumed_from == 4
    if ranks == 1:
        wanted = dict(from_folder[0].state_dict()), from_folder[1]
    else:
        code, stderr = run(root, "whole", **{**settings, "stream": {**remote, "address": str(root / "shards")}})
        assert code == 0, stderr
        wanted = result(root, "whole")[0], json.loads((root / "whole" / "rows.json").read_text())[1]
    assert rows == wanted[1]
    assert all(torch.equal(weights[name], weight) for name, weight in wanted[0].items())


class Away:
    """A tracker that takes the server away once an update is saved; validation then needs it."""

    def __init__(self, server: Server, seconds: float) -> None:
        self.server, self.seconds = server, seconds
        self.back: threading.Timer | None = None

    def sync(self, log: Path) -> None:
        if self.back is None:
            self.server.stop()
            self.back = threading.Timer(self.seconds, self.server.start)
            self.back.start()


@pytest.mark.parametrize("seconds", [2.0, pytest.param(60.0, marks=[pytest.mark.long, pytest.mark.timeout(300)])])
def test_training_waits_for_an_unavailable_server(
    server: Server,
    root: Path,
    remote: dict[str, Any],
    from_folder: Any,
    tmp_path: Path,
    seconds: float,
    capsys: pytest.CaptureFixture[str],
) -> None:
    away, started = Away(server, seconds), time.monotonic()
    model, done = toy_of(root).fit(tmp_path / "work", stream=remote, tracker=away)
    assert time.monotonic() - started > seconds
    assert away.back is not None
    away.back.join()
    assert same_weights(model, from_folder[0]) and untimed(done.rows) == from_folder[1]
    assert "the store does not respond" in capsys.readouterr().err


def test_truncated_shard_stops_the_run_and_resumes_once_fixed(
    server: Server, root: Path, remote: dict[str, Any], from_folder: Any, tmp_path: Path
) -> None:
    """An epoch never has fewer pairs in silence."""
    toy, work = toy_of(root), tmp_path / "work"
    key = f"{remote['address'].removeprefix(f's3://{BUCKET}/')}/train-00000001.tar"
    whole = (root / "shards" / "train-00000001.tar").read_bytes()
    with pytest.raises(InterruptedError):
        toy.fit(work, stream=remote, tracker=KilledAt(work, 2))
    server.client.put_object(Bucket=BUCKET, Key=key, Body=whole[: len(whole) // 2])
    with pytest.raises(DataError, match=r"train-00000001\.tar: truncated: .* 3 times; upload this shard again"):
        toy.fit(work, stream=remote)
    server.client.put_object(Bucket=BUCKET, Key=key, Body=whole)
    model, done = toy.fit(work, stream=remote)
    assert done.resumed_from, "from what the first run had saved"
    assert same_weights(model, from_folder[0]) and untimed(done.rows) == from_folder[1]


def test_denied_access_names_the_key_and_leaves_no_partial_output(
    server: Server, remote: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Denied at the start, and at validation after an epoch; once permitted, training resumes from there."""
    params, workspace = write_workspace(tmp_path, trainer={"stream": remote}), Workspace(tmp_path)
    published, prefix = workspace.checkpoint("pretrain/tden"), remote["address"].removeprefix(f"s3://{BUCKET}/")
    for name, saved in (("manifest.json", []), ("val-00000000.tar", [2, 4])):
        with server.denying(f"*/{name}"), pytest.raises(DataError) as caught:
            pretrain.run(params, workspace, "tden")
        assert f"access denied to s3 bucket {BUCKET}, key {prefix}/{name} (" in str(caught.value)
        assert "\n" not in str(caught.value)
        held = {file.name for file in tmp_path.glob(".work/pretrain-tden/*/*.ckpt*")}
        assert held == {f"step-{step:08d}.ckpt{suffix}" for step in saved for suffix in ("", ".sha256")}
        assert not published.parent.exists() and not workspace.curve("pretrain/tden").exists()
    pretrain.run(params, workspace, "tden")
    assert "resuming from step 4" in capsys.readouterr().err
    assert (published / "manifest.json").exists()
