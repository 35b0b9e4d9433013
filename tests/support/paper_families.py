"""The families of the papers, which share more than the protocols of their tasks: those of the core."""

from vlp_models.models import FAMILIES

PAPER_FAMILIES = [name for name, target in FAMILIES.builtin.items() if ".contrib." not in target]
