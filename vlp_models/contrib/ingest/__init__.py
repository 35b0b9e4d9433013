"""`vlp ingest`: new image-caption pairs from an inbox become batches of a versioned dataset."""
