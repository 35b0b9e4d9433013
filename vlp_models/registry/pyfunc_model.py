"""The registered model's code: MLflow runs this file to load it (models from code; nothing is pickled).

Input: a table with a column `image` (base64 text or an array; a path only where VLP_IMAGE_ROOT names the folder that
it is taken from; for a task that looks at several at a time, a list of them) and, for a task that asks something, a
column `text`.
Output: one JSON-like record per row.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import mlflow
import pandas as pd
from mlflow.pyfunc import PythonModel, PythonModelContext


class VisionLanguageModel(PythonModel):
    """A fine-tuned model, with the detector if it reads regions, behind one `predict`."""

    def load_context(self, context: PythonModelContext) -> None:
        from vlp_models.serving.predictor import Predictor

        self.predictor = Predictor(Path(context.artifacts["bundle"]))

    # The one type hint that MLflow makes no schema of (it would refuse arrays), and without one it warns at every load.
    def predict(
        self, context: PythonModelContext, model_input: pd.DataFrame, params: dict[str, Any] | None = None
    ) -> list[dict[str, Any]]:
        images = list(model_input["image"])
        texts = [str(text) for text in model_input["text"]] if "text" in model_input else None
        return self.predictor.predict(images, texts, requested=True)


mlflow.models.set_model(VisionLanguageModel())
