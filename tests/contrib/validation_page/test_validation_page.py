"""The validation page: the verdict, every rule with examples, nothing from elsewhere and no markup from the data."""

from __future__ import annotations

import html.parser
import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest
from markupsafe import escape

from vlp_models.common.io import hash_path
from vlp_models.common.workspace import Workspace
from vlp_models.curation.validation.rules import rules_for
from vlp_models.data.tables import ID_COLUMN, read_table
from vlp_models.errors import DataError
from vlp_models.pipeline.stages import validate
from vlp_models.pipeline.stages.validate import CONSEQUENCES, EXAMPLES_OF_RULE, LONGEST

sys.path.append(str(Path(__file__).parents[2] / "pipeline"))
from test_validate import BROKEN, good_rows, params_for, row, unreadable, write_interim

pytestmark = [pytest.mark.slow]
HOSTILE = "<script>document.title = 'stolen'</script>\"'><img src=https://example.org/x onerror=alert(1)>"


class Page(html.parser.HTMLParser):
    """Tags, and the cells of every table row."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: set[str] = set()
        self.rows: list[list[str]] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        if tag == "tr":
            self.rows.append([])
        elif tag == "td":
            self.rows[-1].append("")

    def handle_data(self, data: str) -> None:
        if self.rows and self.rows[-1]:
            self.rows[-1][-1] += data


def read_page(workspace: Workspace) -> str:
    return (workspace.reports / "validation.html").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def hostile(tmp_path_factory: pytest.TempPathFactory) -> Workspace:
    """Validated rows, some of them against every rule, in tables whose ids, texts and lines are attacks."""
    workspace, rows = Workspace(tmp_path_factory.mktemp("hostile")), good_rows()
    for table, rules in BROKEN.items():
        rows[table] += [row(table, rule, **changes) for rule, changes in rules.items() if rule != "near_disjoint"]
    attack = {"caption_id": HOSTILE, "provenance": f"{HOSTILE}.json:1", "image_id": HOSTILE}
    rows["captions"] += [row("captions", "attack", text=HOSTILE, **attack)]
    rows["captions"] += [row("captions", f"long-{n}", text=f"{n}{'1' * 100_000}") for n in range(3 * EXAMPLES_OF_RULE)]
    rows["quarantine"] = [unreadable("images", HOSTILE, "image_decodes")]
    write_interim(workspace, rows)
    validate.run(params_for(0.99), workspace)
    return workspace


def test_every_rule_is_listed_and_broken_ones_come_first_with_examples(hostile: Workspace) -> None:
    text = read_page(hostile)
    found = [cells for cells in Page(text).rows if len(cells) == 6]
    listed = {(cells[1], cells[0].split()[-1]): cells[2:5] for cells in found}
    rules = {(table, rule.name): rule for table in ID_COLUMN for rule in rules_for(table, params_for(0.99).validate)}
    assert set(listed) == {*rules, ("images", "image_decodes")}
    report = json.loads((hostile.reports / "validation.json").read_text())
    counts = {(entry["table"], entry["rule"]): entry["failed"] for entry in report["rules"]}
    assert {name: int(cells[1]) for name, cells in listed.items()} == counts
    numbers = [int(cells[3]) for cells in found if cells[0].split()[-1] not in CONSEQUENCES]
    assert numbers == sorted(numbers, reverse=True) and numbers[0] == 3 * EXAMPLES_OF_RULE + 1 and numbers[-1] == 0
    assert listed["images", "split_known"] == ["15", "1", "6.67%"]
    assert "the shorter side has at least 16 pixels" in text and "the image file decodes completely" in text

    assert f"{EXAMPLES_OF_RULE} of {3 * EXAMPLES_OF_RULE + 1} bad rows" in text
    assert text.count("<bdi>captions-long-") <= 2 * EXAMPLES_OF_RULE, "of the two rules that they break"
    for bad in read_table("quarantine", hostile.validated).to_pylist():
        if "long-" not in bad["provenance"]:
            is_shown = (
                f"<bdi>{escape(bad['provenance'])}</bdi>" in text and f"<bdi>{escape(bad['reason'])}</bdi>" in text
            )
            assert is_shown != (bad["rule"] in CONSEQUENCES), "what follows from a bad image is counted, not repeated"
    assert len(text) < 200_000, "long values are cut"
    assert max(map(len, re.findall("1+", text))) <= LONGEST


def test_markup_from_the_data_is_escaped_and_nothing_is_loaded(hostile: Workspace) -> None:
    text = read_page(hostile)
    assert not Page(text).tags & {"script", "img", "link", "iframe", "object"}
    assert "&lt;script&gt;" in text and "default-src 'none'" in text
    assert not re.search(r"""(src|href)=["']?https?:""", text.replace("src=https://example.org/x", ""))


def test_results_of_great_expectations_are_kept_and_repeatable(hostile: Workspace, tmp_path: Path) -> None:
    results = hostile.reports / "validation_results"
    assert {path.stem for path in results.iterdir()} == set(ID_COLUMN)
    (line,) = map(json.loads, (results / "objects.jsonl").read_text().splitlines())
    found = {one["expectation_config"]["meta"]["rule"]: one for one in line["results"]}
    assert found["box_area"]["expectation_config"]["type"] == "expect_column_values_to_be_between"
    assert (found["box_area"]["success"], found["box_area"]["result"]["unexpected_count"]) == (False, 1)
    assert "expect_column_values_to_be_between" in read_page(hostile)
    before = [hash_path(hostile.reports / name) for name in ("validation.html", "validation_results")]
    validate.run(params_for(0.99), hostile)
    assert before == [hash_path(hostile.reports / name) for name in ("validation.html", "validation_results")]


def test_page_size_does_not_grow_with_batches_or_bad_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(validate, "BATCH", 50)
    sizes = []
    for number in (60, 240):
        workspace, rows = Workspace(tmp_path / str(number)), good_rows()
        rows["captions"] += [row("captions", f"{n:06}", text=f"1 {n:06}") for n in range(number)]
        write_interim(workspace, rows)
        validate.run(params_for(1.0), workspace)
        sizes.append(len(read_page(workspace)))
        lines = (workspace.reports / "validation_results" / "captions.jsonl").read_text().splitlines()
        assert len(lines) == -(-(number + 1) // 50), "one per batch"
    assert abs(sizes[1] - sizes[0]) < 100


def test_verdict_gives_the_reason_for_a_refusal(tmp_path: Path) -> None:
    workspace, rows = Workspace(tmp_path), good_rows()
    rows["captions"] = [row("captions", str(n), text=f"one cup {n}") for n in range(9)]
    rows["captions"].append(row("captions", "again", text="one  CUP 8"))
    write_interim(workspace, rows)
    validate.run(params_for(0.0), workspace)
    text = read_page(workspace)
    assert "Accepted</span>: no row of 19 is bad." in text and "No row breaks a rule." in text
    assert "<details open>" not in text, "rules that every row passes are folded"
    assert "1 repeated captions of a training image: dropped, not bad." in text

    rows["captions"].append(row("captions", "short", text="cup"))
    write_interim(workspace, rows)
    with pytest.raises(DataError, match=re.escape("validation.html")):
        validate.run(params_for(0.05), workspace)
    text = read_page(workspace)
    assert "Refused</span>: captions: 1 of 11 rows are bad (9.09%); at most 5% of a table may be." in text
    assert "too many bad rows" in text and ".work/validate/refused/quarantine.parquet" in text


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [1280, 390])
def test_page_fits_its_window_and_works_offline(browser: Any, hostile: Workspace, width: int, scheme: str) -> None:
    page = browser.new_page(viewport={"width": width, "height": 860}, color_scheme=scheme)
    requests, problems = list[str](), list[str]()
    page.on("request", lambda request: requests.append(request.url))
    page.on("pageerror", lambda error: problems.append(str(error)))
    page.on("console", lambda message: problems.append(message.text))
    page.goto((hostile.reports / "validation.html").as_uri())
    page.evaluate("document.querySelectorAll('details').forEach(one => one.open = true)")
    assert page.evaluate("document.documentElement.scrollWidth") == width
    outside = "[...document.querySelectorAll('body *')].filter(e => e.getBoundingClientRect().right > innerWidth + 1)"
    assert page.evaluate(f"{outside}.map(e => e.outerHTML.slice(0, 160))") == []
    assert page.evaluate("[...document.querySelectorAll('.scroll')].every(e => e.scrollWidth <= e.clientWidth + 1)")
    assert requests == [(hostile.reports / "validation.html").as_uri()] and not problems
    assert page.title() == "Validation of d", "no script ran"
    page.close()
