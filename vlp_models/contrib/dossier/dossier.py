"""Write the files of a dossier, and compare a written one with what the records say now."""

from __future__ import annotations

import difflib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vlp_models.common.io import output_directory, read_json
from vlp_models.contrib.dossier.bom import write_bom
from vlp_models.contrib.dossier.documentation import find_gaps, write_documentation
from vlp_models.contrib.dossier.facts import gather
from vlp_models.contrib.dossier.provenance import open_envelope, sign, to_bytes, write_statement
from vlp_models.errors import DataError
from vlp_models.params import Params
from vlp_models.registry.evaluations import CURRENT_EVALUATION
from vlp_models.registry.promotion.ledger import Ledger
from vlp_models.registry.versions import resolve_version

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from mlflow.entities.model_registry import ModelVersion

FORMAT = "vlp-dossier/1"
INDEX, DOCUMENTATION, BOM = "dossier.json", "documentation.md", "bom.cdx.json"
STATEMENT, ENVELOPE = "provenance.json", "provenance.dsse.json"


@dataclass(frozen=True, kw_only=True)
class Compared:
    """A file of a dossier against the records. differs: how; empty: it does not."""

    file: str
    differs: str = ""


def write_dossier(
    client: MlflowClient, params: Params, root: Path, version: ModelVersion, folder: Path, key: Path | None
) -> list[str]:
    """Write the dossier of a version, in place of an earlier one; return the numbers of the documentation's gaps.

    Args:
        key: an Ed25519 private key that signs the provenance; None: it is not signed.

    Raises:
        DataError: the folder has something else, a record is missing or damaged, dossier.yaml has an unknown item, or
            the key cannot sign.
    """
    if folder.exists() and not (folder / INDEX).exists():
        raise DataError(f"{folder}: exists, and is no dossier; name another folder with --out")
    lines = len(Ledger(root / params.promotion.ledger).entries())
    files, gaps = _make_files(client, params, root, version, lines)
    if key is not None:
        files[ENVELOPE] = to_bytes(sign(files[STATEMENT], key))
    index = {
        "format": FORMAT,
        "version": f"{version.name}/{version.version}",
        "ledger_lines": lines,
        "evaluation": version.tags.get(CURRENT_EVALUATION, ""),
        "gaps": gaps,
    }
    with output_directory(folder) as partial:
        for name, content in {**files, INDEX: to_bytes(index)}.items():
            (partial / name).write_bytes(content)
    return gaps


def _make_files(
    client: MlflowClient, params: Params, root: Path, version: ModelVersion, lines: int
) -> tuple[dict[str, bytes], list[str]]:
    facts = gather(client, params, root, version, lines)
    files = {
        DOCUMENTATION: write_documentation(facts).encode(),
        BOM: to_bytes(write_bom(facts)),
        STATEMENT: to_bytes(write_statement(facts)),
    }
    return files, find_gaps(facts)


def check_dossier(
    client: MlflowClient, params: Params, root: Path, folder: Path, public_key: Path | None
) -> list[Compared]:
    """Make every file again from the records, and compare; check the signature.

    The ledger counts as far as it went when the dossier was written.

    Raises:
        DataError: the folder is no dossier, or the version is not registered any more.
    """
    index = _read_index(folder)
    version = resolve_version(client, params.tracking, index["version"])
    files, _ = _make_files(client, params, root, version, index["ledger_lines"])
    compared = [_compare(folder, name, content) for name, content in files.items()]
    if index["evaluation"] != version.tags.get(CURRENT_EVALUATION, ""):
        compared.append(Compared(file=INDEX, differs="the version was evaluated on another test since"))
    if public_key is not None:
        compared.append(_check_signature(folder, public_key))
    return compared


def _read_index(folder: Path) -> dict[str, Any]:
    if not (folder / INDEX).exists():
        raise DataError(f"{folder}: not a dossier, since it has no {INDEX}; `vlp dossier TASK` writes one")
    try:
        index = read_json(folder / INDEX)
        if index["format"] != FORMAT or not isinstance(index["ledger_lines"], int):
            raise ValueError(f"format {index['format']!r}, expected {FORMAT!r}")
        return {"version": str(index["version"]), **{name: index[name] for name in ("ledger_lines", "evaluation")}}
    except (KeyError, ValueError, TypeError) as error:
        raise DataError(f"{folder / INDEX}: not the index of a dossier ({error})") from None


def _compare(folder: Path, name: str, content: bytes) -> Compared:
    try:
        written = (folder / name).read_bytes()
    except OSError:
        return Compared(file=name, differs="missing")
    if written == content:
        return Compared(file=name)
    before, now = (text.decode("utf-8", errors="replace").splitlines() for text in (written, content))
    # Its first lines are headers.
    difference = list(difflib.unified_diff(before, now, n=0, lineterm=""))[2:]
    lines = [line for line in difference if not line.startswith("@@")]
    return Compared(file=name, differs="; ".join(line[:160] for line in lines[:2]) or "other line ends")


def _check_signature(folder: Path, public_key: Path) -> Compared:
    if not (folder / ENVELOPE).exists():
        return Compared(file=ENVELOPE, differs="missing: the dossier was written without --key")
    try:
        statement = open_envelope(json.loads((folder / ENVELOPE).read_text(encoding="utf-8")), public_key)
        is_same = statement == (folder / STATEMENT).read_bytes()
    except (DataError, OSError, ValueError, RecursionError) as error:
        return Compared(file=ENVELOPE, differs=str(error))
    return Compared(file=ENVELOPE, differs="" if is_same else f"it contains another statement than {STATEMENT}")
