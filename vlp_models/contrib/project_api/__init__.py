"""`Project`: a project from Python, for notebooks."""
