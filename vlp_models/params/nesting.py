"""How deep and how large a YAML text is, known from its events, before anything is built of it.

libyaml's loader recurses for each level, in C: tens of thousands of brackets end the process. And a text of a
kilobyte whose names stand for each other ("billion laughs") is a document of gigabytes.
"""

from __future__ import annotations

DEEPEST = 50  # levels; params.yaml has six
MOST = 200_000  # values, those counted again that a name (`*x`) repeats


def check_nesting(text: str) -> None:
    """
    Raises:
        ValueError: it is nested too deeply, or stands for too many values. yaml.YAMLError: it is no YAML.
    """
    import yaml

    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    open_: list[tuple[str | None, int]] = []  # the anchor of each value that is open, and what was counted before it
    sizes: dict[str, int] = {}
    count = 0
    for event in yaml.parse(text, Loader=loader):
        if isinstance(event, yaml.AliasEvent):
            count += sizes.get(event.anchor or "", 1)
        elif isinstance(event, yaml.ScalarEvent):
            count += 1
            if event.anchor:
                sizes[event.anchor] = 1
        elif isinstance(event, yaml.CollectionStartEvent):
            open_.append((event.anchor, count))
            count += 1
        elif isinstance(event, yaml.CollectionEndEvent):
            anchor, before = open_.pop()
            if anchor:
                sizes[anchor] = count - before
        if len(open_) > DEEPEST or count > MOST:
            what = f"nested more than {DEEPEST} levels deep" if len(open_) > DEEPEST else f"more than {MOST:,} values"
            raise ValueError(f"line {event.start_mark.line + 1 if event.start_mark else '?'}: {what}")
