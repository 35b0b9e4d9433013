"""Tables and links of a flow's results in Prefect's UI."""
