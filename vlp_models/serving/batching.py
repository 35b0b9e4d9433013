"""Answer concurrent requests together: what arrives while the model is busy forms the next batch.

A server calls `predict` from several threads. One at a time would leave requests waiting, all at once would make their
threads compete for the same cores; a batch costs less than its requests one by one. No request waits for a batch to
fill.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vlp_models.serving.predictor import Predictor

MAX_ROWS = 16  # of a batch


@dataclass(frozen=True, kw_only=True, eq=False)
class _Request:
    groups: list[Any]
    texts: list[str] | None
    answer: Future[list[dict[str, Any]]] = field(default_factory=Future)


class BatchingPredictor:
    """A predictor for many threads. Has the predictor's `predict`.

    Args:
        max_rows: images (or lists of images) of a batch; a larger request is a batch by itself.
    """

    def __init__(self, predictor: Predictor, max_rows: int = MAX_ROWS) -> None:
        self.predictor, self.max_rows = predictor, max_rows
        self._waiting: queue.SimpleQueue[_Request] = queue.SimpleQueue()
        self._next: _Request | None = None  # did not fit into the last batch
        threading.Thread(target=self._work, name="batching", daemon=True).start()

    def predict(
        self, images: Sequence[Any], texts: Sequence[str] | None = None, *, untrusted: bool = False
    ) -> list[dict[str, Any]]:
        """Return one prediction per image; raises what `Predictor.predict` raises.

        Images are opened in the caller's thread, so a damaged one fails its own request only.
        """
        groups = self.predictor.open(images, texts, untrusted=untrusted)
        request = _Request(groups=groups, texts=None if texts is None else list(texts))
        self._waiting.put(request)
        return request.answer.result()

    def _work(self) -> None:
        while True:
            self._answer(self._gather())

    def _gather(self) -> list[_Request]:
        """Wait for a request; return it with those that wait already and fit into its batch."""
        batch = [self._next or self._waiting.get()]
        self._next, rows = None, len(batch[0].groups)
        while rows < self.max_rows:
            try:
                request = self._waiting.get_nowait()
            except queue.Empty:
                break
            rows += len(request.groups)
            if rows > self.max_rows:
                self._next = request
                break
            batch.append(request)
        return batch

    def _answer(self, batch: list[_Request]) -> None:
        groups = [group for request in batch for group in request.groups]
        texts = [text for request in batch for text in request.texts or ()]
        try:
            predictions = self.predictor.predict_opened(groups, texts or None)
            if len(predictions) != len(groups):
                raise RuntimeError(f"{len(predictions)} predictions for {len(groups)} images")
        except Exception as error:
            if len(batch) == 1:
                batch[0].answer.set_exception(error)
            else:  # the others need not fail with one
                for request in batch:
                    self._answer([request])
            return
        rest = iter(predictions)
        for request in batch:
            request.answer.set_result([next(rest) for _ in request.groups])
