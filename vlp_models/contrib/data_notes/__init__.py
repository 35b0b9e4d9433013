"""Notes on the data of params.yaml that `vlp plan` prints: what is not versioned, and what too few images rule out."""
