"""Shards streamed from a folder and from an S3 server: what a map-style reader gives, whatever happens on the way."""

from __future__ import annotations

import re
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import chain, islice, repeat
from pathlib import Path
from typing import Any

import pytest
from s3_server import BUCKET, Server, credentials, s3_server

from vlp_models.contrib.streaming.store import Store
from vlp_models.data.sample import Sample
from vlp_models.data.shards.dataset import ShardDataset
from vlp_models.data.shards.write import ImageRecord
from vlp_models.errors import DataError, VLPError
from vlp_models.params import StreamParams
from vlp_models.training.data import LoaderFactory

IMAGES = 14


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    pytest.importorskip("moto")
    with s3_server() as found:
        yield found


@pytest.fixture
def shards(build_shards: Callable[..., Path], record: Callable[..., ImageRecord]) -> Path:
    """14 images with two captions each, three images a tar."""
    records = [record(i, pixels=True) for i in range(IMAGES)]
    return build_shards(train=records, val=[record(100, pixels=True)])


@pytest.fixture
def remote(
    server: Server, shards: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> StreamParams:
    credentials(monkeypatch, server, tmp_path)
    return StreamParams(address=server.upload(shards, request.node.name), timeout_seconds=20, retry_seconds=0.05)


def loader_of(shards: Path, stream: StreamParams, *, workers: int = 0, rank: int = 0, ranks: int = 1) -> Any:
    factory = LoaderFactory(
        shards,
        "captions",
        sources={},
        collate=list,  # type: ignore[arg-type]
        batch_size=4,
        num_workers=workers,
        seed=3,
        pixels=True,
        stream=stream,
    )
    return factory(rank, ranks)[0]


def endless(loader: Any) -> Iterator[list[Sample]]:
    """Its batches, epoch after epoch."""
    return chain.from_iterable(repeat(loader))


def as_tuples(samples: list[Sample]) -> list[tuple[Any, ...]]:
    """All that makes a sample, in a form that can be compared."""
    return [
        (s.sample_id, s.image_id, s.text, s.seed, s.pixels, s.regions.features.tobytes(), s.regions.boxes.tobytes())
        for s in samples
        if s.regions is not None
    ]


def test_streamed_samples_equal_local_ones(shards: Path, remote: StreamParams) -> None:
    plain = ShardDataset(shards, "train", "captions", pixels=True)
    for stream in (remote, replace(remote, address=str(shards))):
        dataset = ShardDataset(shards, "train", "captions", pixels=True, stream=stream)
        assert as_tuples(dataset.__getitems__(range(len(dataset)))) == as_tuples(plain.__getitems__(range(len(plain))))
        assert dataset.blocks is not None and dataset.blocks.requests == 5, "one a shard of three images"
        alone = ShardDataset(shards, "train", "captions", pixels=True, stream=stream, by_block=False)
        assert as_tuples(alone.__getitems__([9, 2, 2, 27])) == [
            as_tuples(plain.__getitems__([i]))[0] for i in (9, 2, 2, 27)
        ]
        # of two captions an image and a dataset twice in an epoch
        twice = ShardDataset(shards, "train", "images", {"scenes": 2}, regions=False, pixels=True, stream=stream)
        assert Counter(s.image_id for s in twice.__getitems__(range(len(twice)))) == Counter(
            {s.image_id: 2 for s in plain.__getitems__(range(len(plain)))}
        )


@pytest.mark.slow
def test_each_pair_once_per_epoch_for_any_number_of_workers_and_ranks(shards: Path, remote: StreamParams) -> None:
    loader = loader_of(shards, remote)
    epochs = [[as_tuples(batch) for batch in loader] for _ in range(2)]
    for epoch in epochs:
        ids = [sample[0] for batch in epoch for sample in batch]
        assert len(ids) == len(set(ids)) == 2 * IMAGES
    assert epochs[0] != epochs[1]
    for workers in (1, 2):
        assert [as_tuples(batch) for batch in loader_of(shards, remote, workers=workers)] == epochs[0], workers
    for workers in (0, 1, 2):
        halves = [loader_of(shards, remote, workers=workers, rank=rank, ranks=2) for rank in range(2)]
        joined = [as_tuples([*one, *two]) for one, two in zip(*halves, strict=True)]
        assert joined == epochs[0], workers


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("workers", [0, 1, 2])
def test_resume_continues_with_the_next_batch(workers: int, ranks: int, shards: Path, remote: StreamParams) -> None:
    """Against two epochs of seven batches, of one process without workers."""
    whole = [as_tuples(batch) for batch in islice(endless(loader_of(shards, remote)), 14)]
    for done in (3, 7, 10) if not workers else (3,):
        broken_off, *resumed = (
            loader_of(shards, remote, workers=workers, rank=rank, ranks=ranks) for rank in (ranks - 1, *range(ranks))
        )
        assert len(list(islice(endless(broken_off), done))) == done
        for loader in resumed:
            loader.load_state_dict(broken_off.state_dict())
        shares = zip(*map(endless, resumed), strict=True)
        rest = [as_tuples([*chain.from_iterable(of_batch)]) for of_batch in islice(shares, 14 - done)]
        assert rest == whole[done:], done


@pytest.mark.slow
def test_unresponsive_server_is_retried(server: Server, shards: Path, remote: StreamParams) -> None:
    """It is away for a few seconds here, and may be for `timeout_seconds`: five minutes by default."""
    wanted = [as_tuples(batch) for batch in loader_of(shards, remote)]
    loader = loader_of(shards, replace(remote, buffer_mb=1, timeout_seconds=60))
    found, back = [], threading.Timer(3.0, server.start)
    for number, batch in enumerate(loader):
        found.append(as_tuples(batch))
        if number == 0:
            assert loader.dataset.dataset.blocks is not None
            loader.dataset.dataset.blocks._held.clear()  # what was read before must be asked for again
            server.stop()
            back.start()
            stopped = time.monotonic()
    back.join()
    assert found == wanted
    assert time.monotonic() - stopped >= 3.0

    dataset = ShardDataset(shards, "train", "captions", stream=replace(remote, timeout_seconds=1.0))
    server.stop()
    try:
        with pytest.raises(DataError, match=r"train-00000000\.tar: the store did not respond for 1 s.*to resume"):
            dataset[0]
    finally:
        server.start()


@pytest.mark.slow
def test_truncated_shard_is_retried_and_then_named(server: Server, shards: Path, remote: StreamParams) -> None:
    key = f"{remote.address.removeprefix(f's3://{BUCKET}/')}/train-00000001.tar"
    whole = (shards / "train-00000001.tar").read_bytes()
    plain = ShardDataset(shards, "train", "captions")[7]
    dataset = ShardDataset(shards, "train", "captions", stream=replace(remote, retry_seconds=0.5))
    server.client.put_object(Bucket=BUCKET, Key=key, Body=whole[:3000])
    with pytest.raises(
        DataError, match=r"train-00000001\.tar: truncated: [\d,]+ of [\d,]+ bytes .* 3 times; upload this"
    ):
        dataset[7]
    heal = threading.Timer(0.3, server.client.put_object, kwargs={"Bucket": BUCKET, "Key": key, "Body": whole})
    heal.start()
    assert as_tuples([dataset[7]]) == as_tuples([plain])
    server.client.put_object(Bucket=BUCKET, Key=key, Body=bytes(len(whole)))
    dataset = ShardDataset(shards, "train", "captions", stream=remote)
    with pytest.raises(DataError, match=r"train-00000001\.tar: .*upload this shard again"):
        dataset[7]


@pytest.mark.slow
@pytest.mark.parametrize("times", [1, 6], ids=["once", "often"])
def test_interrupted_read_is_retried(
    server: Server, shards: Path, remote: StreamParams, times: int, capsys: pytest.CaptureFixture[str]
) -> None:
    """S3's client asks five times by itself, and then the store does."""
    wanted = [as_tuples(batch) for batch in loader_of(shards, remote)]
    loader = loader_of(shards, remote)
    with server.dropping("train-00000001.tar", after=1000, times=times) as asked:
        assert [as_tuples(batch) for batch in loader] == wanted
    assert len(asked) == times + 1
    assert ("the store does not respond" in capsys.readouterr().err) == (times > 5)


@pytest.mark.parametrize("address", ["S3://bucket/shards", "foo://bucket/shards", "s3://", "s3://A_Bucket!/shards"])
def test_invalid_address_is_not_retried(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("time.sleep", lambda seconds: pytest.fail(f"waited {seconds} s"))
    with pytest.raises(VLPError, match=re.escape(address)):
        Store(address, timeout_seconds=60).read("manifest.json")


def test_bucket_in_another_region_is_not_retried(monkeypatch: pytest.MonkeyPatch) -> None:
    """As s3fs hands S3's answer on; the local server has no regions."""
    from botocore.exceptions import ClientError
    from s3fs.errors import translate_boto_error

    response = {"Error": {"Code": "PermanentRedirect", "Message": "must be addressed using the specified endpoint"}}
    error = translate_boto_error(ClientError(response, "GetObject"))
    store = Store("s3://bucket/shards", timeout_seconds=60)
    monkeypatch.setattr("time.sleep", lambda seconds: pytest.fail(f"waited {seconds} s"))
    monkeypatch.setattr("s3fs.S3FileSystem.cat_file", lambda *_, **__: (_ for _ in ()).throw(error))
    with pytest.raises(DataError, match=r"invalid address \(.*specified endpoint.*AWS_DEFAULT_REGION"):
        store.read("manifest.json")


def test_denied_missing_and_different_shards_are_named(
    server: Server, shards: Path, remote: StreamParams, monkeypatch: pytest.MonkeyPatch
) -> None:
    from moto import settings
    from moto.core.authorization import ActionAuthenticatorMixin

    prefix = remote.address.removeprefix(f"s3://{BUCKET}/")
    dataset = ShardDataset(shards, "train", "captions", stream=remote)
    server.client.delete_object(Bucket=BUCKET, Key=f"{prefix}/train-00000002.tar")
    with pytest.raises(DataError, match=rf"no such s3 bucket {BUCKET}, key {prefix}/train-00000002\.tar; upload"):
        dataset[14]
    monkeypatch.setattr(settings, "INITIAL_NO_AUTH_ACTION_COUNT", 0)
    monkeypatch.setattr(ActionAuthenticatorMixin, "request_count", 0)
    with pytest.raises(DataError, match=rf"denied to s3 bucket {BUCKET}, key {prefix}/manifest\.json .*s3:GetObject"):
        ShardDataset(shards, "train", "captions", stream=remote)
    monkeypatch.undo()

    credentials(monkeypatch, server, shards)
    server.client.put_object(Bucket=BUCKET, Key=f"{prefix}/manifest.json", Body=b"{}")
    with pytest.raises(DataError, match=r"manifest\.json: differs from .*: upload these shards"):
        ShardDataset(shards, "train", "captions", stream=remote)
