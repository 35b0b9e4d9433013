"""`vlp lineage`: where a registered version comes from, and how to rebuild it."""
