"""Complete small plugins, which `vlp new` copies under another name (../commands.py)."""
