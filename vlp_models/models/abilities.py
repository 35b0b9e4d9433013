"""Which family can do what, asked of the classes themselves."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from vlp_models.models import FAMILIES, family_class, protocols

PROTOCOLS: dict[str, type] = {
    name: getattr(protocols, name)
    for name in (
        "Fuses",
        "FusesApart",
        "Embeds",
        "Contrasts",
        "ScoresPairs",
        "Generates",
        "GeneratesByMasks",
        "Pretrains",
        "PredictsMaskedWords",
        "EmbedsPairs",
        "GroupsParameters",
        "Adopts",
        "ShowsItself",
    )
}


def meets(model_class: type, protocol: type) -> bool:
    """Whether the class has, or declares, every member of the protocol."""
    has = set(dir(model_class)).union(*(vars(base).get("__annotations__", ()) for base in model_class.__mro__))
    return has >= _members(protocol)


def protocols_of(family: str) -> tuple[str, ...]:
    """The names of the protocols that a family meets."""
    return tuple(name for name, protocol in PROTOCOLS.items() if meets(family_class(family), protocol))


def ability_table(tasks: Mapping[str, Iterable[type]]) -> str:
    """Markdown: a row for each protocol, then one for each task; a column for each family.

    Args:
        tasks: task -> the protocols one of which it needs of its model.
    """
    met = {family: protocols_of(family) for family in FAMILIES}
    lines = [f"| | {' | '.join(met)} |", f"|---|{'---|' * len(met)}"]
    rows = [(f"`{name}`", [name]) for name in PROTOCOLS]
    rows += [(f"task `{task}`", [need.__name__ for need in needs]) for task, needs in tasks.items()]
    for title, any_of in rows:
        cells = ["yes" if set(any_of) & set(names) else "-" for names in met.values()]
        lines.append(f"| {title} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _members(protocol: type) -> set[str]:
    bases = [base for base in protocol.__mro__ if getattr(base, "_is_protocol", False)]
    names = {name for base in bases for name in (*vars(base), *vars(base).get("__annotations__", ()))}
    return {name for name in names if not name.startswith("_")}
