"""Prefect's server and a worker on this machine: `vlp up` and `vlp down`; `vlp status` describes them."""
