"""What the public code (researchmm/soho) does otherwise, and its checkpoints."""
