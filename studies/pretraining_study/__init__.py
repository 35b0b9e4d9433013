"""What pretraining is worth, asked so that an answer can be had: arms, contrasts written down before, paired seeds."""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch: one core a process
