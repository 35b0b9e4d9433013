"""Run bundles: what a figure was measured on and with, in one file that anybody can check.

A bundle is a zip archive of

    bundle.json                  what is below, the weights' hashes, the environment, SHA-256 of every other file
    lineage.json                 commit, hashes of data and lock files, params, parents (pipeline/lineage.py)
    params.yaml, dvc.lock
    scores.json, items.parquet, predictions-<split>.jsonl    of the evaluated run
    checkpoints/, data/          optional: weights and test data to predict with (standalone.py)

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
import re
import stat
import zipfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

from vlp_models.common.io import is_line, read_zip_member
from vlp_models.errors import DataError, MissingToolError, first_line
from vlp_models.params import Params
from vlp_models.params.load import read_plain
from vlp_models.params.runs import NAME

FORMAT = "vlp-run/1"
MANIFEST, LINEAGE, PARAMS, SCORES, ITEMS = "bundle.json", "lineage.json", "params.yaml", "scores.json", "items.parquet"
REQUIRED = {MANIFEST, LINEAGE, PARAMS, SCORES, ITEMS}
# dvc.lock, or predictions-SPLIT.jsonl where SPLIT has letters, digits, `_`, `.` and `-`: no path separator; and a
# standalone bundle's files in three folders: no path leads out of them, and none is code or a pickle.
OTHERS = re.compile(
    r"dvc\.lock|predictions-[\w.-]+\.jsonl"
    r"|(checkpoints/finetune/\w[\w.-]*|data/shards|data/validated)/\w[\w.-]*\.(json|jsonl|txt|parquet|safetensors|tar\.xz)"
)
SUFFIX = ".run.zip"
MAX_BYTES = 1 << 30  # of the file, and unpacked
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
        return hashlib.sha256(self.files[MANIFEST]).hexdigest()[:16]

    @property
    def run(self) -> str:
        return str(self.manifest["run"])

    @property
    def task(self) -> str:
        return str(self.manifest["task"])

    @property
    def is_standalone(self) -> bool:
        """Whether it has weights and test data to predict with."""
        return any(name.startswith("checkpoints/") for name in self.files)

    def json(self, name: str) -> Any:
        return parse_json(self.files[name])

    def params(self) -> Any:
        """Return params.yaml as plain data."""
        return read_plain(self.files[PARAMS].decode("utf-8"), Path(PARAMS))


def short_commit(commit: str) -> str:
    """Return the first characters of a commit, with `+changes` if it has that."""
    name, plus, changes = commit.partition("+")
    return f"{name[:12]}{plus}{changes}"


def open_bundle(path: Path) -> RunBundle:
    """Open a bundle.

    Raises:
        DataError: it does not exist, is no bundle, is none that `pack` writes, or a byte of it has changed.
    """
    try:
        if path.stat().st_size > MAX_BYTES:
            raise DataError(f"{path}: has more than {MAX_BYTES:,} bytes")
        # Read once and check the same bytes that are unpacked, so the file cannot change in between.
        content = path.read_bytes()
        with zipfile.ZipFile(io.BytesIO(content)) as archive:
            _check_members(archive)
            files = {member.filename: read_zip_member(archive, member) for member in archive.infolist()}
        manifest = parse_json(files[MANIFEST])
        if manifest["format"] != FORMAT:
            raise DataError(f"{path}: a bundle of format {manifest['format']!r}; this release reads {FORMAT}")
        # The manifest cannot list its own hash; the digest at the end of the archive covers it.
        hashes = {name: hashlib.sha256(data).hexdigest() for name, data in files.items() if name != MANIFEST}
        # The last 64 bytes are the comment: the hash is of all bytes before.
        digest = hashlib.sha256(content[:-DIGEST]).hexdigest().encode()
        unchanged = manifest["files"] == hashes and digest == content[-DIGEST:]
        check_manifest(manifest, files)
    except FileNotFoundError:
        raise DataError(f"{path}: no such file") from None
    except DataError:
        raise
    except Exception as error:  # what a damaged archive raises depends on where it is damaged
        raise DataError(f"{path}: not a run bundle, or damaged: {error}") from None
    if not unchanged:
        raise DataError(f"{path}: changed since it was packed; nothing in it can be trusted")
    return RunBundle(path=path, manifest=manifest, files=files)


def _check_members(archive: zipfile.ZipFile) -> None:
    """Refuse archives that are too large, or that have other members than a bundle: paths, links, repeated names."""
    members = archive.infolist()
    # Checked before anything is unpacked: a small archive may expand to terabytes.
    if (size := sum(member.file_size for member in members)) > MAX_BYTES:
        raise ValueError(f"unpacks to {size:,} bytes, more than {MAX_BYTES:,}")
    names = {member.filename for member in members}
    # Of two members with one name, tools differ in which they read.
    if len(names) < len(members):
        raise ValueError("two members have the same name")
    for member in members:
        if member.filename not in REQUIRED and not OTHERS.fullmatch(member.filename):
            raise ValueError(f"{member.filename!r}: not a file of a bundle")
        # The upper 16 bits of `external_attr` are the Unix mode, whose file type may be a symbolic link.
        if stat.S_ISLNK(member.external_attr >> 16):
            raise ValueError(f"{member.filename} is a link")
    if missing := REQUIRED - names:
        raise ValueError(f"{', '.join(sorted(missing))} missing")


def check_manifest(manifest: Mapping[str, Any], files: Mapping[str, bytes]) -> None:
    """Check a bundle's manifest, and that its files are of one run.

    Raises:
        ValueError: a value is missing or invalid, or two files contradict each other.
    """
    for name in ("run", "task", "model", "git_commit"):
        if not is_line(manifest.get(name)):
            raise ValueError(f"{MANIFEST}: {name} is not a text of one line")
    if not NAME.fullmatch(manifest["run"]):
        raise ValueError(f"{MANIFEST}: run is not a name: {manifest['run']!r}")
    if not _is_count(manifest.get("bootstrap")) or manifest["bootstrap"] > MAX_RESAMPLES:
        raise ValueError(f"{MANIFEST}: bootstrap is not a number from 0 to {MAX_RESAMPLES:,}")
    for name in ("environment", "weights"):
        values = manifest.get(name)
        # `item` is a (name, text) pair: both must be one line of text, since they are printed.
        if not isinstance(values, dict) or not all(is_line(text) for item in values.items() for text in item):
            raise ValueError(f"{MANIFEST}: {name} does not map names to texts")
    if "mode" not in manifest["environment"]:
        raise ValueError(f"{MANIFEST} has no environment.mode")
    if not any(name.startswith(f"checkpoints/finetune/{manifest['run']}/") for name in manifest["weights"]):
        raise ValueError(f"{MANIFEST}: weights has none of the run")
    records = parse_json(files[SCORES])
    if not isinstance(records, list) or not records or not all(isinstance(r, dict) and _is_score(r) for r in records):
        raise ValueError(f"{SCORES} is not a list of scores")
    # One score per dataset, split and metric: a replay looks scores up by these three.
    if len({(record["dataset"], record["split"], record["metric"]) for record in records}) < len(records):
        raise ValueError(f"{SCORES} has two scores of one metric on one dataset and split")
    _check_same_run(
        manifest, parse_json(files[LINEAGE]), records, read_plain(files[PARAMS].decode("utf-8"), Path(PARAMS))
    )


def _check_same_run(
    manifest: Mapping[str, Any], lineage: Any, records: Sequence[Mapping[str, Any]], params: Any
) -> None:
    """Check that the other files are of the manifest's run. Only the scores may be of an earlier commit."""
    # params.yaml may leave a key out: then its default is in the lineage, which has all values.
    run, defaults = params["finetune"][manifest["run"]], (params.get("defaults") or {}).get("finetune") or {}
    evaluate = {**lineage["params"]["evaluate"], **(params.get("evaluate") or {})}
    seed = lineage["params"]["finetune"][manifest["run"]]["seed"]
    values = [
        *((SCORES, name, record.get(name)) for record in records for name in ("run", "task", "model", "seed")),
        *((LINEAGE, name, lineage.get(name)) for name in ("run", "task", "model", "seed", "git_commit")),
        (LINEAGE, "bootstrap", lineage["params"]["evaluate"]["bootstrap"]),
        (PARAMS, "bootstrap", evaluate["bootstrap"]),
        (PARAMS, "task", run["task"]),
        (PARAMS, "seed", run.get("seed", defaults.get("seed", seed))),
    ]
    for file, name, value in values:
        if value != manifest.get(name):
            raise ValueError(f"{name} is {manifest.get(name)!r} in {MANIFEST}, but {value!r} in {file}")


def parse_json(content: bytes) -> Any:
    """Parse JSON that every reader reads alike: UTF-8, and no object has a key twice (ValueError)."""

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        # `dict` keeps the last of two equal keys, other readers the first: such a file would mean two things.
        if len(dict(pairs)) < len(pairs):
            raise ValueError("a JSON object has a key twice")
        return dict(pairs)

    return json.loads(content.decode("utf-8"), object_pairs_hook=unique)


def _is_score(record: Mapping[str, Any]) -> bool:
    """Return whether a record has the keys that a replay reads, with values of their types."""
    # Missing ends become "", which is neither None nor a number: the keys must exist, but their value may be null.
    ends = [record.get(name, "") for name in ("value", "low", "high")]
    texts = [record.get(name) for name in ("dataset", "split", "metric", "data", "git")]
    numbers = all(end is None or (type(end) in (int, float) and math.isfinite(end)) for end in ends)
    return numbers and all(map(_is_count, (record.get("seed"), record.get("n")))) and all(map(is_line, texts))


def _is_count(value: Any) -> bool:
    return type(value) is int and value >= 0  # not bool


def archive_bytes(files: Mapping[str, bytes]) -> bytes:
    """Return the archive of these files, sorted and without times or modes, with the hash of itself at its end."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        for name, content in sorted(files.items()):
            # Sorted names, one fixed time and no modes: the same files give the same bytes, and so the same hash.
            archive.writestr(zipfile.ZipInfo(name, _TIME), content, zipfile.ZIP_DEFLATED)
        # Reserve the comment with zero bytes: zip puts it at the very end, where the digest replaces it.
        archive.comment = bytes(DIGEST)
    content = buffer.getvalue()[:-DIGEST]
    return content + hashlib.sha256(content).hexdigest().encode()


def environment(params: Params) -> dict[str, str]:
    """Return what digits may depend on: versions, the processor, the trainer's mode."""
    processor = platform.machine()
    with suppress(OSError):  # only Linux has the file
        # Blocks of `name : value` lines, one per processor, separated by empty lines: the first one is enough.
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").split("\n\n")[0].splitlines()
        fields = {name.strip(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
        model = fields.get("model name", processor)
        processor = f"{model} (family {fields.get('cpu family')}, model {fields.get('model')})"
    return {
        "torch": metadata.version("torch"),
        "numpy": metadata.version("numpy"),
        "python": platform.python_version(),
        "processor": processor,
        "mode": params.trainer.reproducible,
    }


# ---- Signatures ------------------------------------------------------------------------------------------------------


KEYS = "an elliptic-curve key of P-256, P-384 or P-521 (PEM, without a password)"


def load_signer(key: Path) -> Any:
    """Return what signs with a private key, by model-signing.

    Raises:
        MissingToolError: model-signing or what it needs is not installed.
        DataError: the key cannot be used.
    """
    signing, _ = _import_signing()
    try:
        return signing.Config().use_elliptic_key_signer(private_key=key)
    except FileNotFoundError:
        raise DataError(f"{key}: no such file") from None
    except Exception as error:  # of the library, for each kind of key another
        raise DataError(f"{key}: cannot sign with it ({first_line(error)}); a private key must be {KEYS}") from None


def sign(path: Path, signer: Any) -> Path:
    """Sign a bundle with a signer of `load_signer`; return the signature's path."""
    signature = path.with_name(path.name + ".sig")
    signer.sign(path, signature)
    return signature


def check_signature(path: Path, public_key: Path) -> None:
    """Check the signature next to a bundle.

    Raises:
        MissingToolError: model-signing or what it needs is not installed.
        DataError: the key cannot be used; the signature is missing, or not of this bundle by this key.
    """
    _, verifying = _import_signing()
    try:
        verifier = verifying.Config().use_elliptic_key_verifier(public_key=public_key)
    except FileNotFoundError:
        raise DataError(f"{public_key}: no such file") from None
    except Exception as error:  # see load_signer
        raise DataError(
            f"{public_key}: cannot check a signature with it ({first_line(error)}); a public key must be {KEYS}"
        ) from None
    signature = path.with_name(path.name + ".sig")
    if not signature.is_file():
        raise DataError(f"{signature}: no such file; the bundle is not signed")
    try:
        verifier.verify(path, signature)
    except Exception as error:
        raise DataError(f"{path}: not signed by {public_key}: {error}") from None


def _import_signing() -> tuple[Any, Any]:
    try:
        from model_signing import signing, verifying
    except ModuleNotFoundError as error:  # model-signing 1.1 imports OpenSSL and does not declare it
        command = "pip install model-signing pyopenssl"
        raise MissingToolError(f"signatures need the Python module {error.name}: {command}") from None
    return signing, verifying
