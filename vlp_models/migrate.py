"""params.yaml of the version with one `model`, one `pretrain` and `scheduled_sampling`, as named models and runs.

The model and its pretraining are called after the model (`tden`), a second pretraining in two passes `tden-two-pass`.
Fine-tuning runs keep their names, so that what was registered goes on.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from vlp_models.errors import ParamsError
from vlp_models.params import parse_params, read_yaml

KEPT = "params.before-migration.yaml"
RECIPE = ("mix", "objectives", "mask_probability")
PASSES = ("scheme", "sample", "ramp")
TO_OPTIONS = ("label_smoothing", "self_critical")


def migrate_params(file: Path) -> list[str]:
    """Rewrites `file`; returns what to know, a line each. Comments are lost: the old file stays beside it.

    Raises:
        ParamsError: not a params.yaml of the older version, or one that holds what has no place any more.
    """
    raw = read_yaml(file)
    if "model" not in raw:
        raise ParamsError(f"{file}: has no `model`, so it is not of the version with one model; nothing to migrate")
    new, lines = migrated(raw)
    parse_params(new, str(file))
    kept = file.with_name(KEPT)
    if kept.exists():
        raise ParamsError(f"{kept}: there already, from an earlier migration; move it away first")
    import yaml

    text = yaml.safe_dump(new, sort_keys=False, width=120, allow_unicode=True)
    partial = file.with_name(f".{file.name}.partial")
    partial.write_text(text, encoding="utf-8")
    kept.write_bytes(file.read_bytes())
    partial.replace(file)
    return [f"{file}: written anew; the old one is {kept.name}", *lines]


def migrated(raw: dict[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """The new params, and what to know about them."""
    lines: list[str] = []
    model = raw["model"]["name"]
    first, second = model, f"{model}-two-pass"
    old_pretrain, old_second = raw.get("pretrain", {}), raw.get("scheduled_sampling", {"scheme": "none"})
    two_pass = old_second.get("scheme", "none") != "none"
    init = old_pretrain.get("init", "")
    seed = old_pretrain.get("seed", 1)
    models = {first: {"family": model, "config": raw["model"].get("config", {}), "weights": init, "seed": seed}}
    if init:
        lines.append(f"`models.{first}.weights: {init}`: import it anew if it was made by an older version")
    pretrain = {first: {"model": first, "start": f"initial/{first}", **_run(old_pretrain)}}
    if two_pass:
        start = f"initial/{first}" if old_second.get("init") == "scratch" else f"pretrain/{first}"
        passes = {key: old_second[key] for key in PASSES if key in old_second}
        pretrain[second] = {"model": first, "start": start, **_run(old_second), "passes": passes}
    starts = {"pretrain": f"pretrain/{first}", "scheduled_sampling": f"pretrain/{second if two_pass else first}"}
    finetune = {}
    for name, run in raw.get("finetune", {}).items():
        entry = {key: value for key, value in run.items() if key not in ("init", "scratch", *TO_OPTIONS)}
        start = starts.get(run["init"], f"finetune/{run['init']}")
        entry["start"] = f"initial/{first}" if run.get("scratch") else start
        options = {key: run[key] for key in TO_OPTIONS if run.get(key)}
        if options:
            entry["options"] = {**run.get("options", {}), **options}
        finetune[name] = entry
    renamed = {"generate": {"size": "side"}, "tokenizer": {"size": "vocab_size"}}
    new: dict[str, Any] = {}
    for section, value in raw.items():
        if section in ("pretrain", "finetune", "scheduled_sampling"):
            continue
        if section == "model":
            new |= {"models": models, "pretrain": pretrain, "finetune": finetune}
        elif section == "generate":
            new[section] = {name: _renamed(world, renamed["generate"]) for name, world in value.items()}
        elif section == "tokenizer":
            new[section] = _renamed(value, renamed["tokenizer"])
        else:
            new[section] = value
    lines.append("the stages are other ones now: the first `vlp run` makes everything anew; registered versions stay")
    return new, lines


def _run(old: dict[str, Any]) -> dict[str, Any]:
    recipe = {key: old[key] for key in RECIPE if key in old}
    if recipe.get("mix") in ("draw", "turns"):  # what was a probability or a number of turns is a share now
        recipe["objectives"] = {name: {"share": share} for name, share in recipe["objectives"].items()}
    rest = {key: value for key, value in old.items() if key not in (*RECIPE, *PASSES, "init")}
    return {**rest, "recipe": recipe}


def _renamed(section: dict[str, Any], names: dict[str, str]) -> dict[str, Any]:
    return {names.get(key, key): value for key, value in section.items()}
