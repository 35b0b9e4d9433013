"""The training loop.

ADAPTERS: how a run with `lora` adds adapters to its model and publishes them.
PARTS: how a run with `parts` lists the checkpoints of its parts and averages them.
STRATEGIES: what `trainer.strategy` may name besides ddp.
"""

from vlp_models.common.plugins import Table
from vlp_models.errors import MissingToolError

ADAPTERS = Table("adapters", {})  # add, publish -> `module:function`, of contrib/lora
PARTS = Table("parts", {})  # checkpoints, average -> `module:function`, of contrib/parts
STRATEGIES = Table("strategies", {})  # fsdp -> `module:function`, of contrib/fsdp


def sharded_strategy() -> str:
    """Return the `module:function` that makes the strategy `fsdp`.

    Raises:
        MissingToolError: contrib/fsdp is not installed.
    """
    if "fsdp" not in STRATEGIES:
        raise MissingToolError("params.yaml: `trainer.strategy: fsdp` needs vlp_models/contrib/fsdp, not installed")
    return STRATEGIES["fsdp"]
