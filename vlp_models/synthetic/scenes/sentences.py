"""Sentences about scenes that nobody drew: a corpus for pretraining on text alone, one sentence a line.

`train.txt`, `val.txt`, `test.txt`, as data/formats/texts.py reads them: five sentences of each scene, shuffled.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from vlp_models.errors import ParamsError
from vlp_models.params import GeneratorParams
from vlp_models.synthetic.scenes.captions import captions
from vlp_models.synthetic.scenes.world import sample_scene

SPLITS = ("train", "val", "test")
SIDE = 64  # pixels, at which objects are kept from covering each other
STREAM = 77  # apart from the seeds of drawn scenes: the same seed there gives other scenes


def write(params: GeneratorParams, directory: Path) -> dict[str, int]:
    """train, val and test count scenes.

    Raises:
        ParamsError: a number of params.yaml is out of range.
    """
    if not 0 <= params.misspelled <= 1:
        raise ParamsError(f"params.yaml: `generate`: `misspelled` must be 0 to 1; found {params.misspelled}")
    directory.mkdir(parents=True, exist_ok=True)
    counts = {}
    for number, split in enumerate(SPLITS):
        rng = np.random.default_rng([params.seed, number, STREAM])
        lines: list[str] = []
        for _ in range(getattr(params, split)):
            lines += captions(sample_scene(rng, image_id="", split=split, side=SIDE), rng, params.misspelled)
        shuffled = [lines[i] for i in rng.permutation(len(lines))]
        (directory / f"{split}.txt").write_text("".join(f"{line}\n" for line in shuffled), encoding="utf-8")
        counts[split] = len(lines)
    return {**counts, "texts": sum(counts.values())}
