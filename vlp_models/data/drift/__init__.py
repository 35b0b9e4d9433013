"""How far new pairs are from those a model was trained on: statistics of either, and measures between them."""
