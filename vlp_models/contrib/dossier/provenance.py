"""An in-toto statement with SLSA's provenance: which files were built from what, by which commands. Signed as DSSE.

Formats: in-toto Attestation v1 with the predicate https://slsa.dev/provenance/v1; DSSE v1 with an Ed25519 signature.
"""

from __future__ import annotations

import base64
import hashlib
import json
from pathlib import Path
from typing import Any

from vlp_models.contrib.dossier.facts import Facts
from vlp_models.errors import DataError

PAYLOAD_TYPE = "application/vnd.in-toto+json"
BUILD_TYPE = "urn:vlp-flows:dvc-repro:1"  # `dvc repro TARGET` in a project with these params
BUILDER = "urn:vlp-flows:project"
# Sections of params.yaml that no trained file depends on; they name servers, accounts and folders.
OPERATIONS = ("cluster", "drift", "flow", "ingest", "launchers", "retention", "tracking")


def write_statement(facts: Facts) -> dict[str, Any]:
    """Return the statement about the version's files."""
    lineage = facts.lineage
    # dvc.lock has all outputs of the project: reports, and checkpoints of other runs, were not needed.
    parents = {parent.get("path") for parent in lineage["parents"]}
    needed = [path for path in sorted(lineage["dvc"]) if path.startswith("data/") or path in parents]
    dependencies = [{"uri": f"dvc:{path}", "digest": _digest(lineage["dvc"][path])} for path in needed]
    dependencies += [{"uri": f"file:{name}", "digest": {"sha256": text}} for name, text in lineage["locks"].items()]
    commit, changed, _ = lineage["git_commit"].partition("+")
    if commit != "unknown":
        # A working tree with changes is not the commit alone; the changes are not recorded.
        dependencies.append({"uri": f"git:{commit}{changed and '+changes'}", "digest": {"gitCommit": commit}})
    params = {name: section for name, section in lineage["params"].items() if name not in OPERATIONS}
    run = facts.tags.get("trained_in")
    return {
        "_type": "https://in-toto.io/Statement/v1",
        "subject": [{"name": name, "digest": {"sha256": digest}} for name, digest in facts.files.items()],
        "predicateType": "https://slsa.dev/provenance/v1",
        "predicate": {
            "buildDefinition": {
                "buildType": BUILD_TYPE,
                "externalParameters": {"target": lineage["target"], "params": params},
                "resolvedDependencies": [entry for entry in dependencies if entry["digest"]],
            },
            "runDetails": {"builder": {"id": BUILDER}, **({"metadata": {"invocationId": run}} if run else {})},
        },
    }


def _digest(text: Any) -> dict[str, str]:
    """Return the digest of an output in DVC's cache; a folder's md5 is that of its list of files."""
    md5 = str(text or "")
    return {"dvcDirectoryMd5": md5.removesuffix(".dir")} if md5.endswith(".dir") else {"md5": md5} if md5 else {}


def sign(statement: bytes, key_file: Path) -> dict[str, Any]:
    """Return the statement in an envelope with its signature.

    Args:
        key_file: an Ed25519 private key in PEM, without a passphrase.

    Raises:
        DataError: it is not such a key.
    """
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
    from cryptography.hazmat.primitives.serialization import load_pem_private_key

    try:
        key = load_pem_private_key(key_file.read_bytes(), password=None)
    except (OSError, ValueError, TypeError) as error:
        raise DataError(f"{key_file}: not a private key in PEM without a passphrase ({error})") from None
    if not isinstance(key, Ed25519PrivateKey):
        raise DataError(f"{key_file}: not an Ed25519 key; make one with `openssl genpkey -algorithm ed25519`")
    signature = key.sign(_encoded(statement))
    return {
        "payloadType": PAYLOAD_TYPE,
        "payload": base64.b64encode(statement).decode(),
        "signatures": [{"keyid": _key_id(key.public_key()), "sig": base64.b64encode(signature).decode()}],
    }


def open_envelope(envelope: dict[str, Any], key_file: Path) -> bytes:
    """Return the statement of an envelope whose signature is valid.

    Args:
        key_file: the public key in PEM.

    Raises:
        DataError: the key cannot be read, or no signature is by it.
    """
    from cryptography.exceptions import InvalidSignature
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
    from cryptography.hazmat.primitives.serialization import load_pem_public_key

    try:
        key = load_pem_public_key(key_file.read_bytes())
        statement = base64.b64decode(envelope["payload"], validate=True)
        signatures = [base64.b64decode(entry["sig"], validate=True) for entry in envelope["signatures"]]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DataError(f"{key_file}: the key or the envelope cannot be read ({error})") from None
    if not isinstance(key, Ed25519PublicKey):
        raise DataError(f"{key_file}: not an Ed25519 key")
    for signature in signatures:
        try:
            key.verify(signature, _encoded(statement))
        except InvalidSignature:
            continue
        return statement
    raise DataError("provenance.dsse.json: no signature is by this key")


def _encoded(statement: bytes) -> bytes:
    """Return what is signed: DSSE's encoding of type and payload."""
    kind = PAYLOAD_TYPE.encode()
    return b"DSSEv1 %d %s %d %s" % (len(kind), kind, len(statement), statement)


def _key_id(key: Any) -> str:
    from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

    return hashlib.sha256(key.public_bytes(Encoding.Raw, PublicFormat.Raw)).hexdigest()


def to_bytes(value: Any) -> bytes:
    """Return JSON as the files of a dossier contain it."""
    return (json.dumps(value, indent=2, sort_keys=True, ensure_ascii=False) + "\n").encode()
