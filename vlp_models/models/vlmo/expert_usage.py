"""Which expert saw what, and how much it made of it (section 3.2), for the report.

What an expert makes of a token is the length of what it adds to the token's state, divided by the state's own.

Shape suffixes: M packed tokens, D hidden, S image tokens ([CLS] first).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import Tensor

from vlp_models.data.batch import Batch
from vlp_models.models.layers.packing import Packing
from vlp_models.models.protocols import Figure, Group, Patch
from vlp_models.models.vlmo.model import VLMo
from vlp_models.models.vlmo.transformer import MoMEBlock

PATCHES = 8  # shown of an expert, each of another image


@dataclass
class _Seen:
    """By one expert: how many tokens of images and of texts, what it made of them in all, and of each image the patch
    that it made most of: image id -> (how much, its number)."""

    tokens: dict[str, int] = field(default_factory=lambda: {"patch": 0, "word": 0})
    made: dict[str, float] = field(default_factory=lambda: {"patch": 0.0, "word": 0.0})
    best: dict[str, tuple[float, int]] = field(default_factory=dict)

    def add(self, kind: str, made_M: Tensor) -> None:
        self.tokens[kind] += len(made_M)
        self.made[kind] += float(made_M.sum())

    def note(self) -> str:
        total = sum(self.tokens.values())
        told = [
            f"{self.tokens[kind]:,} {kind if self.tokens[kind] == 1 else f'{kind}s' if kind == 'word' else 'patches'} "
            f"({100 * self.tokens[kind] / total:.0f}%), each changed by {self.made[kind] / self.tokens[kind]:.2f} of "
            "its length"
            for kind in self.tokens
            if self.tokens[kind]
        ]
        return "; ".join(told)


@torch.no_grad()
def seen_by_experts(model: VLMo, batches: Iterable[Batch]) -> list[Figure]:
    """One figure: of each layer's experts what they saw of these images alone, of their texts alone, and of the pairs;
    and the patches, each of another image, that they made most of.

    Nothing of a standard transformer, which has no experts.
    """
    if model.config.feed_forward == "shared":
        return []
    seen: dict[tuple[int, str], _Seen] = {}
    images, was_training = 0, model.training
    model.eval()
    for batch in batches:
        _see(model, batch, seen)
        images += len(batch)
    model.train(was_training)
    if not seen:
        return []
    experts = sorted(seen, key=lambda key: (key[0], list(cast(Any, model.blocks)[key[0]].experts).index(key[1])))
    groups = tuple(
        Group(
            name=f"layer {layer + 1}, {expert.replace('_', '-')} expert",
            note=seen[layer, expert].note(),
            patches=_patches(model, seen[layer, expert]),
        )
        for layer, expert in experts
    )
    about = (
        f"{images} val samples, read as images alone, as texts alone, and as pairs, whichever there is. Of each "
        "expert: what it saw, how much it changed that, and the patches that it changed most, one an image."
    )
    return [Figure(title="Which expert saw what", about=about, groups=groups)]


def _see(model: VLMo, batch: Batch, seen: dict[tuple[int, str], _Seen]) -> None:
    patches_BSD = None if batch.image is None else model.encode_image(batch.image)
    words = None if batch.text is None else Packing.of(batch.text.mask_BT)
    if patches_BSD is not None:
        with _watching(model, seen, batch.image_ids, patches_BSD.shape[1]):
            model.image_states(patches_BSD, model.biases(0))
    if words is not None:
        ids_NT = batch.text.ids_BT
        with _watching(model, seen, (), 0):
            model.text_states(ids_NT, words, model.biases(ids_NT.shape[1], image=False))
    if patches_BSD is not None and words is not None:
        owner_N = batch.text.owners(len(batch.image))
        rows = list(range(len(batch.image))) if owner_N is None else owner_N.tolist()
        chosen_NSD = patches_BSD if owner_N is None else patches_BSD.index_select(0, owner_N)
        ids = tuple(batch.image_ids[i] for i in rows)
        with _watching(model, seen, ids, patches_BSD.shape[1]):
            model.pair_states(chosen_NSD, ids_NT, words, model.biases(ids_NT.shape[1]))


def _watching(model: VLMo, seen: dict[tuple[int, str], _Seen], image_ids: tuple[str, ...], width: int) -> ExitStack:
    """While it is open, what the experts see is noted. The images' tokens come first, `width` of each; a text's expert
    sees none of them."""

    def watch(layer: int, name: str, block: MoMEBlock) -> Callable[[Any, tuple[Tensor], Tensor], None]:
        def note(_: Any, given: tuple[Tensor], added_MD: Tensor) -> None:
            added_MD = added_MD * block.expert_scale if block.layer_scale else added_MD
            made_M = added_MD.norm(dim=-1) / given[0].norm(dim=-1)
            own = seen.setdefault((layer, name), _Seen())
            count = 0 if name == "language" else len(image_ids) * width
            if count:
                of_images = made_M[:count].view(-1, width)[:, 1:]
                own.add("patch", of_images.flatten())
                for image_id, value, place in zip(image_ids, *(x.tolist() for x in of_images.max(1)), strict=True):
                    own.best[image_id] = max(own.best.get(image_id, (0.0, 0)), (value, place))
            if len(made_M) > count:
                own.add("word", made_M[count:])

        return note

    stack = ExitStack()
    for layer, block in enumerate(cast("list[MoMEBlock]", list(model.blocks))):
        for name, expert in block.experts.items():
            stack.callback(expert.register_forward_hook(watch(layer, name, block)).remove)
    return stack


def _patches(model: VLMo, seen: _Seen) -> tuple[Patch, ...]:
    """The image becomes a square, so a patch's place is a share of either side."""
    grid = model.config.grid
    most = sorted(seen.best.items(), key=lambda item: (-item[1][0], item[0]))[:PATCHES]
    boxes = [(image_id, place % grid, place // grid) for image_id, (_, place) in most]
    return tuple(
        Patch(
            image_id=image_id,
            box=(
                round(column / grid, 4),
                round(row / grid, 4),
                round((column + 1) / grid, 4),
                round((row + 1) / grid, 4),
            ),
        )
        for image_id, column, row in boxes
    )
