"""A complete model family in one folder: a dual encoder of pixels that also writes captions."""
