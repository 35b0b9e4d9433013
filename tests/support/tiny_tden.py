"""A TDEN of a few thousand weights, in float64 and without dropout, and random batches: fixtures for conftest.py."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from vlp_models.data.batch import Batch, Regions, Text
from vlp_models.models import DataFacts, build_model
from vlp_models.models.tden.model import TDEN

VOCAB, FEATURES, CLASSES = 30, 6, 5
FACTS = DataFacts(vocab_size=VOCAB, mask_id=4, feature_dim=FEATURES, num_classes=CLASSES)
TINY = {
    "hidden": 16,
    "heads": 2,
    "intermediate": 32,
    "object_layers": 2,
    "sentence_layers": 2,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "dropout": 0.0,
    "attention_dropout": 0.0,
    "init_std": 0.2,  # large enough that every path matters
}


def build_tiny(seed: int = 0, **overrides: object) -> TDEN:
    torch.manual_seed(seed)
    model = build_model("tden", {**TINY, **overrides}, FACTS)
    assert isinstance(model, TDEN)
    return model.double().eval()


def random_batch(size: int = 4, *, regions: int = 5, tokens: int = 9, seed: int = 0) -> Batch:
    """Return samples of different lengths; the first one has no padding."""
    generator = torch.Generator().manual_seed(seed)

    def lengths(longest: int) -> torch.Tensor:
        counts = torch.randint(3, longest + 1, (size,), generator=generator)
        counts[0] = longest
        return counts

    text_lengths, region_counts = lengths(tokens), lengths(regions)
    text_mask = torch.arange(tokens) < text_lengths[:, None]
    region_mask = torch.arange(regions) < region_counts[:, None]
    ids = torch.randint(5, VOCAB, (size, tokens), generator=generator)
    ids[:, 0] = 2
    ids[torch.arange(size), text_lengths - 1] = 3
    corners = torch.rand(size, regions, 2, 2, generator=generator, dtype=torch.float64).sort(dim=2).values
    features = torch.randn(size, regions, FEATURES, generator=generator, dtype=torch.float64)
    probs = torch.randn(size, regions, CLASSES, generator=generator, dtype=torch.float64).softmax(-1)
    return Batch(
        sample_ids=tuple(f"s/{i}" for i in range(size)),
        image_ids=tuple(f"i/{i}" for i in range(size)),
        image=Regions(
            features_BRF=features * region_mask[..., None],
            boxes_BR4=corners.flatten(2) * region_mask[..., None],
            class_probs_BRC=probs * region_mask[..., None],
            mask_BR=region_mask,
        ),
        text=Text(ids_BT=ids * text_mask, mask_BT=text_mask),
    )


@pytest.fixture
def tiny() -> Callable[..., TDEN]:
    return build_tiny


@pytest.fixture
def batch() -> Batch:
    return random_batch()


@pytest.fixture
def make_batch() -> Callable[..., Batch]:
    return random_batch
