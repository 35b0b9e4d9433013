"""`trainer.strategy: fsdp`: weights, gradients and optimizer state are sharded over the processes of a training."""
