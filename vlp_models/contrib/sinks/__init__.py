"""Training curves in Weights & Biases and Trackio, next to MLflow: `tracking.sinks` of params.yaml."""
