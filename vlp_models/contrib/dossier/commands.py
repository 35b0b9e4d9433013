"""`vlp dossier`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def dossier(
    version: Annotated[
        str, typer.Argument(help="A task or version: vqa, vlp-vqa/3, vlp-vqa@champion.", show_default=False)
    ] = "",
    out: Annotated[
        Path | None, typer.Option(help="The folder. Default: dossier-NAME-VERSION.", show_default=False)
    ] = None,
    key: Annotated[
        Path | None,
        typer.Option(help="Sign the provenance by this Ed25519 key; with --check, the public key.", show_default=False),
    ] = None,
    check: Annotated[
        Path | None,
        typer.Option(help="Compare this dossier with what the records say now, instead.", show_default=False),
    ] = None,
) -> None:
    """Write what an auditor asks for: technical documentation, bill of materials (CycloneDX), provenance (in-toto).

    Everything comes from the records; what they do not say is a gap, which dossier.yaml can fill. Exit code 1 of
    --check: something differs.
    """
    from vlp_models.common.workspace import Workspace
    from vlp_models.contrib.dossier.dossier import check_dossier, write_dossier
    from vlp_models.params import load_params
    from vlp_models.registry.client import connect, mlflow_errors
    from vlp_models.registry.versions import resolve_version

    if not version and check is None:
        raise typer.BadParameter("name a version to document, such as vqa, or a dossier with --check")
    params, root = load_params(), Workspace().root
    with mlflow_errors(params):
        client = connect(params.tracking, root)
        if check is not None:
            compared = check_dossier(client, params, root, check, key)
            for file in compared:
                print(f"{'differs' if file.differs else 'holds':8} {file.file} {file.differs}".rstrip())
            raise typer.Exit(int(any(file.differs for file in compared)))
        resolved = resolve_version(client, params.tracking, version)
        folder = out or Path(f"dossier-{resolved.name}-{resolved.version}")
        gaps = write_dossier(client, params, root, resolved, folder, key)
    print(f"{folder}: documentation.md, bom.cdx.json, provenance.json{', provenance.dsse.json' if key else ''}")
    if gaps:
        print(f"gaps: {', '.join(gaps)}; say what you know in dossier.yaml, by these numbers")


COMMANDS = {"Registry and promotion": {"dossier": dossier}}
WORK = {"dossier": "reading the records"}
