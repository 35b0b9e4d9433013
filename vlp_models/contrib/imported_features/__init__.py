"""Region features from files that another detector made: `features.source: tsv` or `npz`."""
