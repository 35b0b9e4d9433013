"""A complete model in one folder. As CONTRIBUTING promises, it needs one line in `FAMILIES` and nothing else."""
