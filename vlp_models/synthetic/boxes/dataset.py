"""Writes a synthetic NLVR: scenes of three boxes, sentences true or false of them, in NLVR v1's own layout.

Under the directory: `<split>/<split>.json` (JSON lines) and `<split>/images/<n % 80>/<split>-n-m-k.png`, n the group
of four scenes, m the scene within its group, k the order of its boxes. Splits are named `train`, `val` and `test`;
the reader of genuine NLVR reads them too. Four keys are ours: `permutations`, how many of the six orders were drawn;
`number`, the sentence's number within its group; `more`, further sentences about the same images; `descriptions`, for
each order drawn, sentences that list what this image shows. Genuine files have one sentence an image, all six orders.
"""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

from rich.progress import track

from vlp_models.errors import DataError
from vlp_models.params import GeneratorParams
from vlp_models.synthetic.boxes.descriptions import write_descriptions
from vlp_models.synthetic.boxes.groups import Example, make_group
from vlp_models.synthetic.boxes.render import draw
from vlp_models.synthetic.boxes.scene import structured_rep

DIRECTORIES = 80  # as many as NLVR's training split has
ORDERS = ((0, 1, 2), (0, 2, 1), (1, 0, 2), (1, 2, 0), (2, 0, 1), (2, 1, 0))


def write(params: GeneratorParams, directory: Path) -> dict[str, int]:
    """Writes `params.train`, `val` and `test` examples; returns counts of examples, images and statements.

    The same params give the same bytes, and a longer split begins with the shorter one's groups.

    Raises:
        DataError: `permutations` is not between 1 and 6, `statements` is below 1 or `descriptions` below 0.
    """
    if not 1 <= params.permutations <= len(ORDERS):
        raise DataError(f"params.yaml: `permutations` must be 1 to 6, found {params.permutations}")
    if params.statements < 1:
        raise DataError(f"params.yaml: `statements` must be 1 or more, found {params.statements}")
    if params.descriptions < 0:
        raise DataError(f"params.yaml: `descriptions` must be 0 or more, found {params.descriptions}")
    counts = {"examples": 0, "images": 0, "statements": 0}
    for split in ("train", "val", "test"):
        wanted: int = getattr(params, split)
        if not wanted:
            continue
        root = directory / split
        lines = []
        for n in track(range((wanted + 3) // 4), description=f"boxes {split}", disable=_quiet()):
            rng = random.Random(f"{params.seed}/{split}/{n}")
            group = make_group(rng, params.statements, simple=params.simple)
            for m, example in enumerate(group[: wanted - 4 * n]):
                described = [
                    write_descriptions(rng, example.scene, order, params.descriptions)
                    for order in ORDERS[: params.permutations]
                ]
                lines.append(json.dumps(_record(n, m, example, described)))
                _draw(example, root / "images" / str(n % DIRECTORIES), f"{split}-{n}-{m}", params.permutations)
                counts["examples"] += 1
                counts["images"] += params.permutations
                counts["statements"] += len(example.said)
        (root / f"{split}.json").write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    return counts


def _record(n: int, m: int, example: Example, described: list[list[str]]) -> dict[str, Any]:
    said = [
        {"number": number, "sentence": text, "label": "true" if label else "false"}
        for number, text, label in example.said
    ]
    return {
        **said[0],
        "identifier": f"{n}-{m}",
        "directory": str(n % DIRECTORIES),
        "evals": {},
        "structured_rep": structured_rep(example.scene),
        "permutations": len(described),
        "more": said[1:],
        "descriptions": described,
    }


def _draw(example: Example, directory: Path, stem: str, permutations: int) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    for k, order in enumerate(ORDERS[:permutations]):
        draw(example.scene, order).save(directory / f"{stem}-{k}.png", compress_level=6)


def _quiet() -> bool:
    from rich.console import Console

    return not Console().is_terminal
