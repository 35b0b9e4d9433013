"""Training curves of VLMo and SOHO on images and sentences that are formulas.

python tests/support/golden_pixel_curves.py     records tests/golden/golden_pixel_curves.json again
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import golden_soho
import golden_vlmo
import torch
from golden_tden import descend, fill

from vlp_models.models import DataFacts, build_model

FILE = Path(__file__).parents[1] / "golden" / "golden_pixel_curves.json"
UPDATES = 12
DRAWS = 3  # updates have one of three draws of words, cells and negatives
MODELS: dict[str, tuple[Any, dict[str, Any], tuple[str, ...]]] = {  # where its batch is made, config, objectives
    "vlmo": (golden_vlmo, {}, ("itc", "itm", "mlm")),
    "soho": (golden_soho, {"mvm_probability": 0.6}, ("mlm", "mvm", "itm")),
}


def curve(family: str) -> list[dict[str, float]]:
    """Return all losses over updates of plain gradient descent, in float64; SOHO's dictionary moves after each."""
    made, config, objectives = MODELS[family]
    model: Any = fill(build_model(family, {**made.TINY, **config}, DataFacts(vocab_size=23, mask_id=4))).train()
    if family == "vlmo":
        model.log_scale.data.fill_(1.5)
    data, rows = made.batch(), []
    for update in range(UPDATES):
        generator = torch.Generator().manual_seed(update % DRAWS)
        losses = model.pretraining_losses(
            data, objectives=dict.fromkeys(objectives), generator=generator, mask_probability=0.6
        )
        rows.append(descend(model, losses))
        if family == "soho":
            model.dictionary.update()
    return rows


if __name__ == "__main__":
    FILE.write_text(json.dumps({family: curve(family) for family in MODELS}, indent=1) + "\n", encoding="utf-8")
