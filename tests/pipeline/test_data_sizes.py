"""`vlp plan` states what too few images, or no val split, rule out, before anything is trained."""

from __future__ import annotations

import shutil
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import pytest
from PIL import Image

from vlp_models.cli.main import main
from vlp_models.cli.presets import apply_overlay
from vlp_models.common.workspace import Workspace
from vlp_models.data.tables import read_table
from vlp_models.params import Params, load_params
from vlp_models.pipeline.data_sizes import count_images, explain_sizes
from vlp_models.pipeline.stages import prepare

ROOT = Path(__file__).parents[2]
SECOND = "finetune.second={task: captioning, start: initial/tden, sources: {pairs: 1}}"


def make_project(root: Path, rows: Sequence[str], *settings: str) -> tuple[Params, Workspace]:
    """Return own pairs with these rows, without retrieval and packages."""
    shutil.copy(ROOT / "params.yaml", root)
    (root / "data/raw/pairs").mkdir(parents=True)
    (root / "data/raw/pairs/pairs.csv").write_text("\n".join(rows) + "\n", encoding="utf-8")
    plain = ["features.source=grid", "tokenizer.source=train", "tokenizer.vocab=", "models.tden.text_init="]
    off = ["pretrain.tden.recipe.objectives.moc=null", "finetune.tden-retrieval=null", "models.tden-dual=null"]
    apply_overlay(root / "params.yaml", ROOT / "vlp_models" / "presets" / "own-pairs.yaml", [*plain, *off, *settings])
    return load_params(root / "params.yaml"), Workspace(root)


def rows(**splits: int) -> list[str]:
    found = [f"{split}{i}.jpg,a caption,{split}" for split, count in splits.items() for i in range(count)]
    return ["image,caption,split", *found, *found]  # every image twice


def test_without_val_plan_states_what_is_ranked_on_what(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    make_project(tmp_path, rows(train=40, test=20), SECOND)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.argv", ["vlp", "plan"])
    with pytest.raises(SystemExit):
        main()
    sentence = (
        "captioning: runs are ranked on test by CIDEr, and the best is judged there too (no val image in pairs), so "
        "its gain is biased upward"
    )
    assert sentence in capsys.readouterr().err.splitlines()


@pytest.mark.parametrize(
    ("splits", "settings", "expected"),
    [
        ({"train": 40, "val": 5, "test": 20}, [SECOND], []),
        (
            {"train": 40, "test": 20},
            [],
            ["captioning: one run, so nothing is ranked (no val image in pairs); it is judged on test"],
        ),
        (
            {"train": 40, "val": 5, "test": 20},
            [SECOND, "evaluate.splits=[test]"],
            [
                "captioning: runs are ranked on test by CIDEr, and the best is judged there too (`evaluate.splits` "
                "lacks val), so its gain is biased upward"
            ],
        ),
        (
            {"train": 40, "val": 5, "test": 19},
            ["promotion.min_images=10"],
            [
                "data.pairs has 64 images: 40 train, 5 val, 19 test",
                "too few test images (19) for 95% intervals, which need 20: none are reported",
            ],
        ),
        (
            {"train": 40, "val": 5, "test": 25},
            ["promotion.min_images=30"],
            [
                "data.pairs has 70 images: 40 train, 5 val, 25 test",
                "too few test images (25) for the gate, which needs 30 (`promotion.min_images`): it will answer "
                '`inconclusive`, and a first champion needs `vlp promote TASK --force "why"`',
            ],
        ),
    ],
    ids=["enough", "one run without val", "val not evaluated", "no intervals", "stricter gate"],
)
def test_sentences(tmp_path: Path, splits: dict[str, int], settings: list[str], expected: list[str]) -> None:
    assert explain_sizes(*make_project(tmp_path, rows(**splits), *settings)) == expected


def test_counts_are_those_of_prepare(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    names = [f"{i}.png" for i in range(30)]
    listed = [f"{name},a caption,{f'series {i % 7}' if i % 2 else ''}" for i, name in enumerate(names)]
    params, workspace = make_project(
        tmp_path, ["image,caption,group", *listed], "data.pairs.group_near_duplicates=false"
    )
    for i, name in enumerate(names):
        Image.new("RGB", (40, 40), (8 * i, 255 - 8 * i, i)).save(workspace.raw("pairs") / name)
    monkeypatch.chdir(tmp_path)
    expected = count_images(params, workspace, "pairs")
    assert expected.total() == 30 and len(expected) == 3
    prepare.run(params, workspace, "pairs")
    assert Counter(read_table("images", workspace.interim("pairs"))["split"].to_pylist()) == expected
    (workspace.raw("pairs") / "pairs.csv").unlink()
    assert not count_images(params, workspace, "pairs"), "a missing file is named by `prepare`"
