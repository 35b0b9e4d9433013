"""What a project keeps, and what `vlp prune` deletes: the section `retention` of params.yaml."""
