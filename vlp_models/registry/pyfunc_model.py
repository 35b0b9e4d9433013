"""The registered model's code, which MLflow runs to load it (models from code; nothing is pickled).

Input: a table with a column `image` (base64 text or an array; a path only below the folder that VLP_IMAGE_ROOT names; a
list for a task that takes several images) and, if the task takes a text, a column `text`.
Output: one JSON-like record per row.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import mlflow
import pandas as pd
from mlflow.pyfunc import PythonModel, PythonModelContext


class VisionLanguageModel(PythonModel):
    """A fine-tuned model, with its detector if it reads regions, behind one `predict`."""

    def load_context(self, context: PythonModelContext) -> None:
        from vlp_models.serving.predictor import Predictor

        self.predictor = Predictor(Path(context.artifacts["bundle"]))

    # The only type hint from which MLflow derives no schema (one would reject arrays); without a hint it warns at
    # every load.
    def predict(
        self, context: PythonModelContext, model_input: pd.DataFrame, params: dict[str, Any] | None = None
    ) -> list[dict[str, Any]]:
        images = list(model_input["image"])
        texts = [str(text) for text in model_input["text"]] if "text" in model_input else None
        return self.predictor.predict(images, texts, untrusted=True)


mlflow.models.set_model(VisionLanguageModel())
