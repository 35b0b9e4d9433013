"""Run bundles: what a figure was measured on and with, in one file that anybody can check.

A bundle is a zip archive of

    bundle.json                  what is below, the weights' hashes, the environment, SHA-256 of every other file
    lineage.json                 commit, hashes of data and lock files, params, parents (pipeline/lineage.py)
    params.yaml, dvc.lock
    scores.json, items.parquet, predictions-<split>.jsonl    of the evaluated run

The archive ends with the SHA-256 of all bytes before (as the zip format's comment), so no bit of it changes unnoticed.
Its id is a hash of bundle.json: quote it next to a figure, for another bundle has matching hashes, too. A signature
(`--key`) names its maker.
"""

from __future__ import annotations

import hashlib
import io
import json
import math
import platform
import unicodedata
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

from vlp_models.common.io import atomic_write, hash_file, read_zip_member, to_json
from vlp_models.common.redaction import redact_yaml, redacted
from vlp_models.common.workspace import Workspace, require_output
from vlp_models.errors import DataError, MissingToolError
from vlp_models.params import Params
from vlp_models.params.runs import NAME

FORMAT = "vlp-run/1"
MANIFEST, LINEAGE = "bundle.json", "lineage.json"
SUFFIX = ".run.zip"
EVALUATED = ("scores.json", "items.parquet")
MAX_BYTES = 1 << 30  # unpacked
MAX_RESAMPLES = 1_000_000  # of an interval, which a replay draws again
DIGEST = 64  # bytes of the archive's comment
_TIME = (1980, 1, 1, 0, 0, 0)  # of every member: zip's earliest


@dataclass(frozen=True, kw_only=True)
class RunBundle:
    """An opened bundle, whose files are those that were packed."""

    path: Path
    manifest: Mapping[str, Any]
    files: Mapping[str, bytes]

    @property
    def id(self) -> str:
        return bundle_id(self.files[MANIFEST])

    @property
    def run(self) -> str:
        return str(self.manifest["run"])

    def json(self, name: str) -> Any:
        return json.loads(self.files[name])


def bundle_id(manifest: bytes) -> str:
    return hashlib.sha256(manifest).hexdigest()[:16]


def pack(params: Params, workspace: Workspace, run: str, path: Path) -> RunBundle:
    """Write the bundle of an evaluated fine-tuning run.

    Raises:
        DataError: the run was not evaluated, or with more than `MAX_RESAMPLES`.
    """
    from vlp_models.pipeline.lineage import lineage_files, lineage_record

    if params.evaluate.bootstrap > MAX_RESAMPLES:
        raise DataError(f"params.yaml: `evaluate.bootstrap`: a run bundle may have {MAX_RESAMPLES:,} at most")
    evaluated = require_output(workspace.evaluation(run) / EVALUATED[0], f"evaluate@{run}").parent
    names = [*EVALUATED, *sorted(file.name for file in evaluated.glob("predictions-*.jsonl"))]
    files = {name: (evaluated / name).read_bytes() for name in names}
    for name, text in lineage_files(workspace).items():
        if name != "requirements.lock":  # long; its hash is in the lineage, and the commit has it
            files[name] = redact_yaml(text).encode()
    lineage = redacted(lineage_record(params, workspace, run))
    files[LINEAGE] = to_json(lineage).encode()
    manifest = {
        "format": FORMAT,
        "run": run,
        "task": lineage["task"],
        "model": lineage["model"],
        "seed": lineage["seed"],
        "git_commit": lineage["git_commit"],
        "environment": environment(params),
        "bootstrap": params.evaluate.bootstrap,
        "weights": hash_weights(params, workspace, run),
        "files": {name: hashlib.sha256(content).hexdigest() for name, content in sorted(files.items())},
    }
    files[MANIFEST] = to_json(manifest).encode()
    path.parent.mkdir(parents=True, exist_ok=True)
    with atomic_write(path) as temporary:
        temporary.write_bytes(_archive(files))
    return RunBundle(path=path, manifest=manifest, files=files)


def open_bundle(path: Path) -> RunBundle:
    """Open a bundle.

    Raises:
        DataError: it does not exist, is no bundle, or a byte of it has changed.
    """
    try:
        content = path.read_bytes()
        with zipfile.ZipFile(io.BytesIO(content)) as archive:
            size = sum(member.file_size for member in archive.infolist())
            if size > MAX_BYTES:
                raise DataError(f"{path}: unpacks to {size:,} bytes, more than {MAX_BYTES:,}")
            files = {member.filename: read_zip_member(archive, member) for member in archive.infolist()}
        manifest = json.loads(files[MANIFEST])
        if manifest["format"] != FORMAT:
            raise DataError(f"{path}: a bundle of format {manifest['format']!r}; this release reads {FORMAT}")
        hashes = {name: hashlib.sha256(own).hexdigest() for name, own in files.items() if name != MANIFEST}
        digest = hashlib.sha256(content[:-DIGEST]).hexdigest().encode()
        same = manifest["files"] == hashes and digest == content[-DIGEST:]
        _check_manifest(manifest, files)
    except FileNotFoundError:
        raise DataError(f"{path}: no such file") from None
    except DataError:
        raise
    except Exception as error:  # what a damaged archive raises depends on where it is damaged
        raise DataError(f"{path}: not a run bundle, or damaged: {error}") from None
    if not same:
        raise DataError(f"{path}: changed since it was packed; nothing in it can be trusted")
    return RunBundle(path=path, manifest=manifest, files=files)


def _check_manifest(manifest: Mapping[str, Any], files: Mapping[str, bytes]) -> None:
    """
    Raises:
        ValueError: a key or a file is missing, or a value is invalid.
    """
    for name in ("run", "task", "git_commit"):
        if not _is_line(manifest.get(name)):
            raise ValueError(f"{MANIFEST}: {name} is not a text of one line")
    if not NAME.fullmatch(manifest["run"]):
        raise ValueError(f"{MANIFEST}: run is not a name: {manifest['run']!r}")
    if not _is_count(manifest.get("bootstrap")) or manifest["bootstrap"] > MAX_RESAMPLES:
        raise ValueError(f"{MANIFEST}: bootstrap is not a number from 0 to {MAX_RESAMPLES:,}")
    for name in ("environment", "weights"):
        values = manifest.get(name)
        if not isinstance(values, dict) or not all(_is_line(text) for item in values.items() for text in item):
            raise ValueError(f"{MANIFEST}: {name} does not map names to texts")
    if missing := {*EVALUATED, LINEAGE, "params.yaml"} - set(files):
        raise ValueError(f"{', '.join(sorted(missing))} missing")
    if "mode" not in manifest["environment"]:
        raise ValueError(f"{MANIFEST} has no environment.mode")
    records = json.loads(files[EVALUATED[0]])
    if not isinstance(records, list) or not records or not all(isinstance(r, dict) and _is_score(r) for r in records):
        raise ValueError(f"{EVALUATED[0]} is not a list of scores")


def _is_score(record: Mapping[str, Any]) -> bool:
    """Return whether a record has the keys that a replay reads, with values of their types."""
    ends = [record.get(name, "") for name in ("value", "low", "high")]
    texts = [record.get(name) for name in ("dataset", "split", "metric", "data")]
    numbers = all(end is None or (type(end) in (int, float) and math.isfinite(end)) for end in ends)
    return numbers and _is_count(record.get("seed")) and all(_is_line(text) for text in texts)


def _is_count(value: Any) -> bool:
    return type(value) is int and value >= 0  # not bool


def _is_line(value: Any) -> bool:
    """Return whether a value is a text without control characters, which a terminal would obey."""
    return isinstance(value, str) and not any(unicodedata.category(character) == "Cc" for character in value)


def _archive(files: Mapping[str, bytes]) -> bytes:
    """Return the archive of these files, sorted and without times or modes, with the hash of itself at its end."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        for name, content in sorted(files.items()):
            archive.writestr(zipfile.ZipInfo(name, _TIME), content, zipfile.ZIP_DEFLATED)
        archive.comment = bytes(DIGEST)
    content = buffer.getvalue()[:-DIGEST]
    return content + hashlib.sha256(content).hexdigest().encode()


def environment(params: Params) -> dict[str, str]:
    """Return what digits may depend on."""
    found = {name: metadata.version(name) for name in ("torch", "numpy")}
    return {**found, "python": platform.python_version(), "processor": processor(), "mode": params.trainer.reproducible}


def processor() -> str:
    """Return the processor's name and kind."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").split("\n\n")[0].splitlines()
    except OSError:
        return platform.machine()
    fields = {name.strip(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
    name = fields.get("model name", platform.machine())
    return f"{name} (family {fields.get('cpu family')}, model {fields.get('model')})"


def hash_weights(params: Params, workspace: Workspace, run: str) -> dict[str, str]:
    """Return file -> SHA-256 of the run's weights and of all that they start from, its detector included."""
    folders, start = [], f"finetune/{run}"
    while start:
        folders.append(workspace.checkpoint(start))
        kind, _, name = start.partition("/")
        if kind == "finetune":
            start = params.finetune[name].start
        elif kind == "pretrain":
            start = params.pretrain[name].start or f"initial/{params.pretrain[name].model}"
        else:
            start = ""
    files = [file for folder in (workspace.detector, *folders) for file in sorted(folder.glob("*.safetensors"))]
    return {workspace.relative(file): hash_file(file) for file in files}


# ---- Signatures ------------------------------------------------------------------------------------------------------


def sign(path: Path, key: Path) -> Path:
    """Sign a bundle with a private key (PEM, elliptic curve), by model-signing; return the signature's path.

    Raises:
        MissingToolError: model-signing is not installed.
        DataError: the key cannot be read.
    """
    try:
        from model_signing import signing
    except ModuleNotFoundError:
        raise MissingToolError("signing needs model-signing: pip install model-signing") from None
    signature = path.with_name(path.name + ".sig")
    try:
        signing.Config().use_elliptic_key_signer(private_key=key).sign(path, signature)
    except Exception as error:  # of OpenSSL, or of the library
        raise DataError(f"{key}: cannot sign with it: {error}") from None
    return signature


def check_signature(path: Path, public_key: Path) -> None:
    """Check the signature next to a bundle.

    Raises:
        MissingToolError: model-signing is not installed.
        DataError: it is missing, or not of this bundle by this key.
    """
    try:
        from model_signing import verifying
    except ModuleNotFoundError:
        raise MissingToolError("checking a signature needs model-signing: pip install model-signing") from None
    signature = path.with_name(path.name + ".sig")
    if not signature.is_file():
        raise DataError(f"{signature}: no such file; the bundle is not signed")
    try:
        verifying.Config().use_elliptic_key_verifier(public_key=public_key).verify(path, signature)
    except Exception as error:
        raise DataError(f"{path}: not signed by {public_key}: {error}") from None
