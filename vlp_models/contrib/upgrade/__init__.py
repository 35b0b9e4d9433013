"""`vlp upgrade`: what a newer version's template changes in a project that `vlp init` made."""
