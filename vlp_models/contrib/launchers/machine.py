"""What all machines of a run must have in common."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import metadata
from typing import Any

from vlp_models.common.packages import describe_own
from vlp_models.common.source_hash import ROOT

# Their versions may change features, shards and weights.
SAME_VERSION = ("numpy", "pillow", "torch", "torchvision", "timm", "safetensors", "pyarrow", "opencv-python-headless")


def describe_machine() -> dict[str, Any]:
    """Return what all machines of a run must have: this package, and the versions of others that change results."""
    versions = {name: _version(name) for name in SAME_VERSION}
    return {"package": describe_own(), "versions": {name: version for name, version in versions.items() if version}}


def explain_difference(expected: Mapping[str, Any]) -> str:
    """Return what this machine has otherwise than the one that `describe_machine` described; empty: nothing.

    The text follows the machine's name.
    """
    package, running = expected["package"], describe_own()
    if running != package:
        difference = f"version {running['version']}" if running["version"] != package["version"] else "other code"
        return (
            f"has another vlp_models ({difference}, in {ROOT}) than the stage; install the same "
            f"one there: version {package['version']}, code {package['code'][:12]}"
        )
    for name, version in expected["versions"].items():
        installed = _version(name)
        if installed != version:
            return f"has {installed or 'no version'} of {name}, the stage {version}; install requirements.lock there"
    return ""


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return ""
