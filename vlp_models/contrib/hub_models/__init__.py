"""Models of the Hugging Face Hub, from a folder or by their name: two towers (`family: dual_encoder`)."""
