"""`vlp influence`: which training pairs raise a run's loss on a split, and which ones a prediction comes from."""
