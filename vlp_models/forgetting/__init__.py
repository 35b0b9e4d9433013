"""`vlp forget`: which models saw a picture, the picture out of the datasets, the models made again without it."""
