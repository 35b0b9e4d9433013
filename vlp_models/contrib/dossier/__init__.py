"""`vlp dossier`: technical documentation, bill of materials and provenance of a version, from its records."""
