"""Samples with other values than those in the shards."""

from __future__ import annotations

import dataclasses
from typing import Any

from vlp_models.data.sample import Sample


def with_values(sample: Sample, **values: Any) -> Sample:
    """Return the sample with other values of its columns."""
    return dataclasses.replace(sample, values={**sample.values, **values})
