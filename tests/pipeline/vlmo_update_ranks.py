"""VLMo's contrast over an update in two processes: run by test_vlmo_ranks.py, as `python vlmo_ranks.py FOLDER`.

Lightning starts the second process itself. Each writes the weights it ends with to FOLDER/two/weights-RANK.safetensors,
the first one also its log.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "support"))

from pixel_toys import train
from safetensors.torch import save_file

# AdamW divides by what is nearly nothing, and makes much of float32's order of adding up, unless eps is larger.
COMMON: dict[str, Any] = {"objectives": ("itc",), "config": {"drop_path": 0.0, "dropout": 0.0}, "eps": 1e-4}


def main(folder: Path) -> None:
    work = folder / "two"
    model, result = train(folder, work, batch_size=12, accumulate=3, contrast_over="update", devices=2, **COMMON)
    save_file(model.state_dict(), work / f"weights-{0 if result.is_main else 1}.safetensors")
    if result.is_main:
        (work / "rows.json").write_text(json.dumps(result.rows))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
