"""`vlp history` and `vlp lineage` on the terminal."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from vlp_models.common.workspace import Workspace
from vlp_models.errors import DataError
from vlp_models.params import Params
from vlp_models.registry.client import mlflow_errors
from vlp_models.tasks import TASKS

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from mlflow.entities.model_registry import ModelVersion


def print_history(rows: list[dict[str, Any]], *, as_json: bool = False) -> None:
    """The task's ledger entries as a table, or as JSON lines."""
    if as_json:
        for row in rows:
            print(json.dumps(row, sort_keys=True, ensure_ascii=False))
        return
    if not rows:
        print("no decision yet")
        return
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = Console()
    table = Table(box=None, header_style="bold", pad_edge=False)
    for name in ("line", "time (UTC)", "what", "version", "run", "model", "before", "value", "gain", "by"):
        table.add_column(name, no_wrap=name in ("line", "version", "before", "value", "gain"), overflow="fold")
    styles = {"done": "green", "refused": "red", "intent": "yellow", "undone": "yellow"}
    for row in rows:
        numbers = row.get("decision", {}).get("numbers", {})
        table.add_row(
            str(row["seq"]),
            row["time"][:16].replace("T", " "),
            Text(describe(row), styles.get(row["kind"], "")),
            _text(row["version"]),
            Text(row.get("run", "")),
            Text(row.get("run_model", "")),
            _text(row["from"]),
            f"{numbers['value']:.2f}" if "value" in numbers else "",
            f"{numbers['gain']:+.2f}" if "gain" in numbers else "",
            Text(row["by"]),
        )
    console.print(table)
    for row in rows:
        for reason in row.get("decision", {}).get("reasons", []):
            console.print(Text(f"line {row['seq']}: {reason}"))


def describe(row: dict[str, Any]) -> str:
    """An entry in a few words."""
    kind, action = row["kind"], row["action"]
    answer = row.get("decision", {}).get("answer", "")
    words = {
        "done": {"promote": "promoted", "rollback": "rolled back", "withdraw": "withdrawn"}.get(action, action),
        "forgotten": f"forgot {len(row.get('pictures', []))} pictures",
        "intent": f"{action} interrupted",
        "undone": f"{action} undone",
        "refused": f"refused: {answer}" if answer else "refused",
    }.get(kind, kind)
    if row.get("decision", {}).get("forced"):
        words += " (forced)"
    return words + (" after an interruption" if kind == "done" and row.get("after") else "")


def print_lineage(params: Params, workspace: Workspace, model: str, *, file: str = "", as_json: bool = False) -> None:
    """
    Raises:
        DataError: no such version, or it was registered without a lineage.
    """
    from vlp_models.registry.client import connect
    from vlp_models.registry.evaluations import read_file, read_lineage, read_scores

    with mlflow_errors(params):
        client = connect(params.tracking, workspace.root)
        version = find_version(client, params, model)
        if file:
            text = read_file(client, version, file)
            if text is None:
                raise DataError(f"{version.name} version {version.version}: no {file} was kept with it")
            print(text, end="")
            return
        record = read_lineage(client, version)
        if record is None:
            raise DataError(
                f"{version.name} version {version.version} was registered without a lineage; if checkpoints/ still "
                "holds its checkpoint, `vlp stage register` adds it"
            )
        record = {**record, "name": version.name, "version": int(version.version)}
        record |= {"metrics": read_scores(client, version), "rebuild": rebuild_commands(record)}
    if as_json:
        print(json.dumps(record, indent=2, sort_keys=True, ensure_ascii=False))
        return
    print("\n".join(lineage_lines(record)))


def find_version(client: MlflowClient, params: Params, model: str) -> ModelVersion:
    """`vqa`, `vlp-vqa`, `vlp-vqa@champion`, `vlp-vqa/3`; without alias or version the champion, else the challenger.

    Raises:
        DataError: there is none.
    """
    from vlp_models.registry.versions import CHALLENGER, CHAMPION, by_alias, model_name

    name, at, alias = model.partition("@")
    name, slash, number = name.partition("/")
    if name in TASKS:
        name = model_name(params.tracking, name)
    if slash:
        found = client.search_model_versions(f"name='{name}'") if number.isdecimal() and "'" not in name else []
        version = next((v for v in found if int(v.version) == int(number)), None)
    elif at:
        version = by_alias(client, name, alias)
    else:
        version = by_alias(client, name, CHAMPION) or by_alias(client, name, CHALLENGER)
    if version is None:
        raise DataError(f"{model}: no such version; `vlp status --mlflow` shows what is registered")
    return version


def rebuild_commands(record: dict[str, Any]) -> list[str]:
    """What makes the version's checkpoint again; raw data come from the DVC remote or the generator."""
    commit = record["git_commit"].partition("+")[0]
    name = f"{record['name']}/{record['version']}"
    kept = [file for file in ("params.yaml", "dvc.lock") if file in record["locks"]]
    commands = [f"vlp lineage {name} --file {file} > /tmp/{file}" for file in kept]
    commands += [f"git checkout {commit}"] if commit != "unknown" else []
    commands += [f"cp /tmp/{file} {file}" for file in kept]
    return [*commands, "make install", f"dvc repro {record['target']}"]


def lineage_lines(record: dict[str, Any]) -> list[str]:
    """The record as indented lines."""
    commit, changed, _ = record["git_commit"].partition("+")
    lines = [f"{record['name']} version {record['version']}: {record['task']}, run {record['run']}"]
    if record.get("family"):  # versions registered before there were several models do not say
        about = f"{record['model']} ({record['family']})"
        lines.append(f"model        {about}; variant {record['variant']}, seed {record['seed']}")
    lines.append(f"git commit   {commit}" + (" with uncommitted changes" if changed else ""))
    lines += [f"sha256       {digest}  {name}" for name, digest in sorted(record["locks"].items())]
    lines += [f"dvc md5      {digest}  {out}" for out, digest in sorted(record["dvc"].items()) if digest]
    data = record["data"]
    for name in ("validated", "shards"):
        for what, value in sorted(data.get(name, {}).items()):
            lines.append(f"data         {name} {what}: {_short(value)}")
    lines.append(f"quarantined  {_short(data['quarantined']) or 'nothing'}")
    validation = record["validation"]
    said = "not on record" if validation is None else "passed" if validation["passed"] else "failed: "
    lines.append(f"validation   {said}" + "; ".join((validation or {}).get("reasons", [])))
    for parent in record["parents"]:
        details = [parent.get("id"), parent.get("sha256") and f"sha256 {parent['sha256']}", parent.get("note")]
        lines.append(f"parent       {parent['role']} {parent['path']}  " + "; ".join(str(d) for d in details if d))
    run = record["params"].get("finetune", {}).get(record["run"], {})
    lines.append(f"params       {_short(run)}")
    lines.append(f"             all of them: vlp lineage {record['name']}/{record['version']} --file params.yaml")
    for score in record["metrics"]:
        if score["value"] is not None and "(" not in score["metric"]:
            interval = f" ({score['low']:.2f} to {score['high']:.2f})" if score["low"] is not None else ""
            place = f"{score['dataset']} {score['split']}"
            lines.append(f"metric       {place} {score['metric']} {score['value']:.2f}{interval}, n {score['n']}")
    lines += [f"rebuild      {command}" for command in record["rebuild"]]
    return lines


def _short(value: Any) -> str:
    if not isinstance(value, dict):
        return str(value)
    parts = ((key, f"({_short(item)})" if isinstance(item, dict) else str(item)) for key, item in value.items())
    return ", ".join(f"{key} {text}" for key, text in parts)


def _text(value: Any) -> str:
    return "" if value is None else str(value)
