"""Commit what a run changed, and push it with its data: `vlp commit`, the last part of a flow with `flow.commit`."""
