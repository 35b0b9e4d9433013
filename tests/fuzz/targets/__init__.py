"""What is fuzzed: each target takes the bytes of one file, puts them where the program reads them, and has it read.

The files around it are sound and made by the project itself. A target's return value is ignored: an input may be
taken, or refused by a `VLPError`.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "support"))  # the toys of tests/

from targets import checkpoints, datasets, requests, shards
from targets.base import Attempt, Target

__all__ = ["TARGETS", "Attempt", "Target"]

TARGETS = {target.name: target for module in (datasets, shards, checkpoints, requests) for target in module.TARGETS}
