"""What a registered version holds, put together and tried out before it is registered.

`checkpoint/` always; `detector/` and `features.json` (how the regions were made) where the model reads regions;
`search/` where answers are caption_search for: how, as it was scored (tasks/caption_search.py); `content.json`: the sha256 of
each of these files and of each file of code that predicting runs on. The hash of all of it is the version's identity,
so a change to how it is served is a version of its own.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from vlp_models.common.io import hash_file, hash_path, link_or_copy, write_json
from vlp_models.common.limits import check_numbers
from vlp_models.common.source_hash import PACKAGE, hash_source, hash_sources
from vlp_models.common.workspace import SEARCH
from vlp_models.errors import CheckpointError, VLPError
from vlp_models.models.checkpoint import CheckpointInfo
from vlp_models.vision.extractors import FROM_IMAGES

BUNDLE = "bundle"  # the folder's own name: MLflow keeps it
CHECKPOINT, DETECTOR, FEATURES = "checkpoint", "detector", "features.json"
CONTENT = "content.json"
CODE = "code"  # the folder beside `artifacts/` that MLflow keeps a version's own code in
UNHASHED = (CONTENT, "README.md")  # the card tells of scores, which are measured again
SERVED_BY = (f"{PACKAGE}.registry.pyfunc_model", f"{PACKAGE}.serving.predictor")


def bundle_info(bundle: Path) -> CheckpointInfo:
    """What the bundle's checkpoint says of itself.

    Raises:
        CheckpointError: config.json is missing, damaged or of another format.
    """
    return checkpoint_info(bundle / CHECKPOINT)


def checkpoint_info(directory: Path) -> CheckpointInfo:
    """
    Raises:
        CheckpointError: config.json is missing, damaged or of another format.
    """
    file = directory / "config.json"
    try:
        return CheckpointInfo.from_json(json.loads(file.read_text(encoding="utf-8")))
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointError(f"{file}: does not say what the checkpoint is ({error})") from None


def write_bundle(
    bundle: Path, *, checkpoint: Path, detector: Path, features: Mapping[str, Any], search: Path | None = None
) -> CheckpointInfo:
    """Makes `bundle`; files are linked where the disk can, since weights may be large.

    Args:
        features: params of the features stage.
        search: what `evaluate` left of how answers are searched for; None or nothing there: as the task does.

    Raises:
        CheckpointError: see `checkpoint_info`.
    """
    from vlp_models.models import FAMILIES
    from vlp_models.tasks import TASKS

    info = checkpoint_info(checkpoint)
    shutil.copytree(checkpoint, bundle / CHECKPOINT, copy_function=link_or_copy)
    if info.detector_id:
        shutil.copytree(detector, bundle / DETECTOR, copy_function=link_or_copy)
        (bundle / FEATURES).write_text(json.dumps(dict(features), indent=2) + "\n", encoding="utf-8")
    if search is not None and search.is_dir():
        shutil.copytree(search, bundle / SEARCH, copy_function=link_or_copy)
    looked_up = (FAMILIES[info.family], TASKS[info.task] if info.task else "")
    write_content(bundle, [*SERVED_BY, *(place for place in looked_up if place.startswith(f"{PACKAGE}."))])
    return info


def content_of(bundle: Path) -> str:
    """The identity of a version: one hash over all that its bundle holds and over the code that serves it, taken from
    the files as they are now. Of bundles made before there was a content.json: over weights alone.

    Raises:
        CheckpointError: content.json is damaged.
    """
    written = _written(bundle)
    if written is None:
        return weights_of(bundle)
    return hashlib.sha256(json.dumps(_found(bundle, written), sort_keys=True).encode()).hexdigest()


def weights_of(bundle: Path) -> str:
    """What is the same in two versions that differ only in how they are served."""
    detector = bundle / DETECTOR
    return hash_path(bundle / CHECKPOINT) + (hash_path(detector)[:16] if detector.exists() else "")


def check_content(bundle: Path) -> None:
    """
    Raises:
        CheckpointError: a file of the bundle, or of its code, is not what it was when the bundle was made; names it.
    """
    written = _written(bundle)
    if written is None:
        return
    found = _found(bundle, written)
    for what in ("files", "code"):
        for name in sorted(written[what].keys() | found[what].keys()):
            if written[what].get(name) != found[what].get(name):
                state = "not what it was" if found[what].get(name) else "missing"
                raise CheckpointError(
                    f"{bundle}: {name} is {state}, by {CONTENT}: this is not what was registered; take it from the "
                    "registry anew, or register it again"
                )


def write_content(bundle: Path, modules: Sequence[str]) -> None:
    """modules: names of what predicting begins with."""
    code = {name: sha256 for name, sha256 in hash_sources(modules).items() if sha256}
    write_json(bundle / CONTENT, {"format": "vlp-bundle/1", "files": _files(bundle), "code": code})


def _written(bundle: Path) -> dict[str, dict[str, str]] | None:
    file = bundle / CONTENT
    if not file.exists():
        return None
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
        return {what: {str(k): str(v) for k, v in found[what].items()} for what in ("files", "code")}
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointError(f"{file}: does not say what the bundle holds ({error})") from None


def _found(bundle: Path, written: Mapping[str, Mapping[str, str]]) -> dict[str, dict[str, str]]:
    """The same of the files that are there. Code counts where the version has its own: a bundle that is just being made
    has none."""
    root = bundle.parents[1] / CODE / PACKAGE
    if not root.is_dir():
        return {"files": _files(bundle), "code": dict(written["code"])}
    paths = {name: root / name for name in written["code"] if ".." not in Path(name).parts}
    return {"files": _files(bundle), "code": {n: hash_source(p) if p.is_file() else "" for n, p in paths.items()}}


def _files(bundle: Path) -> dict[str, str]:
    files = sorted(path for path in bundle.rglob("*") if path.is_file())
    names = {path.relative_to(bundle).as_posix(): path for path in files}
    return {name: hash_file(path) for name, path in names.items() if name not in UNHASHED}


def not_served(bundle: Path) -> str:
    """Why nobody expects the bundle to predict from an image; empty: it must be able to.

    Raises:
        CheckpointError: see `bundle_info`.
    """
    from vlp_models.tasks import task_class

    info = bundle_info(bundle)
    if info.task is None or task_class(info.task).request is None:
        return f"the task {info.task} is not served"
    if info.detector_id:
        source = read_made(bundle)["source"]
        if source not in FROM_IMAGES:
            return f"its regions come from `{source}`, which can't be made from an image"
    return ""


def read_made(bundle: Path) -> dict[str, Any]:
    """features.json: how the regions were made, with `source`, `min_score`, `max_regions` and `content`.

    Raises:
        CheckpointError: missing, damaged, or a value that can't be.
    """
    file = bundle / FEATURES
    try:
        made = json.loads(file.read_text(encoding="utf-8"))
        check_numbers(made)
        found = {key: made[key] for key in ("source", "min_score", "max_regions")}
        found["content"] = made.get("content", "roi")  # bundles before there was a choice do not say
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointError(f"{file}: does not say how the regions were made ({error!r})") from None
    kinds = {"source": str, "min_score": (int, float), "max_regions": int, "content": str}
    for key, kind in kinds.items():
        if not isinstance(found[key], kind) or isinstance(found[key], bool):  # type: ignore[arg-type]
            raise CheckpointError(f"{file}: `{key}` is {found[key]!r:.60}; take the bundle from the registry anew")
    if found["content"] not in ("roi", "probabilities") or found["max_regions"] < 1:
        raise CheckpointError(f"{file}: `content` or `max_regions` can't be; take the bundle from the registry anew")
    return found


@dataclass(frozen=True, kw_only=True)
class Trial:
    """problem: why the bundle can't be served; empty: it can. predicted: what it says of an image."""

    problem: str = ""
    predicted: dict[str, Any] = field(default_factory=dict)


def try_out(bundle: Path, images: Sequence[Path]) -> Trial:
    """Predicts for one image (or as many as the task looks at) through the bundle, as a server would.

    Args:
        images: the first one that is there is taken, in every place.
    """
    from vlp_models.serving.predictor import Predictor
    from vlp_models.tasks import task_class

    there = next((path for path in images if path.is_file()), None)
    if there is None:
        return Trial(problem="no image of the val or test split is on this disk to try it with")
    try:
        predictor = Predictor(bundle)
        request = task_class(predictor.task).request
        texts = ["is there a picture?"] if request is not None and request.text else None
        count = 1 if request is None else request.images
        made = predictor.predict([there] if count == 1 else [[there] * count], texts)
    except VLPError as error:
        return Trial(problem=str(error))
    except Exception as error:  # whatever breaks here would break in a server
        return Trial(problem=f"{type(error).__name__}: {error}")
    return Trial(predicted=made[0]) if len(made) == 1 and made[0] else Trial(problem="it predicts nothing")
