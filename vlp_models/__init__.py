"""Vision-language pretraining: five papers, one pipeline.

`Project` runs a project and reads its results; `VLP` loads a model that `vlp export` wrote.
"""

from typing import TYPE_CHECKING, Any

from vlp_models.contrib import CONTRIB

if TYPE_CHECKING:
    from vlp_models.contrib.export.hub import VLP as VLP
    from vlp_models.contrib.project_api.project import Project as Project

__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    """Import what folders of contrib offer when it is first used, so that `vlp --help` does not wait for it."""
    for kinds in CONTRIB.values():
        if target := kinds.get("api", {}).get(name):
            from importlib import import_module

            module, _, attribute = target.partition(":")
            return getattr(import_module(module), attribute)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
