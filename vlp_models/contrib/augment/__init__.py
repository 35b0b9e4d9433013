"""The stage `augment`: captions that a model writes for training images, as extra fine-tuning data."""
