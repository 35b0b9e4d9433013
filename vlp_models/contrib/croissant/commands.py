"""`vlp croissant`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def croissant(
    license: Annotated[
        str, typer.Option("--license", help="License of the data: an SPDX identifier, e.g. CC-BY-4.0, or an address.")
    ],
    name: Annotated[str, typer.Option(help="The dataset's name.")] = "",
    description: Annotated[str, typer.Option(help="A sentence or two about the data.")] = "",
    output: Annotated[Path, typer.Option("--output", "-o", help="The file to write.")] = Path("reports/croissant.json"),
) -> None:
    """Describe the validated data in Croissant, the metadata format of MLCommons: files, hashes, tables and columns.

    Example: `vlp croissant --license CC-BY-4.0 --name my-photos`
    """
    from vlp_models.common.io import write_json
    from vlp_models.common.workspace import Workspace
    from vlp_models.contrib.croissant.describe import describe_dataset
    from vlp_models.params import load_params

    sources = ", ".join(load_params().data)
    about = description or f"Image-text data read from {sources} and validated by vlp-flows."
    metadata = describe_dataset(Workspace().validated, name=name or Path.cwd().name, license=license, description=about)
    output.parent.mkdir(parents=True, exist_ok=True)
    write_json(output, metadata)
    print(f"{output}: version {metadata['version']}, {len(metadata['recordSet'])} tables")


COMMANDS = {"New data": {"croissant": croissant}}
WORK = {"croissant": "hashing the tables"}
