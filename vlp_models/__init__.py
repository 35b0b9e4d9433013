"""Vision-language pretraining: five papers, one pipeline.

`Project` runs a project and reads its results; `VLP` loads a model that `vlp export` wrote.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vlp_models.project import Project as Project
    from vlp_models.serving.hub import VLP as VLP

__version__ = "0.1.0"

_LAZY = {"Project": "vlp_models.project", "VLP": "vlp_models.serving.hub"}  # name -> its module


def __getattr__(name: str) -> Any:
    """Import what the package offers when it is first used, so that `vlp --help` does not wait for it."""
    if name in _LAZY:
        from importlib import import_module

        return getattr(import_module(_LAZY[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
