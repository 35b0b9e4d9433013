"""The training loop.

ADAPTERS: how a run with `lora` adds adapters to its model and publishes them.
STRATEGIES: what `trainer.strategy` may name besides ddp.
"""

from vlp_models.common.plugins import Table

ADAPTERS = Table("adapters", {})  # add, publish -> `module:function`, of contrib/lora
STRATEGIES = Table("strategies", {})  # fsdp -> `module:function`, of contrib/fsdp
