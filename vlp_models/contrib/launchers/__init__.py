"""Start a training elsewhere: `trainer.launcher` of params.yaml. `launch` is the seam, each engine is a file."""
