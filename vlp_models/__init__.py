"""Vision-language pretraining: five papers, one pipeline."""

__version__ = "0.1.0"
