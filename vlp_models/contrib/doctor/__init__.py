"""`vlp doctor`: whether this machine and its packages are as the pipeline needs them."""
