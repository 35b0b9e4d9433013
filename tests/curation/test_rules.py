"""Derived columns: text in any language, leaks, repeated ids and captions, boxes against their image."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vlp_models.curation.validation.columns import add_derived_columns
from vlp_models.curation.validation.cross_row_facts import CrossFacts, Crossing
from vlp_models.curation.validation.text import caption_key, count_words, has_letters, has_text_besides_urls, is_clean
from vlp_models.data.tables import SCHEMAS, write_table


@pytest.mark.parametrize(
    ("text", "letters", "clean", "more_than_url"),
    [
        ("A dog runs.", True, True, True),
        ("一只猫在垫子上", True, True, True),
        ("קאַץ אויף דער מאַטע", True, True, True),
        ("😀 a face", True, True, True),
        ("3 × 4 = 12!", False, True, True),
        ("", False, True, True),
        ("a\x07bell", True, False, True),
        ("caf\ufffd", True, False, True),
        ("half \ud800 a pair", True, False, True),
        ("https://example.org/cat.jpg", True, True, False),
        ("WWW.example.org/1  http://example.org/2 !", True, True, False),
        ("a sign with www.example.org", True, True, True),
    ],
)
def test_text(text: str, letters: bool, clean: bool, more_than_url: bool) -> None:
    assert (has_letters(text), is_clean(text), has_text_besides_urls(text)) == (letters, clean, more_than_url)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("Dog", 1),
        ("a dog runs !", 4),
        ("un café", 2),
        ("一只狗在草地上奔跑。", 5),  # 9 letters
        ("犬が芝生の上を走っている", 6),
        ("สุนัขวิ่งบนหญ้า", 3),
        ("개가 풀밭을 달린다", 3),  # Korean has spaces
        ("狗", 1),
        ("iPhone手机", 2),
        ("", 0),
    ],
)
def test_words_are_counted_per_script(text: str, words: int) -> None:
    assert count_words(text) == words


def test_caption_key_ignores_case_spaces_and_unicode_form() -> None:
    assert caption_key(" Straße  frei") == caption_key("STRASSE FREI")
    assert caption_key("caf\u00e9") == caption_key("CAFE\u0301")
    assert caption_key("a dog") != caption_key("a dog.")


@given(st.text())
def test_text_rules_accept_any_text(text: str) -> None:
    assert is_clean(text) or not is_clean("x" + text)
    assert has_letters(text + "ø")
    assert has_text_besides_urls(text + " ø")


def image(name: str, split: str, sha256: str = "", **changes: Any) -> dict[str, Any]:
    row = {"image_id": name, "split": split, "sha256": sha256 or name, "width": 64, "height": 48, "provenance": name}
    return {**row, **changes}


def crossed(rows: list[dict[str, Any]], directory: Path) -> list[dict[str, Any]]:
    """Derive the columns of image rows, facts about other rows included."""
    write_table([{**dict.fromkeys(SCHEMAS["images"].names), **row} for row in rows], "images", directory)
    with Crossing.within(directory) as crossing:
        (others,) = crossing.facts("images", [directory / "images.parquet"], len(rows))
    return add_derived_columns("images", rows, others)


def test_copy_in_the_higher_split_stays(tmp_path: Path) -> None:
    rows = [
        image("a", "train", "same"),
        image("b", "val", "same"),
        image("c", "test", "same"),
        image("d", "train", "twice"),
        image("e", "train", "twice"),
        image("f", "val", "other"),
        image("g", "train", "other"),
    ]
    also_in = {row["image_id"]: row["also_in"] for row in crossed(rows, tmp_path)}
    assert also_in == {
        "a": "test as c",
        "b": "test as c",
        "c": "",
        "d": "",
        "e": "",
        "f": "",
        "g": "val as f",
    }, "a repeat within a split is not a leak"


def test_first_row_of_an_id_stays(tmp_path: Path) -> None:
    rows = crossed([image("a", "train"), image("a", "test", provenance="again")], tmp_path)
    assert [row["id_of"] for row in rows] == ["this row", "a"]
    assert [row["also_in"] for row in rows] == ["", ""], "a repeated row is not a leak as well"


def test_image_state_of_rows() -> None:
    rows = [{"statement_id": n, "image_id": n, "text": "x", "provenance": ""} for n in "abc"]
    states = [
        row["image_state"]
        for row in add_derived_columns(
            "statements", rows, CrossFacts(images={"a": image("a", "train")}, quarantined={"b"})
        )
    ]
    assert states == ["good", "quarantined", "unknown"]


def box(x1: float | None, y1: float, x2: float, y2: float) -> dict[str, Any]:
    corners = {"x1": x1, "y1": y1, "x2": x2, "y2": y2}
    rows = [{"object_id": "o", "image_id": "a", "category": "cup", "provenance": "", **corners}]
    return add_derived_columns("objects", rows, CrossFacts(images={"a": image("a", "train")}))[0]


def test_boxes() -> None:
    inside = box(0, 0, 64, 48)
    assert (inside["shorter_side"], inside["overhang"]) == (48, 0)
    assert box(5, 5, 5, 9)["shorter_side"] == 0
    assert box(9, 5, 5, 9)["shorter_side"] == -4
    assert box(-2, 0, 5, 5)["overhang"] == 2
    assert box(0, -3, 5, 5)["overhang"] == 3
    assert box(0, 0, 68, 5)["overhang"] == 4
    assert box(0, 0, 5, 53)["overhang"] == 5
    assert box(0, 0, math.inf, 5)["shorter_side"] == -math.inf
    assert box(None, 0, 1, 1)["shorter_side"] is None
    assert box(math.nan, 0, 1, 1)["overhang"] is None
