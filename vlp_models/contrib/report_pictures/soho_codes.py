"""The report's figure of a SOHO: the patches that each code of its visual dictionary gathers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

import torch

from vlp_models.contrib.report_pictures.model_figures import Figure, Group, Patch
from vlp_models.data.batch import Batch, Pixels
from vlp_models.models.soho.model import SOHO

SHOWN_CODES, SHOWN_PATCHES = 24, 8


@torch.no_grad()
def figures(model: SOHO, batches: Iterable[Batch]) -> list[Figure]:
    """Return a figure of codes evenly spaced by frequency, the most frequent first, with patches of several images.

    None without a dictionary, or if images are cropped: the positions of cells in the image files are then unknown.
    """
    if model.dictionary is None or model.config.resize == "crop":
        return []
    was_training = model.training
    model.eval()
    cells: Counter[int] = Counter()
    patches: dict[int, dict[str, Patch]] = {}
    images: dict[int, set[str]] = {}
    image_count = 0
    # Count the cells of each code, and note the first cell of each image that has it, up to `SHOWN_PATCHES` images.
    for batch in batches:
        assert isinstance(batch.image, Pixels)
        grid = model.extract_features(batch.image)
        _, codes_BR, _ = model.map_to_codes(grid, learn=False)
        columns = grid.mask_BRR.shape[2]
        image_count += len(batch.image)
        rows = zip(batch.image_ids, codes_BR.tolist(), strict=True)
        for number, (image_id, codes_R) in enumerate(rows):
            height, width = _unpadded_size(batch.image, number)
            for cell, code in enumerate(codes_R):
                if code < 0:  # padding
                    continue
                cells[code] += 1
                images.setdefault(code, set()).add(image_id)
                patch_by_image = patches.setdefault(code, {})
                if image_id not in patch_by_image and len(patch_by_image) < SHOWN_PATCHES:
                    top, left = model.stride * (cell // columns), model.stride * (cell % columns)
                    box = left / width, top / height, (left + model.stride) / width, (top + model.stride) / height
                    x1, y1, x2, y2 = (round(min(value, 1.0), 4) for value in box)
                    patch_by_image[image_id] = Patch(image_id=image_id, box=(x1, y1, x2, y2))
    model.train(was_training)
    if not cells:
        return []
    # Codes evenly spaced in the order of their frequency
    ranked = [code for code, _ in cells.most_common()]
    count = min(SHOWN_CODES, len(ranked))
    sampled = [ranked[i * len(ranked) // count] for i in range(count)]
    total = sum(cells.values())
    groups = tuple(
        Group(
            name=f"code {code}",
            note=f"{100 * cells[code] / total:.1f}% of the cells, in {len(images[code])} images",
            patches=tuple(patches[code].values()),
        )
        for code in sampled
    )
    about = (
        f"{len(ranked)} of {len(model.dictionary.codes)} codes of the visual dictionary represent the {total:,} cells "
        f"of {image_count} val images. Shown are {len(sampled)} codes, most frequent first, each with the first "
        "matching cell of several images."
    )
    return [Figure(title="Patches per code of the visual dictionary", about=about, groups=groups)]


def _unpadded_size(image: Pixels, row: int) -> tuple[int, int]:
    """Return height and width of an image in the batch without padding, in pixels."""
    if image.mask_BHW is None:
        return image.pixels_B3HW.shape[2], image.pixels_B3HW.shape[3]
    mask = image.mask_BHW[row]
    return int(mask.any(1).sum()), int(mask.any(0).sum())
