"""Technical documentation in the order of Annex IV of Regulation (EU) 2024/1689, the AI Act.

Each item has what the records say and the provider's own words from dossier.yaml. Without these, what the records do
not say is marked as a gap. Nothing else is written: whether the documentation satisfies the Act is for its provider to
judge.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from vlp_models.contrib.dossier.facts import ANSWERS, Facts
from vlp_models.errors import DataError
from vlp_models.params.schema import suggestion
from vlp_models.registry.borrowed import borrowed_sources
from vlp_models.registry.card import score_table
from vlp_models.registry.receipts import decision_word

GAP = "**Gap: the records do not say"


@dataclass(frozen=True, kw_only=True)
class Item:
    """An item of Annex IV.

    recorded: the lines that the records have about it. missing: what it asks for and no record ever has; with no lines
    at all, everything is missing.
    """

    title: str
    recorded: Callable[[Facts], Iterator[str]] | None = None
    missing: str = ""


def write_documentation(facts: Facts) -> str:
    """Return the documentation as Markdown."""
    lines = [
        f"# Technical documentation of {facts.title}",
        "",
        f"Content {facts.content}, registered {facts.registered}.",
        "",
    ]
    for section, items in SECTIONS.items():
        lines += [f"## {section}", ""]
        for number, item in items.items():
            lines += [f"### {number} {item.title}", "", *_describe(facts, number, item), ""]
    return "\n".join(lines).rstrip() + "\n"


def find_gaps(facts: Facts) -> list[str]:
    """Return the numbers of the items that the records leave open, in whole or in part, and dossier.yaml does, too.

    Raises:
        DataError: dossier.yaml has an item that Annex IV has not.
    """
    items = {number: item for section in SECTIONS.values() for number, item in section.items()}
    for number in facts.answers:
        if number not in items:
            raise DataError(f"{ANSWERS}: unknown item `{number}`{suggestion(number, items)}")
    return [number for number, item in items.items() if _describe(facts, number, item)[-1].startswith(GAP)]


def _describe(facts: Facts, number: str, item: Item) -> list[str]:
    lines = list(item.recorded(facts)) if item.recorded else []
    missing = item.missing if lines else ""
    separator = [""] if lines else []
    if answer := facts.answers.get(number):
        lines += [*separator, f"As stated by the provider ({ANSWERS}): {answer}"]
    elif missing or not lines:
        lines += [*separator, f"{GAP}{missing and ': '}{missing}.**"]
    return lines


def _in_words(value: Any) -> str:
    """Return params or counts in words, without what is empty: `test: images 8, questions 48; train: images 24`."""
    if not isinstance(value, dict):
        return str(value)
    filled = {name: item for name, item in value.items() if item not in ("", None, {}, [])}
    if any(isinstance(item, dict) for item in filled.values()):
        return "; ".join(f"{name}: {_in_words(item)}" for name, item in filled.items())
    return ", ".join(f"{name} {item}" for name, item in filled.items())


def _without_zeros(counts: Any) -> Any:
    """Return counts, which may be nested, without the zeros: no questions, no statements, ..."""
    if not isinstance(counts, dict):
        return counts
    return {name: _without_zeros(count) for name, count in counts.items() if count != 0}


def _version(facts: Facts) -> Iterator[str]:
    yield f"- model: `{facts.name}`, version {facts.version}; task: {facts.lineage['task']}"
    yield f"- family: {facts.lineage['family']}; variant: {facts.lineage['variant']}; run: `{facts.lineage['run']}`"
    for parent in facts.lineage["parents"]:
        yield f"- {parent['role']}: `{parent.get('path', '')}`, sha256 {parent.get('sha256') or 'not recorded'}"


def _software(facts: Facts) -> Iterator[str]:
    yield f"- commit: `{facts.lineage['git_commit']}`"
    for name, digest in facts.lineage["locks"].items():
        yield f"- `{name}`: sha256 {digest}"
    if "requirements.lock" not in facts.lineage["locks"]:
        yield "- versions of the installed packages: not recorded, as the project has no requirements.lock"
    for name, package in sorted(facts.lineage.get("packages", {}).items()):
        yield f"- package `{name}`: {package.get('version', package) if isinstance(package, dict) else package}"


def _forms(facts: Facts) -> Iterator[str]:
    yield f"- can be served by this project: {facts.tags.get('served', 'not recorded')}"
    count = len(facts.files) + len(facts.code)
    yield f"- a folder of {count} files, with hashes in the bill of materials (bom.cdx.json)"


def _steps(facts: Facts) -> Iterator[str]:
    command = facts.tags.get("command", f"dvc repro {facts.lineage['target']}")
    yield f"- rebuilt by `{command}` with the commit, dvc.lock and params.yaml of 1c"
    if facts.lineage["git_commit"].endswith("+changes"):
        yield "- the working tree had changes since that commit, of which only dvc.lock and params.yaml are recorded"
    borrowed = list(dict.fromkeys(borrowed_sources(facts.lineage)))
    for role, source, architecture in borrowed:
        yield f"- {role} of others: `{source}`{f' ({architecture})' if architecture else ''}"
    if not borrowed:
        yield "- no weights of others are recorded"


def _design(facts: Facts) -> Iterator[str]:
    finetune = facts.lineage["params"]["finetune"][facts.lineage["run"]]
    for name in ("task", "start", "max_epochs", "max_steps", "batch_size", "options", "optimizer", "seed"):
        if finetune.get(name) not in (None, {}, ""):
            yield f"- fine-tuning, {name}: {_in_words(finetune[name])}"
    for parent in facts.lineage["parents"]:
        recipe = (parent.get("params") or {}).get("recipe")
        if recipe:
            yield f"- `{parent['path']}`, recipe: {_in_words(recipe)}"


def _resources(facts: Facts) -> Iterator[str]:
    model = facts.lineage["params"]["models"].get(facts.lineage["model"], {})
    yield f"- model settings: {_in_words(model.get('config', {})) or 'the defaults of its family'}"


def _data(facts: Facts) -> Iterator[str]:
    sources = facts.lineage["params"]["data"]
    for name, source in sources.items():
        yield f"- dataset `{name}`: format {source.get('format')}, `{source.get('root', '')}`"
    data = facts.lineage["data"]
    for part in ("validated", "shards"):
        for key, value in (data.get(part) or {}).items():
            yield f"- {part}, {key}: {_in_words(_without_zeros(value))}"
    for rule, count in data.get("quarantined", {}).items():
        yield f"- quarantined, {rule}: {count} rows"


def _validation(facts: Facts) -> Iterator[str]:
    validation = facts.lineage.get("validation")
    if validation is not None:
        yield f"- data validation: {'; '.join(validation['reasons']) or 'passed'}"
    if facts.scores:
        yield ""
        yield score_table([score for score in facts.scores if score["value"] is not None])


def _changes_ahead(facts: Facts) -> Iterator[str]:
    gate: dict[str, Any] = facts.lineage["params"]["promotion"]
    settings = {name: gate[name] for name in ("split", "error_budget", "spend", "min_images")}
    settings |= gate["tasks"].get(facts.lineage["task"], {})
    yield f"- another version replaces it only if the gate promotes it, or by a rollback; gate: {_in_words(settings)}"


def _decisions(facts: Facts) -> Iterator[str]:
    for entry in facts.decisions:
        decision = entry.get("decision") or {}
        word = decision_word({**decision, "action": entry["action"]})
        reasons = "; ".join(decision.get("reasons") or []) or entry.get("reason", "")
        if "images" in entry:
            reasons = f"{len(entry['images'])} images"
        number = f" version {entry['version']}" if entry.get("version") else ""
        made = f"- {entry['time']}, ledger line {entry['seq']}: {word}{number} by {entry.get('by', '')}"
        yield f"{made}. {reasons}".rstrip()


def _limits(facts: Facts) -> Iterator[str]:
    for score in facts.scores:
        if score.get("value") is None:
            continue
        baselines = score.get("baselines") or {}
        values = {name: entry["value"] if isinstance(entry, dict) else entry for name, entry in baselines.items()}
        higher = {name: value for name, value in values.items() if value is not None and value >= score["value"]}
        if higher:
            where = f"{score['metric']} on {score['dataset']} {score['split']} is {score['value']:.2f}"
            yield f"- {where}, not above {', '.join(f'{name} {value:.2f}' for name, value in higher.items())}"


# number in Annex IV -> item, in the order of the annex
SECTIONS: dict[str, dict[str, Item]] = {
    "1. General description": {
        "1a": Item(
            title="Intended purpose, provider, version and its relation to earlier ones",
            recorded=_version,
            missing="intended purpose, name of the provider",
        ),
        "1b": Item(title="Interaction with hardware or software outside of the system"),
        "1c": Item(title="Software and firmware versions", recorded=_software, missing="requirements for updates"),
        "1d": Item(
            title="Forms in which it is placed on the market or put into service",
            recorded=_forms,
            missing="the forms in which it is provided",
        ),
        "1e": Item(title="Hardware on which it is intended to run"),
        "1f": Item(title="Pictures of the products that it is part of"),
        "1g": Item(title="User interface for the deployer"),
        "1h": Item(title="Instructions for use"),
    },
    "2. Elements and development": {
        "2a": Item(title="Methods and steps of development, with pretrained parts of third parties", recorded=_steps),
        "2b": Item(
            title="Design: logic, choices, what is optimized",
            recorded=_design,
            missing="general logic, reasons for the choices, expected output and its quality",
        ),
        "2c": Item(
            title="Architecture and computing resources",
            recorded=_resources,
            missing="how the components build on each other, computing resources that were used",
        ),
        "2d": Item(
            title="Data: provenance, scope, selection, labels, cleaning",
            recorded=_data,
            missing="how the data was obtained, selected and labeled",
        ),
        "2e": Item(title="Human oversight that is needed"),
        "2f": Item(title="Changes that are determined in advance", recorded=_changes_ahead),
        "2g": Item(
            title="Validation and testing: data, metrics, results",
            recorded=_validation,
            missing="robustness, discriminatory impact, reports signed by the persons responsible",
        ),
        "2h": Item(title="Cybersecurity measures"),
    },
    "3. Monitoring, functioning and control": {
        "3": Item(
            title="Capabilities and limits, risks, input data",
            recorded=_limits,
            missing="unintended outcomes and risks, accuracy for groups of persons, what input is specified",
        )
    },
    "4. Performance metrics": {"4": Item(title="Why the metrics are appropriate")},
    "5. Risk management": {"5": Item(title="The risk management system (Article 9)")},
    "6. Changes": {"6": Item(title="Relevant changes through the lifecycle", recorded=_decisions)},
    "7. Standards": {"7": Item(title="Harmonized standards that are applied")},
    "8. Declaration of conformity": {"8": Item(title="A copy of the EU declaration (Article 47)")},
    "9. After the market": {"9": Item(title="The system that evaluates performance afterwards (Article 72)")},
}
