"""Model families, tasks and formats of your own: `vlp new` writes one, `vlp try` checks it."""
