"""The bundle: everything a registered version needs to predict, assembled and smoke-tested before it is registered.

    checkpoint/     the fine-tuned model
    detector/       for models that read regions: the detector or backbone, with features.json, how regions are computed
    search/         for tasks that search: the settings and index that the version was scored with
    content.json    SHA-256 of each of these files, and of each code file that predicting runs

The hash of all of it is the version's identity, so a change to the serving code makes another version.

An export (contrib/export) is the same in Hugging Face's layout: the checkpoint's files are at the top, features.json
is preprocessor_config.json, and content.json lists no code. All functions that read a bundle read both.

Imports no torch: the gate hashes bundles without it.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from vlp_models.common.io import hash_file, hash_path, link_or_copy, write_json
from vlp_models.common.limits import check_numbers
from vlp_models.common.plugins import active_plugins, add_plugins, use_installed_plugins
from vlp_models.common.source_hash import PACKAGE, hash_source, hash_sources
from vlp_models.common.workspace import SEARCH
from vlp_models.errors import CheckpointError, first_line
from vlp_models.models.checkpoint_info import CheckpointInfo
from vlp_models.vision import EXTRACTORS
from vlp_models.vision.extractors import FROM_IMAGES

BUNDLE = "bundle"  # the folder's name in MLflow
CHECKPOINT, DETECTOR, FEATURES = "checkpoint", "detector", "features.json"
PREPROCESSOR = "preprocessor_config.json"  # FEATURES of an export
CONTENT, FORMAT = "content.json", "vlp-bundle/1"
CODE = "code"  # the folder next to `artifacts/` where MLflow keeps a version's own code
READ_FILES = (  # of an export, besides its folders detector and search
    "config.json",
    "model.safetensors",
    "labels.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "vocab.txt",
    PREPROCESSOR,
)
UNHASHED = (CONTENT, "README.md")  # the model card lists scores, which may be measured again
SERVING_MODULES = (f"{PACKAGE}.registry.pyfunc_model", f"{PACKAGE}.serving.predictor")
INVALID = (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError)  # what a damaged file raises


def read_bundle_info(bundle: Path) -> CheckpointInfo:
    """Read the config of the bundle's checkpoint; see `read_checkpoint_info`."""
    return read_checkpoint_info(checkpoint_folder(bundle))


def checkpoint_folder(bundle: Path) -> Path:
    """Return the folder with the checkpoint's files."""
    return bundle / CHECKPOINT if (bundle / CHECKPOINT).is_dir() else bundle


def _is_export(bundle: Path) -> bool:
    return (bundle / PREPROCESSOR).is_file() and not (bundle / CHECKPOINT).is_dir()


def _way_out(bundle: Path) -> str:
    if _is_export(bundle):
        return "download it again, or export the version again with `vlp export`"
    return "download the version from the registry again, or register its run again: `vlp stage register`"


def read_checkpoint_info(directory: Path) -> CheckpointInfo:
    """Read a checkpoint's config.json alone, without hashing its weights as `models.checkpoint.read_config` does.

    Raises:
        CheckpointError: config.json is missing, damaged or of another format.
    """
    file = directory / "config.json"
    try:
        return CheckpointInfo.from_json(json.loads(file.read_text(encoding="utf-8")))
    except INVALID as error:
        raise CheckpointError(f"{file}: invalid checkpoint config ({error})") from None


def write_bundle(
    bundle: Path, *, checkpoint: Path, detector: Path, features: Mapping[str, Any], search: Path | None = None
) -> CheckpointInfo:
    """Write a bundle; files are hard-linked if possible, since weights may be large.

    Args:
        features: params of the features stage.
        search: the search that `evaluate` saved; None or missing: the task's default.

    Raises:
        CheckpointError: the checkpoint's config.json is missing, damaged or of another format.
    """
    from vlp_models.data.views import VIEW_MODULES
    from vlp_models.models import FAMILIES
    from vlp_models.models.checkpoint import ADAPTER_FOLDER
    from vlp_models.tasks import TASKS, task_class

    info = read_checkpoint_info(checkpoint)
    # An adapter refers to a checkpoint that a bundle does not have.
    adapter = shutil.ignore_patterns(ADAPTER_FOLDER)
    shutil.copytree(checkpoint, bundle / CHECKPOINT, copy_function=link_or_copy, ignore=adapter)
    if info.detector_id:
        shutil.copytree(detector, bundle / DETECTOR, copy_function=link_or_copy)
        (bundle / FEATURES).write_text(json.dumps(dict(features), indent=2) + "\n", encoding="utf-8")
    if search is not None and search.is_dir():
        shutil.copytree(search, bundle / SEARCH, copy_function=link_or_copy)
    # The code of predicting starts in these modules; those of them that are plugins are found by name and target.
    view = task_class(info.task).prediction_view if info.task else ""
    modules = [*SERVING_MODULES, FAMILIES[info.family]]
    if info.task:
        modules.append(TASKS[info.task])
    if view:
        modules.append(VIEW_MODULES[view])
    if info.detector_id and features["source"] in EXTRACTORS:
        modules.append(EXTRACTORS[features["source"]])
    plugins = {}
    for kind, name in (("families", info.family), ("tasks", info.task), ("views", view)):
        targets = active_plugins(kind)
        if name and name in targets:
            # A plugin is stored by its target, which `use_bundled_plugins` imports from the version's own code.
            plugins[kind] = {name: targets[name]}
    write_content(bundle, modules, plugins)
    return info


def write_content(bundle: Path, modules: Sequence[str], plugins: Mapping[str, Mapping[str, str]] | None = None) -> None:
    """Write content.json.

    Args:
        modules: the entry points of predicting; the code they import is hashed, too.
        plugins: see `use_bundled_plugins`.
    """
    # A target has no hash of its own (""); only files do.
    code = {name: sha256 for name, sha256 in hash_sources(modules).items() if sha256}
    content: dict[str, Any] = {"format": FORMAT, "files": hash_files(bundle), "code": code}
    if plugins:
        content["plugins"] = plugins
    write_json(bundle / CONTENT, content)


def use_bundled_plugins(bundle: Path) -> None:
    """Make known the plugins that the bundle's model and task are, unless the project names them itself.

    An export brings no code and names none: its plugins are those of installed packages.

    Raises:
        CheckpointError: content.json is invalid.
        ParamsError: a plugin's package is neither in the version's code nor installed.
    """
    if _is_export(bundle):
        use_installed_plugins()
        return
    try:
        plugins = json.loads((bundle / CONTENT).read_text(encoding="utf-8")).get("plugins", {})
        # Those that the project names itself have priority.
        missing = {}
        for kind, entries in plugins.items():
            active = active_plugins(kind)
            missing[kind] = {name: target for name, target in entries.items() if name not in active}
    except INVALID as error:
        raise CheckpointError(f"{bundle / CONTENT}: invalid bundle ({first_line(error)})") from None
    # artifacts/bundle and code are next to each other in a version's folder.
    add_plugins(missing, bundle.parents[1] / CODE)


def hash_bundle(bundle: Path) -> str:
    """Return the version's identity: the hash of the bundle's files as they are now and of the code that serves it.

    Raises:
        CheckpointError: content.json is missing, damaged or of another format.
    """
    return _identity(_hash_content(bundle, read_content(bundle)))


def _identity(content: Mapping[str, Mapping[str, str]]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def hash_weights(bundle: Path) -> str:
    """Return the hash of the weights alone, equal for versions that differ only in how they are served."""
    detector = bundle / DETECTOR
    # Region features are part of what the model computes, so the detector's weights count as well.
    return hash_path(bundle / CHECKPOINT) + (hash_path(detector)[:16] if detector.exists() else "")


def check_content(bundle: Path) -> str:
    """Compare the bundle's files and code with content.json; return the version's identity, as `hash_bundle` does.

    Raises:
        CheckpointError: content.json is invalid, or a file changed since the bundle was written; names the file.
    """
    written = read_content(bundle)
    # The names are those of both sides, so that added and missing files differ as well.
    present = _hash_content(bundle, written)
    for kind in ("files", "code"):
        for name in sorted(written[kind].keys() | present[kind].keys()):
            if written[kind].get(name) == present[kind].get(name):
                continue
            if name not in written[kind]:
                state = "was added"
            else:
                state = "has changed" if present[kind].get(name) else "is missing"
            event = "exported" if _is_export(bundle) else "registered"
            raise CheckpointError(
                f"{bundle}: {name} {state} since the version was {event} ({CONTENT}); {_way_out(bundle)}"
            )
    return _identity(present)


def read_content(bundle: Path) -> dict[str, dict[str, str]]:
    """Return the hashes in content.json by file, of the bundle (`files`) and of its code.

    Raises:
        CheckpointError: content.json is missing, damaged or of another format.
    """
    file = bundle / CONTENT
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
        if content["format"] != FORMAT:
            raise ValueError(f"format {content['format']!r}, expected {FORMAT!r}")
        hashes = {}
        for kind in ("files", "code"):
            hashes[kind] = {str(name): str(sha256) for name, sha256 in content[kind].items()}
        return hashes
    except INVALID as error:
        raise CheckpointError(f"{file}: invalid bundle ({type(error).__name__}: {error}); {_way_out(bundle)}") from None


def _hash_content(bundle: Path, written: Mapping[str, Mapping[str, str]]) -> dict[str, dict[str, str]]:
    """Hash the files as they are now, and the code if the version has its own copy (not while it is written)."""
    if _is_export(bundle):  # a repository may have more files, such as .gitattributes; they are not read
        names = set(_files_to_read(bundle))
        for name in written["files"]:  # names come from a file, so none may lead out of the folder
            if not Path(name).is_absolute() and ".." not in Path(name).parts and (bundle / name).is_file():
                names.add(name)
        return {"files": {name: hash_file(bundle / name) for name in names}, "code": dict(written["code"])}
    root = bundle.parents[1] / CODE
    # A bundle that is not in a version's folder has no copy of the code, such as one that is being written.
    if not (root / PACKAGE).is_dir():
        return {"files": hash_files(bundle), "code": dict(written["code"])}
    # Names come from a file, so none may lead out of the folder; a missing file has an empty hash.
    paths = {name: code_file(root, name) for name in written["code"] if ".." not in Path(name).parts}
    code = {name: hash_source(path) if path.is_file() else "" for name, path in paths.items()}
    return {"files": hash_files(bundle), "code": code}


def code_file(root: Path, name: str) -> Path:
    """Return a file of `hash_sources` in a folder of packages: `tasks/vqa.py`, or `plugins:my_task.py`."""
    package, separator, below = name.partition(":")
    return root / package / below if separator else root / PACKAGE / name


def _files_to_read(export: Path) -> list[str]:
    """Return the files of an export that are read if they are there, listed or not."""
    paths = [export / name for name in READ_FILES]
    for folder in (DETECTOR, SEARCH):
        paths += (export / folder).rglob("*")
    names = [path.relative_to(export) for path in paths if path.is_file()]
    # Hidden files are those of git or an editor.
    return [name.as_posix() for name in names if not any(part.startswith(".") for part in name.parts)]


def hash_files(bundle: Path) -> dict[str, str]:
    """Return the hashes of the files that content.json lists, by name."""
    hashes = {}
    for path in sorted(path for path in bundle.rglob("*") if path.is_file()):
        name = path.relative_to(bundle).as_posix()
        if name not in UNHASHED:
            hashes[name] = hash_file(path)
    return hashes


def why_not_served(bundle: Path) -> str:
    """Return why the bundle cannot predict from an image; empty if it can.

    Raises:
        CheckpointError: config.json or the features' config is missing or damaged.
    """
    from vlp_models.tasks import task_class

    info = read_bundle_info(bundle)
    if info.task is None or task_class(info.task).request is None:
        return f"the task {info.task} is not served"
    if info.detector_id:
        source = read_features_config(bundle)["source"]
        if source not in FROM_IMAGES:
            return f"its regions come from `{source}`, which cannot be computed from an image"
    return ""


def read_features_config(bundle: Path) -> dict[str, Any]:
    """Read how the regions were computed: `source`, `min_score`, `max_regions` and `content`.

    Raises:
        CheckpointError: missing, damaged, or an invalid value.
    """
    file = bundle / (PREPROCESSOR if _is_export(bundle) else FEATURES)
    # A damaged or hostile file: check the numbers before anything allocates by them.
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
        check_numbers(config)
        settings = {key: config[key] for key in ("source", "min_score", "max_regions", "content")}
    except INVALID as error:
        raise CheckpointError(f"{file}: invalid features config ({first_line(error)}); {_way_out(bundle)}") from None
    types = {"source": str, "min_score": (int, float), "max_regions": int, "content": str}
    for key, kind in types.items():
        # True is an integer in Python.
        if not isinstance(settings[key], kind) or isinstance(settings[key], bool):  # type: ignore[arg-type]
            raise CheckpointError(f"{file}: `{key}` is {settings[key]!r:.60}; {_way_out(bundle)}")
    if settings["content"] not in ("roi", "probabilities") or settings["max_regions"] < 1:
        raise CheckpointError(f"{file}: invalid `content` or `max_regions`; {_way_out(bundle)}")
    return settings
