"""Result files of made-up models, as `vlp compare` reads them."""

from __future__ import annotations

import json
import zipfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np


def scores(seed: int, count: int = 200, better: float = 0.0) -> list[float]:
    """Return answers, right or wrong, of a model that is right more often by `better`."""
    ease = np.random.default_rng(0).random(count)
    noise = np.random.default_rng(seed).random(count) * 0.6
    return ((ease + noise) / 1.6 < 0.5 + better).astype(float).tolist()


def write_csv(path: Path, values: list[float], columns: dict[str, list[Any]] | None = None) -> Path:
    columns = {"item": [f"q{i}" for i in range(len(values))], "score": values, **(columns or {})}
    lines = [",".join(columns), *(",".join(map(str, row)) for row in zip(*columns.values(), strict=True))]
    path.write_text("\n".join(lines) + "\n")
    return path


def write_xlsx(path: Path, rows: list[list[Any]], more: str = "") -> Path:
    """Write the smallest workbook that the standard allows. more: XML of further rows."""
    kind = "http://schemas.openxmlformats.org/officeDocument/2006/relationships"
    main = "http://schemas.openxmlformats.org/spreadsheetml/2006/main"
    package = "http://schemas.openxmlformats.org/package/2006"
    cells = "".join(
        "<row>"
        + "".join(
            f"<c><v>{v}</v></c>" if not isinstance(v, str) else f'<c t="inlineStr"><is><t>{v}</t></is></c>' for v in row
        )
        + "</row>"
        for row in rows
    )
    office = "application/vnd.openxmlformats-officedocument.spreadsheetml"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(
            "[Content_Types].xml",
            f'<Types xmlns="{package}/content-types"><Default Extension="rels" '
            f'ContentType="application/vnd.openxmlformats-package.relationships+xml"/>'
            f'<Override PartName="/xl/workbook.xml" '
            f'ContentType="{office}.sheet.main+xml"/><Override PartName="/xl/s.xml" '
            f'ContentType="{office}.worksheet+xml"/></Types>',
        )
        relation = (
            '<Relationships xmlns="{}/relationships"><Relationship Id="r1" Type="{}/{}" Target="{}"/></Relationships>'
        )
        archive.writestr("_rels/.rels", relation.format(package, kind, "officeDocument", "xl/workbook.xml"))
        archive.writestr("xl/_rels/workbook.xml.rels", relation.format(package, kind, "worksheet", "s.xml"))
        archive.writestr(
            "xl/workbook.xml",
            f'<workbook xmlns="{main}" xmlns:r="{kind}"><sheets><sheet name="s" sheetId="1" r:id="r1"/></sheets>'
            "</workbook>",
        )
        archive.writestr("xl/s.xml", f'<worksheet xmlns="{main}"><sheetData>{cells}{more}</sheetData></worksheet>')
    return path


def write_samples(path: Path, rows: Iterable[dict[str, Any]]) -> Path:
    path.write_text("\n".join(map(json.dumps, rows)))
    return path
