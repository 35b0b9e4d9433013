"""`vlp lineage`."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Annotated, Any

import typer

from vlp_models.common.packages import OWN
from vlp_models.common.plugins import Table, import_target
from vlp_models.errors import DataError, MissingToolError

if TYPE_CHECKING:
    from vlp_models.common.workspace import Workspace
    from vlp_models.params import Params

DIFFERENCES = Table("differences", {})  # since -> `module:function` that prints what differs between two versions


def lineage(
    model: Annotated[str, typer.Argument(help="A task or version: vqa, vlp-vqa@challenger, vlp-vqa/3.")],
    since: Annotated[
        str, typer.Option(help="List what differs from an earlier version: vlp-vqa/2, vqa@previous.")
    ] = "",
    file: Annotated[str, typer.Option(help="Print a file stored with the version instead, e.g. params.yaml.")] = "",
    hashes: Annotated[bool, typer.Option("--hashes", help="Also print the hashes of all inputs.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the record as JSON.")] = False,
) -> None:
    """Show the scores, data, code and parents of a registered version, and how to rebuild it.

    Examples: `vlp lineage vlp-vqa@champion`, `vlp lineage vlp-vqa/3 --since vlp-vqa/2`
    """
    from vlp_models.common.workspace import Workspace
    from vlp_models.params import load_params

    params, workspace = load_params(), Workspace()
    if since:
        if "since" not in DIFFERENCES:
            raise MissingToolError("`vlp lineage --since` needs vlp_models/contrib/bisect, which is not here")
        import_target(DIFFERENCES["since"])(params, workspace, since, model, as_json=as_json)
    else:
        print_lineage(params, workspace, model, file=file, as_json=as_json, hashes=hashes)


def print_lineage(
    params: Params, workspace: Workspace, model: str, *, file: str = "", as_json: bool = False, hashes: bool = False
) -> None:
    """Print the lineage of a registered version, or a file that is stored with it."""
    from vlp_models.registry.client import connect, mlflow_errors
    from vlp_models.registry.evaluations import read_lineage, read_lineage_file, read_scores
    from vlp_models.registry.versions import resolve_version

    with mlflow_errors(params):
        client = connect(params.tracking, workspace.root)
        version = resolve_version(client, params.tracking, model)
        if file:
            text = read_lineage_file(client, version, file)
            if text is None:
                raise DataError(f"{version.name} version {version.version}: no {file} was kept with it")
            print(text, end="")
            return
        record = read_lineage(client, version)
        if record is None:
            raise DataError(
                f"{version.name} version {version.version} has no lineage; if its checkpoint is still in checkpoints/, "
                "`vlp stage register` adds it"
            )
        record = {**record, "name": version.name, "version": int(version.version)}
        record |= {"metrics": read_scores(client, version), "rebuild": rebuild_commands(record)}
    if as_json:
        print(json.dumps(record, indent=2, sort_keys=True, ensure_ascii=False))
        return
    print("\n".join(format_lineage(record, hashes=hashes)))


def rebuild_commands(record: dict[str, Any]) -> list[str]:
    """Return the commands that rebuild the version's checkpoint; raw data is pulled from DVC's remote or generated."""
    # `COMMIT+...` had uncommitted changes; only the commit itself can be checked out.
    commit = record["git_commit"].partition("+")[0]
    name = f"{record['name']}/{record['version']}"
    files = [file for file in ("params.yaml", "dvc.lock") if file in record["locks"]]
    # First save the files, then check the commit out, which would replace them, then put them back.
    commands = [f"vlp lineage {name} --file {file} > /tmp/{file}" for file in files]
    if commit != "unknown":
        commands.append(f"git checkout {commit}")
    commands += [f"cp /tmp/{file} {file}" for file in files]
    packages = dict(record.get("packages", {}))
    # A project of `vlp init` records the version of this package; a clone has its code, and locks the rest.
    if OWN in packages:
        commands.append(f'pip install "{OWN}[pipeline]=={packages.pop(OWN)}"')
    else:
        commands.append("make install")
    pinned = [f"{package}=={version}" for package, version in packages.items()]
    if pinned:
        commands.append(f"pip install {' '.join(pinned)}")
    return [*commands, f"dvc repro {record['target']}"]


def format_lineage(record: dict[str, Any], *, hashes: bool = False) -> list[str]:
    """Return the record as lines with a label each: scores first, then where the version comes from.

    Args:
        hashes: also the hashes of its inputs, lock files and parents.
    """
    name = f"{record['name']}/{record['version']}"
    lines = [f"{record['name']} version {record['version']}: {record['task']}, run {record['run']}"]
    for score in record["metrics"]:
        # Scores of other decoders, such as `CIDEr (greedy)`, are left out.
        if score["value"] is not None and "(" not in score["metric"]:
            interval = f" ({score['low']:z.2f} to {score['high']:z.2f})" if score["low"] is not None else ""
            measured_on = f"{score['dataset']} {score['split']}"
            text = f"{score['metric']} {score['value']:z.2f}{interval}"  # z: no minus before 0.00
            lines.append(f"metric       {measured_on} {text}, n {score['n']}")
    model = f"{record['model']} ({record['family']})"
    lines.append(f"model        {model}; variant {record['variant']}, seed {record['seed']}")
    commit, changed, _ = record["git_commit"].partition("+")
    lines.append(f"git commit   {commit}" + (" with uncommitted changes" if changed else ""))
    for split, counts in sorted(record["data"].get("shards", {}).get("counts", {}).items()):
        lines.append(f"data         {split}: {_inline({key: count for key, count in counts.items() if count})}")
    lines.append(f"quarantined  {_inline(record['data']['quarantined']) or 'nothing'}")
    validation = record["validation"]
    if validation is None:
        lines.append("validation   not on record")
    else:
        reasons = "; ".join(validation.get("reasons", []))
        lines.append("validation   " + ("passed" if validation["passed"] else "failed: ") + reasons)
    for parent in record["parents"]:
        digest = parent.get("sha256", "") if hashes else parent.get("sha256", "")[:12]
        details = [parent.get("id"), digest and f"sha256 {digest}", parent.get("note")]
        lines.append(f"parent       {parent['role']} {parent['path']}  " + "; ".join(str(d) for d in details if d))
    if hashes:
        lines += [f"sha256       {digest}  {file}" for file, digest in sorted(record["locks"].items())]
        lines += [f"dvc md5      {digest}  {out}" for out, digest in sorted(record["dvc"].items()) if digest]
    lines += [f"rebuild      {command}" for command in record["rebuild"]]
    more = "" if hashes else f"vlp lineage {name} --hashes for the hashes of all inputs; "
    lines.append(f"more         {more}--file params.yaml for all params; --json for everything")
    return lines


def _inline(counts: dict[str, Any]) -> str:
    """Return nested counts in a line, such as `images 5, boxes (red 1, blue 2)`."""
    parts = []
    for key, value in counts.items():
        parts.append(f"{key} ({_inline(value)})" if isinstance(value, dict) else f"{key} {value}")
    return ", ".join(parts)


COMMANDS = {"Registry and promotion": {"lineage": lineage}}
WORK = {"lineage": "reading the registry"}
