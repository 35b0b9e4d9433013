"""External inputs that params.yaml names: vocabularies, initial weights, backbones, and files outside a dataset.

`find_untracked` lists the data among them that neither git nor DVC has, so another copy of the project lacks it.
"""

from __future__ import annotations

import errno
import os
import shlex
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from vlp_models.common.packages import PREFIX, dependency, library_of, weights_dependency
from vlp_models.common.plugins import import_target
from vlp_models.common.workspace import Workspace, run_git
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


def detector_inputs(params: Params) -> list[str]:
    """Return the dependencies of the stage `detector`, which prepares the detector or backbone."""
    weights = [dependency(source) for source, _ in _image_weights(params)]
    if params.features.source == "timm":
        classes = params.features.timm.classes
        return [*weights, *([classes] if classes else [])]
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


def find_untracked(params: Params, workspace: Workspace) -> list[str]:
    """Return a sentence for each folder or file of data in the project that neither git nor DVC tracks.

    `dvc exp run --temp`, a clone and a colleague get what one of them tracks. Data outside the project is not listed.
    """
    root = workspace.root.absolute()
    named: list[tuple[str, str]] = []  # keys of params.yaml and the paths that they name
    for name, source in params.data.items():
        if source.root != params.ingest.dataset:  # to which `vlp ingest` adds its batches
            named.append((f"data.{name}.root", source.root))
        named += [(f"data.{name}", path) for path in files_outside_root(source)]
    if params.features.path:
        named.append(("features.path", params.features.path))
    # A generator writes these folders again in each copy of the project.
    generated = [workspace.raw(name).absolute() for name in params.generate]
    sentences: dict[Path, str] = {}
    for key, name in named:
        path = Path(os.path.normpath(root / name))
        inside = path.is_relative_to(root) and path != root and path.exists() and path not in sentences
        covered = any(path.is_relative_to(folder) for folder in (*generated, *sentences))
        if inside and not covered and _is_untracked(path, root):
            sentences[path] = (
                f"`{key}: {name}` is in neither git nor DVC, so a clone, a colleague and `dvc exp run --temp` will not "
                f"have it: {_explain_tracking(path, root, key)}"
            )
    return list(sentences.values())


def _is_untracked(path: Path, root: Path) -> bool:
    """Return whether a path is in no .dvc file and no commit; False if git does not work here."""
    # DVC may track the path, a folder around it, or files in it
    folders = [path, *(folder for folder in path.parents if folder.is_relative_to(root) and folder != root)]
    if any(folder.with_name(f"{folder.name}.dvc").is_file() for folder in folders) or any(path.glob("*.dvc")):
        return False
    # Empty output: git works and tracks nothing there; None: git failed.
    return run_git(root, "ls-files", "--", str(path)) == b""


def _explain_tracking(path: Path, root: Path, key: str) -> str:
    """Return how to track a path: DVC refuses a .dvc file that git ignores, git one that is in another clone."""
    name = path.relative_to(root).as_posix()
    folders = [folder for folder in path.parents if folder.is_relative_to(root) and folder != root]
    if clone := next((folder for folder in folders if (folder / ".git").exists()), None):
        return (
            f"copy it out of the git clone {clone.relative_to(root).as_posix()}, for example to data/raw/{path.name}, "
            f"and name the copy in `{key}`"
        )
    # the command, or first what makes it fail
    quoted = shlex.quote(name)
    add = f"dvc add {quoted} && git add {shlex.quote(f'{name}.dvc')}"
    # `git check-ignore` fails for a path that is not ignored.
    if run_git(root, "check-ignore", "-q", f"{name}.dvc") is None:
        return f"run `{add}`"
    check = f"git check-ignore -v {shlex.quote(f'{name}.dvc')}"
    return f"run `{check}` to see which line of .gitignore to change, then `{add}`"


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
            f"it should hold a dataset of the format {source.format} (docs/guides/datasets.md); put it there, or name "
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
        if path and not file.startswith(PREFIX) and not (root / path).exists():
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
    if params.features.source == "timm":
        weights, key = params.features.timm.weights, "features.timm.weights"
    elif params.detector.source == "weights":
        weights, key = params.detector.weights, "detector.weights"
    else:
        return []
    return [(weights, key)] if weights and not library_of(weights) else []
