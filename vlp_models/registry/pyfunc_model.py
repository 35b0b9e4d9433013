"""The registered model's code, which MLflow runs to load it (models from code; nothing is pickled).

Input: a table with a column `image` (base64 text or an array; a path only below the folder that VLP_IMAGE_ROOT names; a
list for a task that takes several images) and, if the task takes a text, a column `text`.
Output: one JSON-like record per row. A request that cannot be answered is refused with one sentence (`RequestError`).
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import mlflow
import pandas as pd
from mlflow.exceptions import MlflowException
from mlflow.protos.databricks_pb2 import BAD_REQUEST, INTERNAL_ERROR
from mlflow.pyfunc import PythonModel, PythonModelContext

from vlp_models.errors import DataError
from vlp_models.serving.predictor import check_text

MAX_ROWS = 64  # of a request

logger = logging.getLogger(__name__)


class RequestError(MlflowException):
    """A sentence for the client: what is wrong with the request (400), or that the server failed (500).

    MLflow's server would put the whole request, with its images, in front of the message, and a stack trace behind that
    of any other exception. So this message cannot be changed.
    """

    def __init__(self, sentence: str, code: int = BAD_REQUEST) -> None:
        # Before the call of `super`, which assigns `message` and reads it.
        self._sentence = sentence
        super().__init__(sentence, error_code=code)

    @property
    def message(self) -> str:
        return self._sentence

    @message.setter
    def message(self, value: str) -> None:
        pass


class VisionLanguageModel(PythonModel):
    """A fine-tuned model, with its detector if it reads regions, behind one `predict`."""

    def load_context(self, context: PythonModelContext) -> None:
        from vlp_models.serving.batching import BatchingPredictor
        from vlp_models.serving.predictor import Predictor

        self.predictor = Predictor(Path(context.artifacts["bundle"]))
        self.batching = BatchingPredictor(self.predictor)  # MLflow's server calls `predict` from several threads

    # The only type hint from which MLflow derives no schema (one would reject arrays); without a hint it warns at
    # every load.
    def predict(
        self, context: PythonModelContext, model_input: pd.DataFrame, params: dict[str, Any] | None = None
    ) -> list[dict[str, Any]]:
        """
        Raises:
            RequestError: a column is missing, a value has the wrong type, an image cannot be opened; or anything else
                failed, which is logged.
        """
        images, texts = self._read_columns(model_input)
        try:
            return self.batching.predict(images, texts, untrusted=True)
        except DataError as error:
            raise RequestError(f"`image`: {error}") from None
        # Whatever it is, its text may contain paths or the request, so the client gets a fixed sentence.
        except Exception:
            logger.exception("a request failed")
            raise RequestError(
                "the model failed on this request; the server's log has the reason", INTERNAL_ERROR
            ) from None

    def _read_columns(self, table: pd.DataFrame) -> tuple[list[Any], list[str] | None]:
        """Return images and texts of the request's rows; no texts if the task takes none."""
        if not 0 < len(table) <= MAX_ROWS:
            rows = f"{len(table)} rows; the limit is {MAX_ROWS}" if len(table) else "no rows"
            raise RequestError(f"the request has {rows}")
        kind, task = self.predictor.request.text, self.predictor.task
        # A task without a text has no `kind`, and the column `text` is then ignored.
        for column in ("image", "text") if kind else ("image",):
            if column not in table:
                meaning = f"a {kind} per image" if column == "text" else "the base64 text of an image file"
                raise RequestError(
                    f"a request for {task} needs the column `{column}`, {meaning}; found {', '.join(map(str, table))}"
                )
        texts = list(table["text"]) if kind else []
        try:
            for text in texts:
                check_text(text, kind)
        except DataError as error:
            raise RequestError(f"`text`: {error}") from None
        return list(table["image"]), texts if kind else None


# MLflow runs this file to load a version, and takes the object that is set here.
mlflow.models.set_model(VisionLanguageModel())
