"""`vlp judge`, and `vlp predict` with as many images as the task takes."""

from __future__ import annotations

from typing import Any

import pytest

from vlp_models.cli import predict as cli
from vlp_models.contrib.reasoning_tasks.commands import judge
from vlp_models.errors import ParamsError


def test_command_line_takes_as_many_images_as_the_task(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    calls: list[Any] = []

    def predictions(task: str, images: list[Any], texts: list[str] | None, model: str) -> list[dict[str, Any]]:
        calls.append((task, images, texts))
        return [{"prediction": True, "p_true": 0.9, "caption": "a cup"}]

    monkeypatch.setattr(cli, "predictions", predictions)
    judge(["a.png"], "one cup")
    judge(["a.png", "b.png"], "two cups")
    cli.predict("nlvr2", ["a.png", "b.png", "two cups"])
    cli.predict("nlvr", ["a.png", "one cup"])
    cli.predict("captioning", ["a.png"])
    assert calls == [
        ("nlvr", ["a.png"], ["one cup"]),
        ("nlvr2", [["a.png", "b.png"]], ["two cups"]),
        ("nlvr2", [["a.png", "b.png"]], ["two cups"]),
        ("nlvr", ["a.png"], ["one cup"]),
        ("captioning", ["a.png"], None),
    ]
    assert capsys.readouterr().out.startswith("true  (p = 0.90)")
    for task, given, message in (
        ("nlvr2", ["a.png", "b.png"], "vlp predict nlvr2 IMAGE IMAGE TEXT: the text is missing: statement"),
        ("nlvr2", ["a.png"], "vlp predict nlvr2 IMAGE IMAGE TEXT: got 1 arguments"),
        ("nlvr", ["a.png", "b.png", "two cups"], "vlp predict nlvr IMAGE TEXT: got 3 arguments"),
        ("nlvr", ["a.png", ""], "the text is missing"),
        ("nlvr", ["a.png", " "], "the text is missing"),
        ("captioning", ["a.png", "b.png"], "vlp predict captioning IMAGE: got 2 arguments"),
    ):
        with pytest.raises(ParamsError, match=message):
            cli.predict(task, given)
    with pytest.raises(ParamsError, match="got 3 images; a statement is about one or two"):
        judge(["a.png"] * 3, "three cups")
