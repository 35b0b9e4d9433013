"""`vlp plan` states what too few images, or no val split, rule out, before anything is trained."""

from __future__ import annotations

import shutil
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import cast

import pytest
from PIL import Image

from vlp_models.cli.main import main
from vlp_models.cli.presets import apply_overlay
from vlp_models.common.workspace import Workspace
from vlp_models.contrib.data_notes.listing import check_pairs
from vlp_models.contrib.data_notes.sizes import check_dataset, explain_sizes
from vlp_models.data.formats import read_source, source_params
from vlp_models.data.formats.pairs import PairsParams
from vlp_models.data.tables import read_table
from vlp_models.params import DatasetParams, Params, load_params
from vlp_models.pipeline.stages import prepare

ROOT = Path(__file__).parents[3]
SECOND = "finetune.second={task: captioning, start: initial/tden, sources: {pairs: 1}}"


def make_project(root: Path, rows: Sequence[str], *settings: str) -> tuple[Params, Workspace]:
    """Return own pairs with these rows, without retrieval and packages."""
    shutil.copy(ROOT / "params.yaml", root)
    (root / "data/raw/pairs").mkdir(parents=True)
    (root / "data/raw/pairs/pairs.csv").write_text("\n".join(rows) + "\n", encoding="utf-8")
    for row in rows[1:]:
        (root / "data/raw/pairs" / row.partition(",")[0]).touch()
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
                "more test images can be named in the column `split` of the listing",
            ],
        ),
        (
            {"train": 40, "val": 5, "test": 25},
            ["promotion.min_images=30"],
            [
                "data.pairs has 70 images: 40 train, 5 val, 25 test",
                "too few test images (25) for the gate, which needs 30 (`promotion.min_images`): its verdict will be "
                '`inconclusive`, and a first champion needs `vlp promote TASK --force "why"`',
                "more test images can be named in the column `split` of the listing",
            ],
        ),
    ],
    ids=["enough", "one run without val", "val not evaluated", "no intervals", "stricter gate"],
)
def test_sentences(tmp_path: Path, splits: dict[str, int], settings: list[str], expected: list[str]) -> None:
    assert explain_sizes(*make_project(tmp_path, rows(**splits), *settings)) == expected


@pytest.mark.parametrize("sources", ["{pairs: 1, ingested: 1}", "{ingested: 1}"])
def test_ingested_pairs_that_are_only_trained_on_need_no_test_images(tmp_path: Path, sources: str) -> None:
    params, workspace = make_project(
        tmp_path,
        rows(train=40, val=5, test=20),
        "data.ingested={format: pairs, root: data/raw/new, pairs: pairs.csv}",
        "finetune.tden-captioning.sources=null",
        f"finetune.tden-captioning.sources={sources}",
    )
    new = tmp_path / "data/raw/new"
    new.mkdir()
    (new / "pairs.csv").write_text("\n".join(rows(train=3)) + "\n", encoding="utf-8")
    for i in range(3):
        (new / f"train{i}.jpg").touch()
    named = [line for line in explain_sizes(params, workspace) if "images" in line]
    is_tested = "{pairs" in sources
    assert bool(named) is not is_tested, "without another dataset, the run is not tested at all"


def test_counts_are_those_of_prepare(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    names = [f"{i}.png" for i in range(30)]
    listed = [f"{name},a caption,{f'series {i % 7}' if i % 2 else ''}" for i, name in enumerate(names)]
    params, workspace = make_project(
        tmp_path, ["image,caption,group", *listed], "data.pairs.group_near_duplicates=false"
    )
    for i, name in enumerate(names):
        Image.new("RGB", (40, 40), (8 * i, 255 - 8 * i, i)).save(workspace.raw("pairs") / name)
    monkeypatch.chdir(tmp_path)
    expected, problems = check_dataset(params, workspace, "pairs")
    assert not problems and expected.total() == 30 and len(expected) == 3
    prepare.run(params, workspace, "pairs")
    assert Counter(read_table("images", workspace.interim("pairs"))["split"].to_pylist()) == expected


def test_counts_are_those_of_a_split_with_val_cut_from_train(tmp_path: Path) -> None:
    rows = [f"{n}.jpg,a photo,{'test' if n < 20 else 'train'},walk {n // 20}" for n in range(400)]
    (tmp_path / "pairs.csv").write_text("\n".join(["image,caption,split,group", *rows]))
    for n in range(400):
        (tmp_path / f"{n}.jpg").touch()
    source = DatasetParams.of(format="pairs", root=".", pairs="pairs.csv", val_fraction=0.3)
    splits = [row["split"] for row in read_source("p", source, tmp_path)["images"]]
    assert check_pairs("p", cast(PairsParams, source_params("p", source)), tmp_path).images == Counter(splits)


def run_plan(capsys: pytest.CaptureFixture[str]) -> tuple[int, str]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sys.argv", ["vlp", "plan"])
        with pytest.raises(SystemExit) as ended:
            main()
    return int(ended.value.code or 0), capsys.readouterr().err


def test_plan_reports_rows_and_images_that_will_be_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    params, workspace = make_project(tmp_path, [*rows(train=40, val=10, test=20)[:71], "extra.jpg,cafe,test"])
    monkeypatch.chdir(tmp_path)
    folder = workspace.raw("pairs")
    (folder / "test1.jpg").unlink()
    (folder / "train39.jpg").rename(folder / "trian39.jpg")
    (folder / "pairs.csv").write_bytes((folder / "pairs.csv").read_bytes().replace(b"cafe", b"caf\xe9"))
    assert check_dataset(params, workspace, "pairs")[0] == Counter(train=39, val=10, test=19)
    code, reported = run_plan(capsys)
    assert code == 0
    listing = "data/raw/pairs/pairs.csv"
    assert f"data.pairs: 1 row cannot be read: {listing}:72: `caption` is not UTF-8: " in reported
    assert (
        f"data.pairs: 2 of the first 70 images are missing, the first: {listing}:41: train39.jpg: no such file; the "
        "nearest name there is trian39.jpg\n"
    ) in reported
    (folder / "trian39.jpg").rename(folder / "train39.jpg")
    assert f"1 image is missing: {listing}:53: test1.jpg: no such file\n" in run_plan(capsys)[1], (
        "test10.jpg is another image, not a typo"
    )


@pytest.mark.parametrize(
    ("header", "sentence"),
    [
        ("image,captoin,split", "data/raw/pairs/pairs.csv:1: unknown column `captoin`; did you mean `caption`?"),
        ("image,text,split", "data/raw/pairs/pairs.csv:1: the first line must name the columns image, caption"),
        (None, "data/raw/pairs/pairs.csv: no such file"),
    ],
    ids=["misspelled", "other name", "missing"],
)
def test_plan_refuses_a_listing_that_cannot_be_read(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    header: str | None,
    sentence: str,
) -> None:
    make_project(tmp_path, rows(train=40, val=5, test=20))
    monkeypatch.chdir(tmp_path)
    listing = tmp_path / "data/raw/pairs/pairs.csv"
    content = listing.read_text()
    listing.unlink()
    if header:
        listing.write_text(content.replace("image,caption,split", header))
    code, reported = run_plan(capsys)
    assert code == 2 and sentence in reported and "have 0 images" not in reported
