"""The flows of the other deployments in prefect.yaml: one task at a time. Edit them, or add your own."""

from vlp_models.flows.on_demand import evaluate, notify_webhook, promote, rollback, train

__all__ = ["evaluate", "notify_webhook", "promote", "rollback", "train"]
