"""The generator `web`: synthetic scenes with noisy alt texts, as on the web."""
