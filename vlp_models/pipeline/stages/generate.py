"""generate NAME: write a synthetic dataset in the public formats of real data, data/raw/NAME."""

from __future__ import annotations

from vlp_models.common.io import output_directory
from vlp_models.common.plugins import import_target
from vlp_models.common.workspace import Workspace, write_manifest
from vlp_models.errors import ParamsError
from vlp_models.params import Params, to_plain
from vlp_models.params.schema import check_known
from vlp_models.synthetic import GENERATORS


def run(params: Params, workspace: Workspace, key: str = "") -> None:
    """Generate the dataset that params.yaml describes as `generate.KEY`.

    Raises:
        ParamsError: no such dataset or generator, or a number is out of range.
    """
    if key not in params.generate:
        names = ", ".join(params.generate) or "none"
        raise ParamsError(f"params.yaml: no `generate.{key}`; known: {names}. Run `vlp stage generate NAME`")
    entry = params.generate[key]
    check_known(entry.generator, GENERATORS, f"generate.{key}.generator")
    write = import_target(GENERATORS[entry.generator])
    with output_directory(workspace.raw(key)) as directory:
        counts = write(entry, directory)
        write_manifest(directory, stage="generate", params=to_plain(entry), counts=counts)
