"""Dataset metadata in the format of MLCommons: `vlp croissant`."""
