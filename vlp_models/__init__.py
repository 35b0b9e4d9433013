"""Vision-language pretraining: five papers, one pipeline. `VLP` loads a model that `vlp export` wrote."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vlp_models.serving.hub import VLP as VLP

__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    """Import `VLP` when it is first used, so that `vlp --help` does not wait for torch."""
    if name == "VLP":
        from importlib import import_module

        return import_module("vlp_models.serving.hub").VLP
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
