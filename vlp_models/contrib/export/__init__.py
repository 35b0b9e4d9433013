"""Registered versions for other projects: `vlp export` writes a folder, `VLP` loads it and shares it on the Hub."""
