"""A whole model in one folder. As CONTRIBUTING promises, nothing else knows of it but one line in `FAMILIES`."""
