"""Technical documentation in the order of Annex IV of Regulation (EU) 2024/1689, the AI Act.

Each item has what the records say, or the provider's own words from dossier.yaml, or is marked as a gap. Nothing else
is written: whether the documentation satisfies the Act is for its provider to judge.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from vlp_models.contrib.dossier.facts import ANSWERS, Facts
from vlp_models.registry.borrowed import borrowed_sources
from vlp_models.registry.card import score_table
from vlp_models.registry.receipts import decision_word

GAP = "**Gap: the records do not say.**"
Lines = Callable[[Facts], Iterator[str]]


def write_documentation(facts: Facts) -> str:
    """Return the documentation as Markdown."""
    lines = [
        f"# Technical documentation of {facts.title}",
        "",
        f"Content {facts.content}, registered {facts.made}.",
        "",
    ]
    for section, items in SECTIONS.items():
        lines += [f"## {section}", ""]
        for number, (title, recorded) in items.items():
            lines += [f"### {number} {title}", "", *_item(facts, number, recorded), ""]
    return "\n".join(lines).rstrip() + "\n"


def find_gaps(facts: Facts) -> list[str]:
    """Return the numbers of the items that neither the records nor dossier.yaml say anything about."""
    numbers = {number: recorded for items in SECTIONS.values() for number, (_, recorded) in items.items()}
    return [number for number, recorded in numbers.items() if GAP in _item(facts, number, recorded)]


def _item(facts: Facts, number: str, recorded: Lines | None) -> list[str]:
    lines = list(recorded(facts)) if recorded else []
    if answer := facts.answers.get(number):
        lines += [*([""] if lines else []), f"As stated by the provider ({ANSWERS}): {answer}"]
    return lines or [GAP]


def _version(facts: Facts) -> Iterator[str]:
    yield f"- model: `{facts.name}`, version {facts.version}; task: {facts.lineage['task']}"
    yield f"- family: {facts.lineage['family']}; variant: {facts.lineage['variant']}; run: `{facts.lineage['run']}`"
    for parent in facts.lineage["parents"]:
        yield f"- {parent['role']}: `{parent.get('path', '')}`, sha256 {parent.get('sha256') or 'not recorded'}"


def _software(facts: Facts) -> Iterator[str]:
    yield f"- commit: `{facts.lineage['git_commit']}`"
    for name, digest in facts.lineage["locks"].items():
        yield f"- `{name}`: sha256 {digest}"
    for name, package in sorted(facts.lineage.get("packages", {}).items()):
        yield f"- package `{name}`: {package.get('version', package) if isinstance(package, dict) else package}"


def _forms(facts: Facts) -> Iterator[str]:
    yield f"- served by this project: {facts.tags.get('served', 'not recorded')}"
    yield f"- {len(facts.files)} files with hashes in the bill of materials (bom.cdx.json)"


def _steps(facts: Facts) -> Iterator[str]:
    yield f"- rebuilt by `{facts.tags.get('command', 'dvc repro ' + facts.lineage['target'])}` at the commit of 1c"
    borrowed = list(dict.fromkeys(borrowed_sources(facts.lineage)))
    for role, source, architecture in borrowed:
        yield f"- {role} of others: `{source}`{f' ({architecture})' if architecture else ''}"
    if not borrowed:
        yield "- no weights of others: everything was trained in the project"


def _design(facts: Facts) -> Iterator[str]:
    finetune = facts.lineage["params"]["finetune"][facts.lineage["run"]]
    for name in ("task", "start", "max_epochs", "max_steps", "batch_size", "options", "optimizer", "seed"):
        if finetune.get(name) not in (None, {}, ""):
            yield f"- fine-tuning, {name}: `{finetune[name]}`"
    for parent in facts.lineage["parents"]:
        recipe = (parent.get("params") or {}).get("recipe")
        if recipe:
            yield f"- `{parent['path']}`, recipe: `{recipe}`"


def _resources(facts: Facts) -> Iterator[str]:
    model = facts.lineage["params"]["models"].get(facts.lineage["model"], {})
    yield f"- model settings: `{model.get('config', {})}`"


def _data(facts: Facts) -> Iterator[str]:
    sources = facts.lineage["params"]["data"]
    for name, source in sources.items():
        yield f"- dataset `{name}`: format {source.get('format')}, `{source.get('root', '')}`"
    data = facts.lineage["data"]
    for part in ("validated", "shards"):
        for key, value in (data.get(part) or {}).items():
            yield f"- {part}, {key}: `{value}`"
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
    shown = ("split", "error_budget", "spend", "min_images", "tasks")
    yield "- another version replaces it only through the gate: " + ", ".join(f"{n} `{gate[n]}`" for n in shown)


def _decisions(facts: Facts) -> Iterator[str]:
    for entry in facts.decisions:
        decision = entry.get("decision") or {}
        word = decision_word({**decision, "action": entry["action"]})
        reasons = "; ".join(decision.get("reasons") or [])
        number = f" version {entry['version']}" if entry.get("version") else ""
        made = f"- {entry['time']}, ledger line {entry['seq']}: {word}{number} by {entry.get('by', '')}"
        yield f"{made}. {reasons}".rstrip()


def _limits(facts: Facts) -> Iterator[str]:
    for score in facts.scores:
        if score.get("value") is None:
            continue
        for name, baseline in (score.get("baselines") or {}).items():
            value = baseline["value"] if isinstance(baseline, dict) else baseline
            if value is not None and value >= score["value"]:
                yield f"- {score['metric']} on {score['dataset']} {score['split']} is not above {name} ({value:.2f})"


# number in Annex IV -> title, and what the records say about it
SECTIONS: dict[str, dict[str, tuple[str, Lines | None]]] = {
    "1. General description": {
        "1a": ("Intended purpose, provider, version and its relation to earlier ones", _version),
        "1b": ("Interaction with hardware or software outside of the system", None),
        "1c": ("Software and firmware versions", _software),
        "1d": ("Forms in which it is placed on the market or put into service", _forms),
        "1e": ("Hardware on which it is intended to run", None),
        "1f": ("Pictures of the products that it is part of", None),
        "1g": ("User interface for the deployer", None),
        "1h": ("Instructions for use", None),
    },
    "2. Elements and development": {
        "2a": ("Methods and steps of development, with pretrained parts of third parties", _steps),
        "2b": ("Design: logic, choices, what is optimized", _design),
        "2c": ("Architecture and computing resources", _resources),
        "2d": ("Data: provenance, scope, selection, labels, cleaning", _data),
        "2e": ("Human oversight that is needed", None),
        "2f": ("Changes that are determined in advance", _changes_ahead),
        "2g": ("Validation and testing: data, metrics, results", _validation),
        "2h": ("Cybersecurity measures", None),
    },
    "3. Monitoring, functioning and control": {"3": ("Capabilities and limits, risks, input data", _limits)},
    "4. Performance metrics": {"4": ("Why the metrics are appropriate", None)},
    "5. Risk management": {"5": ("The risk management system (Article 9)", None)},
    "6. Changes": {"6": ("Relevant changes through the lifecycle", _decisions)},
    "7. Standards": {"7": ("Harmonized standards that are applied", None)},
    "8. Declaration of conformity": {"8": ("A copy of the EU declaration (Article 47)", None)},
    "9. After the market": {"9": ("The system that evaluates performance afterwards (Article 72)", None)},
}
