"""Registered models in lmms-eval."""
