"""Datasets of the Hugging Face Hub: the format `hf`, of a local folder or of `hf://OWNER/NAME@COMMIT`."""
