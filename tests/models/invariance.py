"""Invariants of every model that reads regions and generates words."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch

from vlp_models.data.batch import Batch, Text

Everything = Callable[[Any, Batch], dict[str, torch.Tensor]]  # one row a sample


def check_samples_are_independent(everything: Everything, model: Any, batch: Batch) -> None:
    """Check that other samples, their order, and the content and amount of padding have no effect.

    batch: of four.
    """
    together = everything(model, batch)
    padded = ~batch.image.mask_BR[..., None]
    noise = dataclasses.replace(
        batch,
        image=dataclasses.replace(
            batch.image,
            features_BRF=batch.image.features_BRF.masked_fill(padded, 7.0),
            boxes_BR4=batch.image.boxes_BR4.masked_fill(padded, 0.5),
        ),
        text=dataclasses.replace(batch.text, ids_BT=batch.text.ids_BT.masked_fill(~batch.text.mask_BT, 9)),
    )
    backwards = everything(model, noise.select(torch.tensor([3, 2, 1, 0])))
    for name, value in together.items():
        torch.testing.assert_close(backwards[name].flip(0), value, rtol=0, atol=1e-10, msg=name)
    for i in range(len(batch)):
        one = batch.select(torch.tensor([i]))
        length, regions = int(one.text.mask_BT.sum()), int(one.image.mask_BR.sum())
        cut = dataclasses.replace(
            one,
            image=type(one.image)(**{n: x[:, :regions] for n, x in vars(one.image).items() if x is not None}),
            text=Text(ids_BT=one.text.ids_BT[:, :length], mask_BT=one.text.mask_BT[:, :length]),
        )
        for name, value in everything(model, cut).items():
            expected = together[name][i : i + 1]
            expected = expected[:, :length] if expected.dim() == 3 else expected
            torch.testing.assert_close(value, expected, rtol=0, atol=1e-10, msg=name)


def with_another_word(batch: Batch, place: int) -> torch.Tensor:
    """Return the ids with another word at this position."""
    ids = batch.text.ids_BT.clone()
    ids[:, place] = (ids[:, place] + 1) % 30
    return ids


def check_later_words_have_no_effect(model: Any, batch: Batch) -> None:
    logits = model.generation_logits(batch.image, batch.text)
    for changed in range(1, 8):
        ids = with_another_word(batch, changed)
        other = model.generation_logits(batch.image, dataclasses.replace(batch.text, ids_BT=ids))
        assert torch.equal(other[:, :changed], logits[:, :changed])
        assert not torch.allclose(other[0, changed], logits[0, changed])


def check_cached_steps_equal_teacher_forcing(model: Any, batch: Batch) -> list[Any]:
    """Check it also with three hypotheses per image, shuffled within and across images. Returns the states."""
    size, length = batch.text.ids_BT.shape
    copies = torch.arange(size).repeat_interleave(3)
    generator = torch.Generator().manual_seed(5)
    ids = torch.randint(5, 30, (3 * size, length), generator=generator)
    state, states = model.reorder(model.start(batch.image, max_len=length), copies), []
    for t in range(length):
        if t == 2:  # within images: what is known of an image stays shared
            index = copies * 3 + torch.randint(0, 3, (3 * size,), generator=generator)
            state, ids = model.reorder(state, index), ids[index]
            assert state.memory.images == size
        if t == 5:  # hypotheses leave unevenly, images change places
            index = torch.tensor([7, 0, 1, 11, 4])
            state, ids, copies = model.reorder(state, index), ids[index], copies[index]
        logits, state = model.step(ids[:, t], state)
        prefix = Text(ids_BT=ids[:, : t + 1], mask_BT=torch.ones_like(ids[:, : t + 1], dtype=torch.bool))
        expected = model.generation_logits(batch.image.select(copies), prefix)[:, -1]
        torch.testing.assert_close(logits, expected, rtol=0, atol=1e-10)
        states.append(state)
    assert state.memory.images == size
    return states
