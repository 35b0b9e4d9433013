"""A registered version against its lineage, and a resumed training against an uninterrupted one."""
