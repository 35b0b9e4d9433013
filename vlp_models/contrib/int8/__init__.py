"""Exports with weights of 8 bits: `vlp export --weights int8`, and the layers that load them."""
