"""Figures that anybody can check: `vlp pack` and `vlp replay`."""
