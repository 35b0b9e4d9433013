"""`features.source: joined`: the cells of several timm models side by side, as one feature."""
