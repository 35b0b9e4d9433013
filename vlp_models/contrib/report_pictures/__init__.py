"""The report's pictures: examples of predictions, figures that models saved, and training curves."""
