"""The report's figure of a VLMo: which tokens each expert processes and how much it changes them (section 3.2).

The change of a token is the norm of the expert's output divided by the norm of the token's state.

Shape suffixes: M packed tokens, D hidden.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from vlp_models.models.protocols import Figure, Group, Patch
from vlp_models.models.vlmo.transformer import MoMEBlock

SHOWN_PATCHES = 8  # per expert, each from another image


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
