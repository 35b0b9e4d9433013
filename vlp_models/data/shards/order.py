"""Which order a training's samples come in: all mixed, in blocks, or with texts about one image beside each other."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Protocol

from vlp_models.data.shards.block_order import BlockOrder
from vlp_models.data.shards.blocks import Layout
from vlp_models.data.shards.grouped_order import GroupedOrder, first_of_each
from vlp_models.data.shards.loader import EpochOrder
from vlp_models.errors import ParamsError
from vlp_models.params import StreamParams


class _Samples(Protocol):
    """A dataset, as far as its order needs it."""

    @property
    def layout(self) -> Layout | None: ...
    def image_ids(self) -> Sequence[str]: ...


def order_of(samples: _Samples, stream: StreamParams | None, texts_per_image: int = 1) -> Callable[..., EpochOrder]:
    """The order of a training's samples: in blocks where they are streamed.

    Args:
        texts_per_image: at most so many are put beside each other; 1: none are.

    Raises:
        ParamsError: both are asked for.
    """
    layout = samples.layout
    if texts_per_image > 1:
        if layout is not None:
            raise ParamsError(
                "params.yaml: `texts_per_image` puts texts about one image beside each other, `trainer.stream` mixes "
                "them within blocks: set `texts_per_image: 1`, or leave `trainer.stream.address` empty"
            )
        return partial(GroupedOrder, images=first_of_each(samples.image_ids()), texts_per_image=texts_per_image)
    if layout is not None and stream is not None:
        return partial(BlockOrder, layout=layout, window=stream.window)
    return EpochOrder
