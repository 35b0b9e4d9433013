"""Checkpoints of the papers' own code, and parts of public ones, to start from: `vlp import-checkpoint`."""
