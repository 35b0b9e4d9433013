"""`vlp forget`: find the models that were trained on an image, and withdraw the image."""
