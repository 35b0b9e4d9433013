"""Models of the Hugging Face Hub, from a folder or by their name: two towers (`family: dual_encoder`), or
the image tower alone (`features.source: tower`); a language model (`family: language_model_decoder`)."""
