"""Answer concurrent requests together: what arrives while the model is busy forms the next batch.

A server calls `predict` from several threads. One at a time would leave requests waiting, all at once would make their
threads compete for the same cores; a batch costs less than its requests one by one. No request waits for a batch to
fill.
"""

from __future__ import annotations

import itertools
import queue
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from vlp_models.serving.images import MAX_REQUEST_PIXELS

if TYPE_CHECKING:
    from vlp_models.serving.predictor import Predictor

MAX_ROWS = 16  # images (or lists of images) of a batch; a larger request is a batch by itself


@dataclass(frozen=True, kw_only=True, eq=False)
class _Request:
    groups: list[Any]
    texts: list[str] | None
    answer: Future[list[dict[str, Any]]] = field(default_factory=Future)


class _PixelLimit:
    """Admits requests while all of them together have at most so many pixels, in the order in which they wait."""

    def __init__(self, pixels: int) -> None:
        # `_free`: the pixels of the limit that no admitted request has reserved.
        self._limit = self._free = pixels
        self._entrance, self._changed = threading.Lock(), threading.Condition()

    @contextmanager
    def reserve(self, pixels: int) -> Iterator[None]:
        pixels = min(pixels, self._limit)  # a larger request is admitted alone
        # Only the request that holds the entrance waits for pixels, so a smaller one cannot overtake it.
        # Waiting releases `_changed`, but not the entrance: requests that leave can still return their pixels.
        with self._entrance, self._changed:
            self._changed.wait_for(lambda: self._free >= pixels)
            self._free -= pixels
        try:
            yield
        finally:
            with self._changed:
                self._free += pixels
                self._changed.notify_all()


class BatchingPredictor:
    """A predictor for many threads. Has the predictor's `predict`.

    At most MAX_REQUEST_PIXELS are decoded at a time: other requests wait, and a larger one is decoded alone.
    """

    def __init__(self, predictor: Predictor) -> None:
        self.predictor = predictor
        self._pixel_limit = _PixelLimit(MAX_REQUEST_PIXELS)
        self._waiting: queue.SimpleQueue[_Request] = queue.SimpleQueue()
        self._next: _Request | None = None  # did not fit into the last batch
        threading.Thread(target=self._work, name="batching", daemon=True).start()

    def predict(
        self, images: Sequence[Any], texts: Sequence[str] | None = None, *, untrusted: bool = False
    ) -> list[dict[str, Any]]:
        """Return one prediction per image; raises what `Predictor.predict` raises.

        Images are opened in the caller's thread, so a damaged one fails its own request only.
        """
        # Pixels are reserved from the headers, before any image is decoded, and until the answer is there.
        checked = self.predictor.check(images, texts, untrusted=untrusted)
        pixels = sum(image.pixels for image in itertools.chain.from_iterable(checked))
        with self._pixel_limit.reserve(pixels):
            groups = []
            for group in checked:
                groups.append([image.open() for image in group])
            request = _Request(groups=groups, texts=None if texts is None else list(texts))
            # The worker answers through the future; an exception in it is raised here, in the caller's thread.
            self._waiting.put(request)
            return request.answer.result()

    def _work(self) -> None:
        while True:
            self._answer(self._gather())

    def _gather(self) -> list[_Request]:
        """Wait for a request; return it with those that wait already and fit into its batch."""
        # A request that was left over comes first; otherwise wait until one arrives.
        batch = [self._next or self._waiting.get()]
        self._next, rows = None, len(batch[0].groups)
        # Take what waits already, without waiting for more.
        while rows < MAX_ROWS:
            try:
                request = self._waiting.get_nowait()
            except queue.Empty:
                break
            rows += len(request.groups)
            if rows > MAX_ROWS:
                # Requests are not split, so this one starts the next batch.
                self._next = request
                break
            batch.append(request)
        return batch

    def _answer(self, batch: list[_Request]) -> None:
        groups: list[Any] = []
        texts: list[str] = []
        for request in batch:
            groups += request.groups
            # All requests are for one task, so either each has texts or none has.
            texts += request.texts or ()
        try:
            predictions = self.predictor.predict_opened(groups, texts or None)
            if len(predictions) != len(groups):
                raise RuntimeError(f"{len(predictions)} predictions for {len(groups)} images")
        except Exception as error:
            if len(batch) == 1:
                batch[0].answer.set_exception(error)
            else:  # answered one by one, so that only the request that fails has the error
                for request in batch:
                    self._answer([request])
            return
        # Each request gets as many predictions as it has groups of images.
        remaining = iter(predictions)
        for request in batch:
            request.answer.set_result([next(remaining) for _ in request.groups])
