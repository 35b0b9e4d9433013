"""Pretraining objectives that a model's family does not have itself: `pretrain.RUN.recipe.objectives`."""
