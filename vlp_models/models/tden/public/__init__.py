"""What only the checkpoints of the authors' public code need: its switches, the model that has them, its layout."""
