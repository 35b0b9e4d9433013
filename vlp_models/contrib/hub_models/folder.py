"""The files of another model: a folder in Hugging Face's or open_clip's layout, `package:NAME`, or a name on the Hub.

    models/siglip                       a folder, relative to the project
    package:NAME                        a folder in an installed package
    hf://OWNER/NAME@COMMIT              a repository of the Hub; `vlp use` writes the commit that a branch is at

Files of the Hub stay in its cache (HF_HOME), so what is computed depends on params.yaml alone. JSON files and
safetensors are downloaded, never code or pickles, and each file is compared with the hash that the Hub lists for it.
"""

from __future__ import annotations

import fnmatch
import hashlib
import json
import os
import re
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vlp_models.common.io import hash_file
from vlp_models.common.packages import PREFIX as PACKAGE
from vlp_models.data.bert_folder import find_folder as find_local
from vlp_models.errors import (
    CheckpointError,
    DataError,
    MissingToolError,
    ParamsError,
    first_line,
    network_reason,
    shorten_list,
)

if TYPE_CHECKING:
    from torch import Tensor

HUB = "hf://"
CONFIG, PREPROCESSOR, PROCESSOR = "config.json", "preprocessor_config.json", "processor_config.json"
OPEN_CLIP = "open_clip_config.json"
WEIGHTS = ("model.safetensors", "open_clip_model.safetensors")
INDEX = "model.safetensors.index.json"  # of weights in several files
SHARDS = "model-*.safetensors"
SETTINGS = (
    *(CONFIG, PREPROCESSOR, PROCESSOR, OPEN_CLIP, "generation_config.json"),
    *("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "vocab.txt"),
)
MAX_SETTINGS, MAX_WEIGHTS = 2**27, 2**35  # bytes of a JSON file (Gemma's tokenizer has 34 MB), and of all weights
CHUNK = 2**20
_COMMIT = re.compile(r"[0-9a-f]{40}")  # a full SHA-1 of git
_PART = r"[A-Za-z0-9][\w.-]*"
_NAME = re.compile(rf"hf://(?P<repo>{_PART}/{_PART})(?:@(?P<revision>[^/@]+))?")


@dataclass(frozen=True)
class HubModel:
    """A model of the Hub. revision: a commit, branch or tag, "": the default branch."""

    repo: str
    revision: str = ""

    @property
    def source(self) -> str:
        return f"{HUB}{self.repo}" + f"@{self.revision}" * bool(self.revision)

    @property
    def is_pinned(self) -> bool:
        return _COMMIT.fullmatch(self.revision) is not None


def parse(source: str, where: str) -> HubModel:
    """Return the parts of `hf://OWNER/NAME[@REVISION]`.

    Args:
        where: its key in params.yaml, for messages.

    Raises:
        ParamsError: it has another form.
    """
    match = _NAME.fullmatch(source)
    if not match:
        raise ParamsError(f"params.yaml: `{where}: {source}`: write it as hf://OWNER/NAME@COMMIT")
    return HubModel(match["repo"], match["revision"] or "")


def pin(source: str, where: str) -> str:
    """Return a source with the commit that its branch or tag is at now; unchanged if it is not on the Hub or has one.

    Raises:
        ParamsError: it is malformed.
        DataError: no such repository or revision, no access, or no network.
    """
    if not source.startswith(HUB) or (model := parse(source, where)).is_pinned:
        return source
    hub = _import_hub()
    with _hub_errors(model, where):
        commit = hub.HfApi().model_info(model.repo, revision=model.revision or None).sha
    return HubModel(model.repo, commit).source


def find_folder(source: str, root: Path, where: str, *, weights: bool = False) -> Path:
    """Return the folder of a model; that of the Hub is downloaded, unless its cache has it.

    Args:
        source: a folder relative to `root`, `package:NAME` or `hf://OWNER/NAME@COMMIT`.
        where: its key in params.yaml, for messages.
        weights: download the weights, too; otherwise the settings alone, some megabytes at most.

    Raises:
        ParamsError: the name on the Hub is malformed, or has no commit.
        DataError: no such folder or repository, no access, no network, or a file that is too large or damaged.
        MissingToolError: the package is not installed.
    """
    if source.startswith(HUB):
        return _download(parse(source, where), where, weights=weights)
    if not source.startswith(PACKAGE) and not (root / source).is_dir():
        raise DataError(
            f"params.yaml: `{where}: {source}`: no such folder; it should hold a model's {CONFIG} and {WEIGHTS[0]}; "
            "copy them there, or name the model on the Hub: hf://OWNER/NAME"
        )
    return find_local(source, root, where)


def _download(model: HubModel, where: str, *, weights: bool) -> Path:
    """Download settings, and the weights if they are needed, into the Hub's cache; return the folder."""
    if not model.is_pinned:
        reason = f"`{model.revision}` is not a commit and may move" if model.revision else "it names no commit"
        raise ParamsError(
            f"params.yaml: `{where}: {model.source}`: {reason}, so results could change; run "
            f"`vlp use --set {where}={model.source}`, which writes the commit"
        )
    hub = _import_hub()
    with _hub_errors(model, where):
        # The settings; this also stores the list of all files, with their sizes and hashes.
        folder = Path(hub.snapshot_download(model.repo, revision=model.revision, allow_patterns=list(SETTINGS)))
        listed = {file.path: file for file in hub.get_cached_repo_tree(model.repo, revision=model.revision)}
        patterns = list(SETTINGS)
        if weights:
            # The first layout that the repository has, so that no weights are downloaded twice.
            layouts = [[WEIGHTS[0]], [INDEX, SHARDS], [WEIGHTS[1]]]
            patterns += next((layout for layout in layouts if layout[0] in listed), [])
        names = [name for name in listed if any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)]
        _check_sizes(model, where, {name: listed[name].size for name in names})
        if weights:
            hub.snapshot_download(model.repo, revision=model.revision, allow_patterns=patterns)
    for name in names:
        _check_hash(model, where, folder / name, listed[name])
    return folder


def _check_sizes(model: HubModel, where: str, sizes: dict[str, int]) -> None:
    for name, size in sizes.items():
        limit = MAX_SETTINGS if name in SETTINGS else MAX_WEIGHTS
        if size > limit:
            raise DataError(f"{where}: {name} of {model.source} has {size:,} bytes, more than the limit of {limit:,}")
    if sum(sizes.values()) > MAX_WEIGHTS + MAX_SETTINGS:
        raise DataError(f"{where}: the weights of {model.source} have more than the limit of {MAX_WEIGHTS:,} bytes")


def _check_hash(model: HubModel, where: str, path: Path, listed: Any) -> None:
    """Compare a file with its entry in the Hub's list of files: a sha256, or git's hash of a small file."""
    # git hashes "blob", the size and the content of a small file
    size = path.stat().st_size
    digest = hashlib.sha256() if listed.lfs else hashlib.sha1(f"blob {size}\0".encode(), usedforsecurity=False)
    with path.open("rb") as file:
        while chunk := file.read(CHUNK):
            digest.update(chunk)
    if digest.hexdigest() != (listed.lfs.sha256 if listed.lfs else listed.blob_id):
        raise DataError(
            f"{where}: {listed.path} of {model.source} does not have the hash that the Hub lists, so it is damaged or "
            f"was changed; delete {path.resolve()} and run again"
        )


def read_settings(folder: Path, name: str = CONFIG) -> dict[str, Any]:
    """Read a JSON file of a model's folder.

    Raises:
        CheckpointError: it is missing, too large, or no JSON object.
    """
    file = folder / name
    if not file.is_file():
        raise CheckpointError(f"{file}: no such file; copy the whole folder of the model")
    if file.stat().st_size > MAX_SETTINGS:
        raise CheckpointError(f"{file}: more than {MAX_SETTINGS:,} bytes; it should be a small JSON file")
    try:
        value = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{file}: not valid JSON: {error}") from None
    if not isinstance(value, dict):
        raise CheckpointError(f"{file}: not a JSON object")
    return value


def read_config(folder: Path, kinds: Collection[str], expected: str) -> dict[str, Any]:
    """Read config.json of a model of transformers.

    Args:
        kinds: the values of `model_type` that can be read; empty: any.
        expected: which models these are, for the message.

    Raises:
        CheckpointError: it is missing or damaged, or describes another architecture.
    """
    config = read_settings(folder)
    kind = config.get("model_type")
    if not isinstance(kind, str) or (kinds and kind not in kinds):
        raise CheckpointError(f"{folder / CONFIG}: `model_type` is {kind!r}; expected {expected}")
    return config


def weights_files(folder: Path) -> list[Path]:
    """Return the safetensors files of a folder, in order.

    Raises:
        CheckpointError: there are none, or one that the index names is missing or outside of the folder.
    """
    for name in WEIGHTS:
        if (folder / name).is_file():
            return [folder / name]
    if (folder / INDEX).is_file():
        shards = read_settings(folder, INDEX).get("weight_map")
        names = sorted({str(name) for name in shards.values()}) if isinstance(shards, dict) else []
        for name in names:
            if not fnmatch.fnmatchcase(name, SHARDS) or Path(name).name != name or not (folder / name).is_file():
                raise CheckpointError(f"{folder / INDEX}: names {name}, which is not in the folder; copy it completely")
        if names:
            return [folder / name for name in names]
    pickles = sorted(path.name for path in folder.glob("*") if path.suffix in (".bin", ".pt", ".pth", ".ckpt", ".pkl"))
    if pickles:
        raise CheckpointError(
            f"{folder / pickles[0]}: a pickle, which can run code when it is read; expected {WEIGHTS[0]}: load the "
            "model where you trust it, and `model.save_pretrained(FOLDER)` writes safetensors"
        )
    raise CheckpointError(f"{folder}: contains no {WEIGHTS[0]}; copy the model's weights there")


def check_weights(source: str, folder: Path, where: str) -> None:
    """Check, before weights are downloaded or read, that there are some that can be.

    Raises:
        CheckpointError: a folder has none, or pickles alone.
        DataError: a repository of the Hub has none.
    """
    if not source.startswith(HUB):
        weights_files(folder)
        return
    model = parse(source, where)
    listed = {file.path for file in _import_hub().get_cached_repo_tree(model.repo, revision=model.revision)}
    if not listed & {*WEIGHTS, INDEX}:
        raise DataError(
            f"params.yaml: `{where}: {source}`: the repository has no {WEIGHTS[0]}, and pickles are not read; choose "
            "another model or revision"
        )


def read_weights(folder: Path) -> dict[str, Tensor]:
    """Read the weights of a folder, in the precision that they have there.

    Raises:
        CheckpointError: they are missing, damaged, or a pickle.
    """
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    weights: dict[str, Tensor] = {}
    for file in weights_files(folder):
        try:
            weights |= load_file(file)
        except (SafetensorError, OSError) as error:
            raise CheckpointError(f"{file}: damaged or not a safetensors file: {first_line(error)}") from None
    return weights


def check_names(weights: Mapping[str, Tensor], state: Mapping[str, Tensor], folder: Path) -> None:
    """Check that weights are those of an architecture.

    Raises:
        CheckpointError: names are missing or unexpected, or shapes differ.
    """
    shapes = [name for name in weights.keys() & state.keys() if weights[name].shape != state[name].shape]
    kinds = {
        "missing": state.keys() - weights.keys(),
        "unexpected": weights.keys() - state.keys(),
        "of another shape": shapes,
    }
    if faults := [f"{len(names)} {kind}: {shorten_list(sorted(names), 4)}" for kind, names in kinds.items() if names]:
        raise CheckpointError(f"{folder}: its weights are not those that its config describes: {'; '.join(faults)}")


def hash_weights(folder: Path) -> dict[str, str]:
    """Return name -> sha256 of the files that hold the weights and the architecture, for a checkpoint's record."""
    names = [name for name in (CONFIG, OPEN_CLIP) if (folder / name).is_file()]
    return {path.name: hash_file(path) for path in (*(folder / name for name in names), *weights_files(folder))}


def _import_hub() -> Any:
    try:
        import huggingface_hub
        from huggingface_hub.utils import logging
    except ModuleNotFoundError:
        raise MissingToolError(
            'huggingface_hub, which reads models of the Hub, is not installed; pip install "vlp-flows[train]"'
        ) from None
    logging.set_verbosity_error()  # it warns if a pattern matches no file
    return huggingface_hub


@contextmanager
def _hub_errors(model: HubModel, where: str) -> Iterator[None]:
    """Turn what huggingface_hub raises into a sentence with the repository and the way out.

    No message of the Hub is shown: it may hold a signed address.
    """
    from huggingface_hub import constants, errors

    named, page = f"params.yaml: `{where}: {model.source}`", f"{constants.ENDPOINT}/{model.repo}"
    token = "set HF_TOKEN to a token that may read it, or run `hf auth login`"
    try:
        yield
    except errors.GatedRepoError:
        raise DataError(f"{named}: the model is gated; accept its terms at {page}, and {token}") from None
    except errors.RepositoryNotFoundError:
        raise DataError(
            f"{named}: no such model at {constants.ENDPOINT}, or it is private; correct the name, or {token}"
        ) from None
    except errors.RevisionNotFoundError:
        raise DataError(f"{named}: the model has no such revision; see {page}/commits/main") from None
    except errors.HfHubHTTPError as error:
        code = error.response.status_code
        way_out = token if code in (401, 403) else "run the same command again; what is downloaded is kept"
        raise DataError(f"{named}: {constants.ENDPOINT} answered with the status {code}; {way_out}") from None
    except Exception as error:
        # A missing cache without a network, or the client's HTTP library; an OSError with a number is the disk's.
        is_network = isinstance(error, errors.LocalEntryNotFoundError | errors.CachedRepoTreeNotFoundError)
        is_network = is_network or type(error).__module__.startswith("httpx")
        if not is_network and not (isinstance(error, OSError) and error.errno is None):
            raise
        switch = next((name for name in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE") if os.environ.get(name)), "")
        reason = f"{switch} is set" if switch else f"{constants.ENDPOINT} cannot be reached"
        words = "" if switch else network_reason(error)
        revision = f" --revision {model.revision}" if model.revision else ""
        raise DataError(
            f"{named}: not complete in the cache {constants.HF_HUB_CACHE}, and {reason}{f' ({words})' * bool(words)}; "
            f"run again where there is a network, or set HF_HOME to a cache that has it: "
            f"`hf download {model.repo}{revision}` fills one"
        ) from None
