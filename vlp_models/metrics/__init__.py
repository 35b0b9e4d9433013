"""Metrics of plugins, by their name in params.yaml (`evaluate.metrics`); the tasks compute their own."""

from __future__ import annotations

from vlp_models.common.plugins import Table

METRICS = Table("metrics", {})
