"""Small-scale tests of pretraining claims: arms, contrasts fixed before the runs, paired seeds."""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch: one core a process
