"""The report's figure of a VLMo: which tokens each expert processes and how much it changes them (section 3.2).

The change of a token is the norm of the expert's output divided by the norm of the token's state.

Shape suffixes: M packed tokens, D hidden.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import Tensor

from vlp_models.contrib.report_pictures.model_figures import Figure, Group, Patch
from vlp_models.data.batch import Batch
from vlp_models.models.layers.packing import Packing
from vlp_models.models.vlmo.model import VLMo, names_by_text
from vlp_models.models.vlmo.transformer import MoMEBlock

SHOWN_PATCHES = 8  # per expert, each from another image


@torch.no_grad()
def figures(model: VLMo, batches: Iterable[Batch]) -> list[Figure]:
    """Return a figure of the tokens that each expert processes; none with shared experts."""
    if model.config.feed_forward == "shared":
        return []
    # Each batch runs up to three times: its images alone, its texts alone, and both together.
    usage = ExpertUsage(cast("list[MoMEBlock]", list(model.blocks)), model.config.grid)
    samples, was_training = 0, model.training
    model.eval()
    for batch in batches:
        samples += len(batch)
        if batch.image is not None:
            patches_BSD = model.encode_image(batch.image)
            with usage.record(batch.image_ids):
                model.image_states(patches_BSD, model.biases(0))
        if batch.text is not None:
            ids_NT, words = batch.text.ids_BT, Packing.of(batch.text.mask_BT)
            with usage.record():
                model.text_states(ids_NT, words, model.biases(ids_NT.shape[1], image=False))
        if batch.image is not None and batch.text is not None:
            owner_N = batch.text.owners(len(batch.image))
            patches_NSD = patches_BSD if owner_N is None else patches_BSD.index_select(0, owner_N)
            with usage.record(names_by_text(batch.image_ids, owner_N)):
                model.pair_states(patches_NSD, ids_NT, words, model.biases(ids_NT.shape[1]))
    model.train(was_training)
    return usage.figures(samples)


@dataclass
class _Usage:
    """One expert's tokens.

    tokens   number of patches and words
    change   summed over these tokens
    largest  image id -> (change, number) of the patch that changed most
    """

    tokens: dict[str, int] = field(default_factory=lambda: {"patch": 0, "word": 0})
    change: dict[str, float] = field(default_factory=lambda: {"patch": 0.0, "word": 0.0})
    largest: dict[str, tuple[float, int]] = field(default_factory=dict)

    def add(self, kind: str, change_M: Tensor) -> None:
        self.tokens[kind] += len(change_M)
        self.change[kind] += float(change_M.sum())

    def describe(self) -> str:
        total, parts = sum(self.tokens.values()), []
        for kind, count in self.tokens.items():
            if count:
                noun = kind if count == 1 else {"word": "words", "patch": "patches"}[kind]
                mean = self.change[kind] / count
                parts.append(f"{count:,} {noun} ({100 * count / total:.0f}%), mean relative change {mean:.2f}")
        return "; ".join(parts)


class ExpertUsage:
    """Records what experts process during forward passes.

    blocks: the model's layers; grid: patches along an image's side.
    """

    def __init__(self, blocks: Sequence[MoMEBlock], grid: int) -> None:
        self._blocks, self._grid = blocks, grid
        self._usage: dict[tuple[int, str], _Usage] = {}

    @contextmanager
    def record(self, image_ids: tuple[str, ...] = ()) -> Iterator[None]:
        """Record one forward pass. image_ids: of the images in it, whose tokens come before those of texts."""
        with ExitStack() as stack:
            for layer, block in enumerate(self._blocks):
                for name, expert in block.experts.items():
                    hook = self._hook(layer, name, block, image_ids)
                    stack.callback(expert.register_forward_hook(hook).remove)
            yield

    def _hook(
        self, layer: int, name: str, block: MoMEBlock, image_ids: tuple[str, ...]
    ) -> Callable[[Any, tuple[Tensor], Tensor], None]:
        width = 1 + self._grid**2  # tokens of an image: [CLS] and patches

        # Called after each forward pass of the expert, with its input and output.
        def hook(_: Any, inputs: tuple[Tensor], output_MD: Tensor) -> None:
            # How far the expert moves a token, relative to the token's own length.
            output_MD = output_MD * block.expert_scale if block.layer_scale else output_MD
            change_M = output_MD.norm(dim=-1) / inputs[0].norm(dim=-1)
            usage = self._usage.setdefault((layer, name), _Usage())
            # The image tokens among the expert's rows come first; the language expert has none.
            count = 0 if name == "language" else len(image_ids) * width
            if count:
                patches = change_M[:count].view(-1, width)[:, 1:]  # [images, patches], without [CLS]
                usage.add("patch", patches.flatten())
                values, numbers = patches.max(1)
                for image_id, value, number in zip(image_ids, values.tolist(), numbers.tolist(), strict=True):
                    usage.largest[image_id] = max(usage.largest.get(image_id, (0.0, 0)), (value, number))
            if len(change_M) > count:
                usage.add("word", change_M[count:])

        return hook

    def figures(self, images: int) -> list[Figure]:
        """Return one figure, with a group per layer and expert. images: number of samples, for the caption."""
        if not self._usage:
            return []
        # By layer, then in the order of the layer's experts; only those that processed a token.
        keys: list[tuple[int, str]] = []
        for layer, block in enumerate(self._blocks):
            keys += [(layer, name) for name in block.experts if (layer, name) in self._usage]
        groups = tuple(
            Group(
                name=f"layer {layer + 1}, {expert.replace('_', '-')} expert",
                note=self._usage[layer, expert].describe(),
                patches=self._patches(self._usage[layer, expert]),
            )
            for layer, expert in keys
        )
        about = (
            f"{images} val samples, encoded as images alone, as texts alone, and as pairs, as far as they have these. "
            "Each expert's tokens, their mean relative change, and the patches that changed most, one per image."
        )
        return [Figure(title="Tokens per expert", about=about, groups=groups)]

    def _patches(self, usage: _Usage) -> tuple[Patch, ...]:
        """Return the boxes of the most changed patches. Images are resized to a square, so boxes are fractions."""
        grid, patches = self._grid, []
        most_changed_first = sorted(usage.largest.items(), key=lambda item: (-item[1][0], item[0]))
        for image_id, (_, number) in most_changed_first:
            row, column = divmod(number, grid)
            x1, y1, x2, y2 = (round(n / grid, 4) for n in (column, row, column + 1, row + 1))
            patches.append(Patch(image_id=image_id, box=(x1, y1, x2, y2)))
        return tuple(patches[:SHOWN_PATCHES])
