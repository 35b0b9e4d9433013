"""`vlp audit`: pairs whose caption does not fit, ranked; a page to accept or remove them; removal by `validate`."""
