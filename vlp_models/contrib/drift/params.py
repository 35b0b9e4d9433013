"""The section `drift` of params.yaml."""

from __future__ import annotations

from dataclasses import dataclass

from vlp_models.params.schema import NonNegativeFloat, NonNegativeInt, Share

TRAINING_STATS = "data/training_stats.json"  # what new data is compared with


@dataclass(frozen=True, kw_only=True)
class DriftParams:
    """`vlp drift`: limits for each measure of contrib/drift."""

    gate: bool = False  # true: `vlp drift` exits with 4 if a limit is exceeded
    run: str = ""  # the run whose training data is compared with; empty: the first pretraining, or fine-tuning
    max_length_psi: NonNegativeFloat = 0.2
    max_vocabulary_divergence: NonNegativeFloat = 0.1
    max_unknown_words: Share = 0.05
    max_resolution_psi: NonNegativeFloat = 0.2
    max_aspect_psi: NonNegativeFloat = 0.2
    min_embedding_p: Share = 0.01
    images: NonNegativeInt = 256  # new images whose embeddings are compared; 0: none
    seed: NonNegativeInt = 1
