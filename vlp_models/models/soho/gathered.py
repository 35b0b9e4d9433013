"""Which patches each entry of the visual dictionary gathers (section 4.4 and figure 3), for the report.

Shape suffixes: B images, R cells.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import cast

import torch

from vlp_models.data.batch import Batch, Pixels
from vlp_models.models.figures import Figure, Group, Patch
from vlp_models.models.soho.model import SOHO

CODES, PATCHES = 24, 8  # shown


@torch.no_grad()
def gathered_patches(model: SOHO, batches: Iterable[Batch]) -> list[Figure]:
    """One figure: codes at even distances from those in use, the commonest first, with patches of several images.

    Nothing without a dictionary, or where images are cropped: a cell's place in the file is then not known here.
    """
    if model.dictionary is None or model.config.resize == "crop":
        return []
    cells: Counter[int] = Counter()
    patches: dict[int, dict[str, Patch]] = {}
    images: dict[int, set[str]] = {}
    seen = 0
    was_training = model.training
    model.eval()
    for batch in batches:
        image = cast(Pixels, batch.image)
        grid = model.look(image)
        _, codes_BR, _ = model.map_to_codes(grid, learn=False)
        columns = grid.mask_BRR.shape[2]
        seen += len(image)
        for row, (image_id, codes) in enumerate(zip(batch.image_ids, codes_BR.tolist(), strict=True)):
            height, width = _size(image, row)
            for cell, code in enumerate(codes):
                if code < 0:
                    continue
                cells[code] += 1
                images.setdefault(code, set()).add(image_id)
                own = patches.setdefault(code, {})
                if image_id not in own and len(own) < PATCHES:
                    top, left = model.stride * (cell // columns), model.stride * (cell % columns)
                    box = left / width, top / height, (left + model.stride) / width, (top + model.stride) / height
                    own[image_id] = Patch(image_id=image_id, box=tuple(round(min(v, 1.0), 4) for v in box))  # type: ignore[arg-type]
    model.train(was_training)
    if not cells:
        return []
    ranked = [code for code, _ in cells.most_common()]
    shown = [ranked[i * len(ranked) // min(CODES, len(ranked))] for i in range(min(CODES, len(ranked)))]
    total = sum(cells.values())
    groups = tuple(
        Group(
            name=f"code {code}",
            note=f"{100 * cells[code] / total:.1f}% of the cells, in {len(images[code])} images",
            patches=tuple(patches[code].values()),
        )
        for code in shown
    )
    about = (
        f"{len(ranked)} of {len(model.dictionary.codes)} entries of the visual dictionary stand for the {total:,} "
        f"cells of {seen} val images. {len(shown)} of them, the commonest first, each with the first cell of several "
        "images."
    )
    return [Figure(title="What the visual dictionary gathers", about=about, groups=groups)]


def _size(image: Pixels, row: int) -> tuple[int, int]:
    """Of the picture as the model sees it, without padding."""
    if image.mask_BHW is None:
        return image.pixels_B3HW.shape[2], image.pixels_B3HW.shape[3]
    mask = image.mask_BHW[row]
    return int(mask.any(1).sum()), int(mask.any(0).sum())
