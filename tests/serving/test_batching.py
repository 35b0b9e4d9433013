"""Concurrent requests form batches: each gets its own answer, and a failure stays with its request."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from vlp_models.serving import batching
from vlp_models.serving.batching import BatchingPredictor


class Number:
    """An image of one pixel, as `check` returns it; `Doubling` counts those that are decoded and not answered."""

    pixels = 1

    def __init__(self, model: Doubling, value: int) -> None:
        self.model, self.value = model, value

    def open(self) -> int:
        self.model.decoded += 1
        self.model.most_decoded = max(self.model.most_decoded, self.model.decoded)
        return self.value


class Doubling:
    """Answers each image with its double; it waits for `go` before its first batch, so that requests gather."""

    def __init__(self) -> None:
        self.batches: list[int] = []
        self.opened = 0
        self.decoded = self.most_decoded = 0
        self.go = threading.Event()

    def check(self, images: list[int], texts: list[str] | None, *, untrusted: bool) -> list[list[Number]]:
        self.opened += 1
        if min(images) < 0:
            raise ValueError("damaged")
        return [[Number(self, image)] for image in images]

    def predict_opened(self, groups: list[list[int]], texts: list[str] | None) -> list[dict[str, Any]]:
        self.go.wait(10)
        self.decoded -= len(groups)
        self.batches.append(len(groups))
        if any(image == 99 for (image,) in groups):
            raise RuntimeError("ninety-nine")
        return [{"double": 2 * image, "text": texts and texts[i]} for i, (image,) in enumerate(groups)]


def answers(batching: BatchingPredictor, model: Doubling, requests: list[list[int]]) -> list[Any]:
    def ask(images: list[int]) -> Any:
        try:
            found = batching.predict(images, [f"text {image}" for image in images])
        except (RuntimeError, ValueError) as error:
            return str(error)
        return [(one["double"], one["text"]) for one in found]

    with ThreadPoolExecutor(len(requests)) as pool:
        futures = [pool.submit(ask, images) for images in requests]
        while model.opened < len(requests):
            time.sleep(0.01)
        time.sleep(0.05)  # the last one gets into the queue; the first batch is in work, and waits for `go`
        model.go.set()
        return [future.result(timeout=10) for future in futures]


def test_each_request_gets_its_own_answers_from_a_shared_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batching, "MAX_ROWS", 8)
    model = Doubling()
    requests = [[i] if i % 3 else [i, 100 + i] for i in range(20)]
    found = answers(BatchingPredictor(model), model, requests)  # type: ignore[arg-type]
    assert found == [[(2 * image, f"text {image}") for image in images] for images in requests]
    assert max(model.batches) > 1 and max(model.batches) <= 8 and sum(model.batches) == 27


def test_a_request_larger_than_a_batch_is_a_batch_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batching, "MAX_ROWS", 4)
    model = Doubling()
    found = answers(BatchingPredictor(model), model, [list(range(20, 29)), [1]])  # type: ignore[arg-type]
    assert len(found[0]) == 9 and sorted(model.batches) == [1, 9]


def test_images_wait_undecoded_while_others_take_the_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batching, "MAX_REQUEST_PIXELS", 3)
    model = Doubling()
    requests = [[i] for i in range(9)] + [[20, 21], [30, 31, 32, 33, 34]]
    found = answers(BatchingPredictor(model), model, requests)  # type: ignore[arg-type]
    assert found == [[(2 * image, f"text {image}") for image in images] for images in requests]
    assert model.most_decoded == 5, "the largest request, alone"


@pytest.mark.parametrize("bad", [99, -1])
def test_a_failure_stays_with_its_request(bad: int) -> None:
    model = Doubling()
    requests = [[1], [bad], [2], [3], [4], [5]]
    found = answers(BatchingPredictor(model), model, requests)  # type: ignore[arg-type]
    assert found[1] == ("ninety-nine" if bad == 99 else "damaged")
    assert [found[i][0][0] for i in (0, 2, 3, 4, 5)] == [2, 4, 6, 8, 10]
