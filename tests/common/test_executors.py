"""Executors: features and shards of several processes equal those of one, byte for byte, also after an interruption."""

from __future__ import annotations

import dataclasses
import multiprocessing
import shutil
import signal
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
from drawn_workspace import make_workspace, params_with

from vlp_models.common.executors import LocalMapper, bounded_results
from vlp_models.common.io import hash_path
from vlp_models.common.workspace import Workspace
from vlp_models.data import features as storage
from vlp_models.data.tables import write_table
from vlp_models.errors import ProcessLostError
from vlp_models.params import Params
from vlp_models.pipeline.engines import Cluster
from vlp_models.pipeline.stages import detector, features, shards

LENIENT = {"min_score": 0.01, "max_regions": 4}


def settings() -> Params:
    params = params_with(features=LENIENT)
    return dataclasses.replace(params, shards=dataclasses.replace(params.shards, images_per_shard=2, pixels=True))


@pytest.fixture
def workspace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Workspace:
    """Prepare nine drawings with one caption each, up to `features`."""
    monkeypatch.setattr(storage, "CHUNK_IMAGES", 4)
    drawn = make_workspace(tmp_path)
    captions = [
        {"caption_id": f"drawn/{i}#0", "image_id": f"drawn/{i}", "text": f"drawing {i}", "provenance": ""}
        for i in range(9)
    ]
    write_table(captions, "captions", drawn.validated)
    for name in ("questions", "statements", "choices"):
        write_table([], name, drawn.validated)
    detector.run(settings(), drawn)
    return drawn


class Interrupted:
    """A mapper that runs the first `count` chunks in this process and is then interrupted."""

    def __init__(self, count: int) -> None:
        self.count = count

    def map(self, function: Callable[[Any], Any], items: Iterable[Any]) -> Iterator[Any]:
        for number, item in enumerate(items):
            if number == self.count:
                raise KeyboardInterrupt
            yield function(item)


@pytest.mark.slow
def test_output_of_two_processes_equals_that_of_one(workspace: Workspace) -> None:
    params = settings()
    features.run(params, workspace, mapper=LocalMapper(1))
    shards.run(params, workspace)
    alone = hash_path(workspace.features), hash_path(workspace.shards)
    shutil.rmtree(workspace.root / ".work" / "features" / "kept")
    params = dataclasses.replace(params, sections={"cluster": Cluster(workers=2)})
    features.run(params, workspace)
    shards.run(params, workspace)
    assert (hash_path(workspace.features), hash_path(workspace.shards)) == alone
    assert not list((workspace.root / ".work" / "shards").iterdir())  # nothing left behind


@pytest.mark.slow
def test_interrupted_shards_are_resumed(workspace: Workspace, monkeypatch: pytest.MonkeyPatch) -> None:
    params = settings()
    features.run(params, workspace)
    shards.run(params, workspace)
    complete = hash_path(workspace.shards)
    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(shards, "cluster_mapper", lambda *_: Interrupted(2))
        shards.run(params, workspace)
    assert hash_path(workspace.shards) == complete  # the old output stays
    closed: list[int] = []
    close = shards.ShardWriter.close
    monkeypatch.setattr(shards.ShardWriter, "close", lambda self: closed.append(self._number) or close(self))
    shards.run(params, workspace)
    assert closed == [2, 0, 0]  # the third of train's shards, and the one of val and of test
    assert hash_path(workspace.shards) == complete


@pytest.mark.slow
def test_a_killed_process_ends_the_stage_with_the_way_out() -> None:
    with pytest.raises(ProcessLostError, match=r"`cluster\.workers` to fewer.*the same command continues"):
        list(LocalMapper(2).map(signal.raise_signal, [signal.SIGKILL] * 9))
    assert not multiprocessing.active_children()


def test_only_a_few_chunks_are_pending() -> None:
    class Future:
        def __init__(self, item: int) -> None:
            self.item = item

        def result(self) -> int:
            nonlocal pending
            pending -= 1
            return self.item

    pending = highest = 0

    def submit(item: int) -> Future:
        nonlocal pending, highest
        pending += 1
        highest = max(highest, pending)
        return Future(item)

    assert list(bounded_results(submit, range(10), 3)) == list(range(10))
    assert highest == 3
