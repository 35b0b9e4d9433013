"""What only the authors' public code (microsoft/unilm, vlmo) needs: its switches and its checkpoints' layout."""
