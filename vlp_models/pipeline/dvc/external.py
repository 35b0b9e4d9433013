"""External inputs that params.yaml names: vocabularies, initial weights, backbones, and files outside a dataset."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from vlp_models.common.packages import HUB, PREFIX, dependency, library_of, weights_dependency
from vlp_models.common.plugins import active_plugins, import_target
from vlp_models.errors import DataError, ParamsError, explain_system_error, is_accessible
from vlp_models.params import DatasetParams, Params


def vocabulary_source(params: Params) -> list[tuple[str, str]]:
    """Return source and params key of the tokenizer's vocabulary; empty if the tokenizer is trained."""
    tokenizer = params.tokenizer
    return [(tokenizer.vocab, "tokenizer.vocab")] if tokenizer.source == "vocab" and tokenizer.vocab else []


def named_sources(params: Params, *, regions: bool) -> list[tuple[str, str]]:
    """Return source and params key of everything that may be an installed package.

    Args:
        regions: whether any model reads them; otherwise neither backbone nor detector is needed.
    """
    initial = [
        (source, f"models.{name}.{key}")
        for name, model in params.models.items()
        for key, source in (("init", model.init), ("image_init", model.image_init), ("text_init", model.text_init))
        if source
    ]
    return [*vocabulary_source(params), *initial, *(_image_weights(params) if regions else [])]


def plugins_in_use(params: Params, views: Iterable[str], metrics: Iterable[str]) -> list[str]:
    """Return `module:object` of the plugins that the datasets, models and runs of params.yaml use."""
    families = {model.family for model in params.models.values()}
    names = {
        **dict.fromkeys(("families", "text_readers", "image_readers"), families),
        "tasks": {run.task for run in params.finetune.values()},
        "formats": {source.format for source in params.data.values()},
        "generators": {entry.generator for entry in params.generate.values()},
        "views": set(views),
        "metrics": set(metrics),
    }
    return [t for kind, used in names.items() for name, t in active_plugins(kind).items() if name in used]


def detector_inputs(params: Params) -> list[str]:
    """Return the dependencies of the stage `detector`, which prepares the detector or backbone."""
    weights = [dependency(source) for source, _ in _image_weights(params)]
    if backbones := params.features.backbones.values():
        return [*weights, *(backbone.classes for backbone in backbones if getattr(backbone, "classes", ""))]
    return [*([] if params.detector.source == "none" else ["data/validated/boxed.parquet"]), *weights]


def files_outside_root(source: DatasetParams) -> list[str]:
    """Return the files that a dataset names and that are not below its `root`.

    For example Karpathy's list of COCO images for Visual Genome.
    """
    from vlp_models.data.formats import source_params

    # the format declares which of its keys are files
    params = source_params("NAME", source)
    values = [getattr(params, key) for key in params.file_keys]
    named = [file for value in values for file in _flatten(value) if file]
    # Normalized as text, without following links: DVC records the path as params.yaml has it.
    paths = {os.path.normpath(Path(source.root, file)) for file in named}
    return sorted(path for path in paths if not Path(path).is_relative_to(os.path.normpath(source.root)))


def _flatten(value: Any) -> Iterator[str]:
    """Yield the files in a value of params.yaml: one, a list, or lists by split."""
    if isinstance(value, str):
        yield value
    else:
        for part in value.values() if isinstance(value, Mapping) else value:
            yield from _flatten(part)


def find_generator(params: Params, name: str) -> str:
    """Return the entry of `generate` that writes a dataset's folder, or "": scenes for data/raw/scenes/nlvr2."""
    if name in params.generate:
        return name
    # a generator may write several datasets, in sub-folders of its output
    root = Path(os.path.normpath(params.data[name].root))
    return next((key for key in params.generate if root.is_relative_to(Path("data", "raw", key))), "")


def explain_roots(
    params: Params, root: Path, names: Iterable[str] | None = None, *, ingested: bool = True
) -> list[str]:
    """Return a sentence on each dataset whose folder is missing or unreadable: the key, what is expected, the way out.

    Args:
        names: datasets of params.yaml; default: all. Those that a stage generates are skipped.
        ingested: include the dataset that `vlp ingest` fills.
    """
    sentences = []
    for name in params.data if names is None else names:
        if not ingested and Path(params.data[name].root) == Path(params.ingest.dataset):
            continue
        if not find_generator(params, name):
            sentences.append(_explain_root(params, name, root))
    return [sentence for sentence in sentences if sentence]


def check_roots(params: Params, root: Path, names: Iterable[str] | None = None, *, ingested: bool = True) -> None:
    """Check the folders of raw data; see `explain_roots`.

    Raises:
        DataError: one of them is missing or unreadable.
    """
    if missing := explain_roots(params, root, names, ingested=ingested):
        raise DataError("; ".join(missing))


def _explain_root(params: Params, name: str, root: Path) -> str:
    """Return what is wrong with a dataset's root and the way out, or ""; nothing is downloaded."""
    from vlp_models.data.formats import FORMATS

    source = params.data[name]
    reader = import_target(FORMATS[source.format]) if source.format in FORMATS else None
    key = f"params.yaml: `data.{name}.root: {source.root}`"
    if source.is_remote:
        check_root = getattr(reader, "check_root", None)
        if check_root is None:
            return f"{key}: the format {source.format} reads a folder, not an address"
        try:
            check_root(name, source.root)
        except ParamsError as error:
            return str(error)
        return ""
    folder = root / source.root
    if folder.is_dir():
        # The right to read lists a folder, the right to execute opens the files in it.
        if is_accessible(folder, os.R_OK | os.X_OK):
            return ""
        return f"{key}: {explain_system_error(PermissionError(errno.EACCES, '', os.fspath(folder)))}"
    fault = "a file, not a folder" if folder.is_file() else "no such folder"
    if folder.is_symlink() and not folder.exists():
        fault = f"a symbolic link to {folder.readlink()}, which does not exist"
    # the way out depends on where such a dataset comes from
    if Path(source.root) == Path(params.ingest.dataset):
        way_out = f"`vlp ingest` creates it; until then, remove the dataset with `vlp use --set data.{name}=null`"
    elif (tracked := Path(f"{folder}.dvc")).exists():
        way_out = f"fetch it with `dvc pull {os.path.relpath(tracked, root)}`"
    elif way_to_get := getattr(reader, "way_to_get", ""):
        way_out = way_to_get.format(name=name, root=source.root)
    else:
        way_out = (
            f"it should hold a dataset of the format {source.format}; put it there, or name "
            f"its folder with `vlp use --set data.{name}.root=FOLDER`"
        )
    return f"{key}: {fault}; {way_out}"


def check_files(params: Params, root: Path, *, regions: bool) -> None:
    """Check the files outside a dataset that params.yaml names: DVC would end hours later, with nothing but the path.

    Args:
        regions: as for `named_sources`.

    Raises:
        DataError: one of them is missing.
    """
    missing = []
    # files that datasets name, then weights and vocabularies, then imported features
    for name, source in params.data.items():
        missing += [
            f"params.yaml: `data.{name}` names {path}: no such file; put it there, or correct the name"
            for path in files_outside_root(source)
            if not find_generator(params, name) and not (root / path).exists()
        ]
    for file, key in named_sources(params, regions=regions):
        path = weights_dependency(file)
        if path and not file.startswith((HUB, PREFIX)) and not (root / path).exists():
            way_out = "the path is relative to the project root"
            if key.endswith(".init"):
                way_out = f"create it with `vlp import-checkpoint ... --name {Path(file).name}`"
            missing.append(f"params.yaml: `{key}: {file}`: not found; {way_out}")
    imported = params.features.path if regions else ""
    if imported and not (root / imported).exists():
        missing.append(f"params.yaml: `features.path: {imported}`: not found; the path is relative to the project root")
    if missing:
        raise DataError("; ".join(missing))


def _image_weights(params: Params) -> list[tuple[str, str]]:
    """Return source and params key of the backbone's or detector's weights, unless a library downloads them."""
    weights = {f"{key}.weights": backbone.weights for key, backbone in params.features.backbones.items()}
    if params.features.backbone is None and params.detector.source == "weights":
        weights = {"detector.weights": params.detector.weights}
    return [(source, key) for key, source in weights.items() if source and not library_of(source)]
