"""What a person decided of audited pairs, and which captions `validate` therefore quarantines.

DECISIONS belongs into git: a line per decision, the last one of a caption counts. REPORT is what `vlp audit` wrote.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

from vlp_models.contrib.audit.params import AuditParams
from vlp_models.errors import DataError, first_line
from vlp_models.params import ValidateParams

DECISIONS = "data/audit.jsonl"
REPORT = "reports/audit.jsonl"
Decision = Literal["accept", "remove"]


def files(params: ValidateParams) -> list[str]:
    """Return the files that `read_flagged` reads, relative to the project's root; neither need exist."""
    return [DECISIONS, *([REPORT] if params.section(AuditParams).above is not None else [])]


def read_flagged(params: ValidateParams, root: Path) -> dict[str, str]:
    """Return caption id -> why it is quarantined: removed on the page, or a training caption above the threshold.

    Raises:
        DataError: a line of the files is damaged.
    """
    settings = params.section(AuditParams)
    decided = read_decisions(root / DECISIONS)
    flagged = {name: "removed on the page of `vlp audit`" for name, value in decided.items() if value == "remove"}
    if settings.above is None:
        return flagged
    for row in read_lines(root / REPORT):
        # A threshold must not change what models are evaluated on; an accepted pair stays.
        if row["split"] != "train" or row["caption_id"] in decided:
            continue
        for finding in row["findings"]:
            if finding["kind"] in settings.kinds and finding["score"] > settings.above:
                reason = f"audit: {finding['kind']}, score {finding['score']:.3f}: {finding['reason']}"
                flagged.setdefault(row["caption_id"], reason)
    return flagged


def read_decisions(file: Path) -> dict[str, Decision]:
    """Return caption id -> the last decision.

    Raises:
        DataError: a line is damaged.
    """
    decisions: dict[str, Decision] = {}
    for row in read_lines(file):
        if row["decision"] not in ("accept", "remove"):
            raise DataError(f"{file}: {row['decision']!r} is not a decision: accept or remove; restore it from git")
        decisions[str(row["caption_id"])] = row["decision"]
    return decisions


def append_decision(file: Path, caption_id: str, decision: Decision, text: str) -> None:
    """Write a decision to disk before it returns."""
    line = json.dumps({"caption_id": caption_id, "decision": decision, "text": text}, ensure_ascii=False)
    file.parent.mkdir(parents=True, exist_ok=True)
    with file.open("ab+") as opened:
        # A line that was cut off must not swallow this one.
        size = os.fstat(opened.fileno()).st_size
        if size and os.pread(opened.fileno(), 1, size - 1) != b"\n":
            line = f"\n{line}"
        opened.write(f"{line}\n".encode())
        opened.flush()
        os.fsync(opened.fileno())


def read_lines(file: Path) -> Iterator[dict[str, Any]]:
    """Yield the rows of the report, most suspicious first, or of the decisions; none without the file.

    Raises:
        DataError: a line is damaged, other than a last one without an end.
    """
    content = file.read_bytes() if file.exists() else b""
    lines = content.splitlines()
    for number, line in enumerate(lines, start=1):
        try:
            row = json.loads(line)
            row["caption_id"]  # a KeyError, or a TypeError if it is not an object
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            # cut off: the machine stopped while it was written
            if number == len(lines) and not content.endswith(b"\n"):
                return
            raise DataError(f"{file}:{number}: damaged ({first_line(error)}); restore or delete the line") from None
        yield row
