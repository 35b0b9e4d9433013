"""Drift: whether new pairs differ from the training data. The stage `training_stats` and `vlp drift`."""
