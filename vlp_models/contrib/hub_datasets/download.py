"""Datasets of the Hugging Face Hub by their name: `root: hf://OWNER/NAME@COMMIT[/FOLDER]`, for the format `hf`.

The commit is part of the name, so `prepare` depends on params.yaml alone: DVC needs no copy of the files, which stay in
the Hub's cache (HF_HOME). `vlp use` replaces a branch or a tag, which may move, by its commit (`pin`).

Only data and the card are downloaded: parquet files, or else tars, or else metadata with its images; no code and no
pickles. Each file is compared with the hash that the Hub lists for it, since the client compares sizes only.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path, PurePosixPath
from typing import Any

from vlp_models.data.formats.files import is_hidden
from vlp_models.errors import DataError, MissingToolError, ParamsError, first_line, network_reason

PREFIX = "hf://"
# A full SHA-1 of git; shorter ones could become ambiguous.
COMMIT = re.compile(r"[0-9a-f]{40}")
_PART = r"[A-Za-z0-9][\w.-]*"
# A revision has no slash, except for those that the Hub makes: refs/convert/parquet, refs/pr/1
_NAME = re.compile(
    rf"hf://(?:datasets/)?(?P<repo>{_PART}/{_PART})(?:@(?P<revision>refs/(?:convert|pr)/[^/@]+|[^/@]+))?(?:/(?P<folder>.*))?"
)
PARQUET, TAR = ".parquet", ".tar"
CARD = "README.md"
METADATA = ("metadata.jsonl", "metadata.csv")
SUFFIXES = ("jpg", "jpeg", "png", "webp", "gif", "bmp")
CHUNK = 2**20


@dataclass(frozen=True)
class HubDataset:
    """A dataset of the Hub. revision: a commit, branch or tag, "": the default branch. folder: within it, "": all."""

    repo: str
    revision: str = ""
    folder: str = ""

    @property
    def root(self) -> str:
        """The name as `root` in params.yaml."""
        revision, folder = self.revision and f"@{self.revision}", self.folder and f"/{self.folder}"
        return f"{PREFIX}{self.repo}{revision}{folder}"

    @property
    def is_pinned(self) -> bool:
        return COMMIT.fullmatch(self.revision) is not None


def parse_root(name: str, root: str) -> HubDataset:
    """Return the parts of `data.NAME.root`.

    Raises:
        ParamsError: it is not in the form `hf://OWNER/NAME[@REVISION][/FOLDER]`.
    """
    match = _NAME.fullmatch(root)
    folder = (match["folder"] or "").strip("/") if match else ""
    # `*` and other wildcards would match files of other folders in `_patterns`
    if not match or ".." in folder.split("/") or set(folder) & set("*?[]\\"):
        raise ParamsError(f"params.yaml: `data.{name}.root: {root}`: write it as hf://OWNER/NAME[@REVISION][/FOLDER]")
    return HubDataset(match["repo"], match["revision"] or "", folder)


def check_pinned(name: str, root: str) -> HubDataset:
    """Return the parts of `data.NAME.root`.

    Raises:
        ParamsError: it is malformed, or names no commit.
    """
    dataset = parse_root(name, root)
    if dataset.is_pinned:
        return dataset
    reason = f"`{dataset.revision}` is not a commit and may move" if dataset.revision else "it names no commit"
    raise ParamsError(
        f"params.yaml: `data.{name}.root: {root}`: {reason}, so results could change; run "
        f"`vlp use --set data.{name}.root={root}`, which writes the commit"
    )


def pin(name: str, root: str) -> str:
    """Return `data.NAME.root` with the commit that its branch or tag is at now; unchanged if it names a commit.

    Raises:
        ParamsError: it is malformed.
        DataError: no such repository or revision, no access, or no network.
        MissingToolError: huggingface_hub is not installed.
    """
    dataset = parse_root(name, root)
    if dataset.is_pinned:
        return root
    hub = _import_hub()
    with _hub_errors(name, dataset):
        commit = hub.HfApi().dataset_info(dataset.repo, revision=dataset.revision or None).sha
    return replace(dataset, revision=commit).root


def download(name: str, root: str) -> Path:
    """Download the data of `data.NAME.root` into the Hub's cache, unless it is there, and return its folder.

    Raises:
        ParamsError: the root is malformed, or names no commit.
        DataError: no such repository or commit, no access, no network, no data, or a file with a wrong hash.
        MissingToolError: huggingface_hub is not installed.
    """
    dataset = check_pinned(name, root)
    hub = _import_hub()
    get = partial(hub.snapshot_download, dataset.repo, repo_type="dataset", revision=dataset.revision)
    with _hub_errors(name, dataset):
        get(allow_patterns=[CARD, *_patterns(dataset, METADATA)])  # small; this stores the list of all files
        listed = hub.get_cached_repo_tree(dataset.repo, repo_type="dataset", revision=dataset.revision)
        # files of the folder, without hidden ones
        files = {}
        for file in listed:
            path = PurePosixPath(file.path)
            # An empty folder is the root: every path is relative to it.
            if path.is_relative_to(dataset.folder) and not is_hidden(path.relative_to(dataset.folder)):
                files[file.path] = file
        endings = _choose_layout(name, dataset, files)
        snapshot = Path(get(allow_patterns=_patterns(dataset, endings)))
    for name_in_repo, file in files.items():
        if _is_data(name_in_repo, endings):
            _check_hash(name, dataset, snapshot / name_in_repo, file)
    return snapshot / dataset.folder


def _choose_layout(name: str, dataset: HubDataset, files: Iterable[str]) -> tuple[str, ...]:
    """Return how the names of the data files end, in the order of layouts in which the reader looks for them."""
    images = (f".{suffix}" for suffix in (*SUFFIXES, *map(str.upper, SUFFIXES)))
    paths = set(files)
    layouts: list[tuple[tuple[str, ...], Iterable[str]]] = [((PARQUET,), ()), ((TAR,), ()), (METADATA, images)]
    # img2dataset's tables of the files in tars: the tars have the images
    if any(f"{path.removesuffix(PARQUET)}{TAR}" in paths for path in paths if path.endswith(PARQUET)):
        layouts.insert(0, layouts.pop(1))
    for endings, image_endings in layouts:
        if any(_is_data(path, endings) for path in paths):
            return (*endings, *image_endings)
    suffixes = ", ".join(sorted({PurePosixPath(path).suffix or path for path in paths})) or "nothing"
    raise DataError(
        f"data.{name}: {dataset.root} has no {PARQUET}, no {TAR} and no {' or '.join(METADATA)}, but {suffixes}; the "
        "Hub converts many datasets to parquet: "
        f"`vlp use --set data.{name}.root={PREFIX}{dataset.repo}@refs/convert/parquet`"
    )


def _patterns(dataset: HubDataset, endings: tuple[str, ...]) -> list[str]:
    """Return patterns of the files below the dataset's folder that `_is_data`; `*` matches slashes too."""
    start = f"{dataset.folder}/" if dataset.folder else ""
    patterns = []
    for ending in endings:
        if ending[0] == ".":  # a suffix
            patterns.append(f"{start}*{ending}")
        else:  # a name, in the folder or below it
            patterns += [start + ending, f"{start}*/{ending}"]
    return patterns


def _is_data(path: str, endings: tuple[str, ...]) -> bool:
    """Return whether a file has one of the suffixes, or one of the names, in `endings`."""
    file = PurePosixPath(path)
    return file.suffix in endings or file.name in endings


def _check_hash(name: str, dataset: HubDataset, path: Path, listed: Any) -> None:
    """Compare a downloaded file with its entry in the Hub's list of files: a sha256, or git's hash of a small file."""
    # git names a small file by the hash of "blob", its size and its content
    if listed.lfs:
        digest, expected = hashlib.sha256(), listed.lfs.sha256
    else:
        digest, expected = hashlib.sha1(f"blob {path.stat().st_size}\0".encode(), usedforsecurity=False), listed.blob_id
    with path.open("rb") as file:
        while chunk := file.read(CHUNK):
            digest.update(chunk)
    if digest.hexdigest() != expected:
        raise DataError(
            f"data.{name}: {listed.path} of {dataset.root} does not have the hash that the Hub lists, so it is damaged "
            f"or was changed; delete {path.resolve()} and run again"
        )


def _import_hub() -> Any:
    try:
        import huggingface_hub
        from huggingface_hub.utils import logging
    except ModuleNotFoundError:
        raise MissingToolError(
            'huggingface_hub, which reads datasets of the Hub, is not installed; pip install "vlp-flows[train]"'
        ) from None
    logging.set_verbosity_error()  # it warns if a pattern matches no file
    return huggingface_hub


@contextmanager
def _hub_errors(name: str, dataset: HubDataset) -> Iterator[None]:
    """Turn what huggingface_hub raises into a sentence with the repository, the revision and the way out.

    No message of the Hub is shown: it may hold a signed address.
    """
    from huggingface_hub import constants, errors

    where = f"data.{name}: {dataset.root}"
    page = f"{constants.ENDPOINT}/datasets/{dataset.repo}"
    token = "set HF_TOKEN to a token that may read it, or run `hf auth login`"
    try:
        yield
    except errors.GatedRepoError:
        raise DataError(f"{where}: the dataset is gated; accept its terms at {page}, and {token}") from None
    except errors.RepositoryNotFoundError:
        raise DataError(
            f"{where}: no such dataset at {constants.ENDPOINT}, or it is private; correct the name, or {token}"
        ) from None
    except errors.RevisionNotFoundError:
        missing = f"revision {dataset.revision}" if dataset.revision else "commit"
        raise DataError(f"{where}: the dataset has no {missing}; see {page}/commits/main") from None
    except errors.HFValidationError as error:
        raise DataError(f"{where}: not a valid name ({first_line(error)})") from None
    except (errors.LocalEntryNotFoundError, errors.CachedRepoTreeNotFoundError, errors.OfflineModeIsEnabled) as error:
        raise DataError(f"{where}: {_explain_offline(dataset, error)}") from None
    except errors.HfHubHTTPError as error:
        code = error.response.status_code
        way_out = token if code in (401, 403) else "run the same command again; what is downloaded is kept"
        raise DataError(f"{where}: {constants.ENDPOINT} answered with the status {code}; {way_out}") from None
    except Exception as error:
        # the client's HTTP library; an OSError with a number is the disk's
        is_network = type(error).__module__.startswith("httpx")
        if not is_network and not (isinstance(error, OSError) and error.errno is None):
            raise
        raise DataError(f"{where}: {_explain_offline(dataset, error)}") from None


def _explain_offline(dataset: HubDataset, error: Exception) -> str:
    from huggingface_hub import constants

    if constants.is_offline_mode():
        name = next((n for n in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE") if os.environ.get(n)), "HF_HUB_OFFLINE")
        reason, way_out = f"{name} is set", f"unset {name}"
    else:
        server = constants.ENDPOINT + " (by HF_ENDPOINT)" * bool(os.environ.get("HF_ENDPOINT"))
        words = network_reason(error)
        reason = f"{server} cannot be reached" + f" ({words})" * bool(words)
        way_out = "run again where there is a network"
    if not dataset.is_pinned:
        return f"{reason}, so its commit is unknown; {way_out}, or name the commit: {PREFIX}{dataset.repo}@COMMIT"
    return (
        f"not complete in the cache {constants.HF_HUB_CACHE}, and {reason}; {way_out}, or set HF_HOME to a cache that "
        f"has it: `hf download {dataset.repo} --repo-type dataset --revision {dataset.revision}` fills one"
    )
