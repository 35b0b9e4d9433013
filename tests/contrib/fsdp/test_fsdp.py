"""Sharded trainings over two processes on a CPU; rank_cases.py has the gradients of every loss."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from rank_runs import EVERYTHING, STILL, apart, continues_elsewhere, matches_one_process, result, run
from toy_dataset import Toy, make_toy, write_shards, write_tokenizer, write_workspace

from vlp_models.common.portable import NEEDED, cpu_flags
from vlp_models.errors import MissingToolError, ParamsError
from vlp_models.pipeline.check_params import check_runs
from vlp_models.training import STRATEGIES


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """43 training samples in batches of 6 leave one for an epoch's last batch, so that one process has none of it."""
    folder = tmp_path_factory.mktemp("root")
    write_shards(folder / "shards", train=43, val=7)
    write_tokenizer(folder / "tokenizer")
    return folder


@pytest.mark.slow
@pytest.mark.parametrize(
    "portable",
    [False, pytest.param(True, marks=pytest.mark.skipif(bool(NEEDED - cpu_flags()), reason="needs AVX2"))],
)
def test_two_processes_match_one_process(root: Path, tmp_path: Path, portable: bool) -> None:
    matches_one_process(root, tmp_path, "fsdp", portable)


@pytest.mark.slow
def test_sharded_weights_that_an_update_does_not_use_stay(root: Path, tmp_path: Path) -> None:
    """Updates alternate between objectives; a weight without a gradient has no decay and no momentum."""
    settings = {**EVERYTHING, "mix": "alternate", "optimizer": {"clip_norm": 0.5, "eps": 1e-4, "weight_decay": 0.5}}
    code, stderr = run(root, "alternate", config=STILL, strategy="fsdp", **settings)
    assert code == 0, stderr
    assert apart(tmp_path, root, result(root, "alternate")[0], **settings)[0] < 1e-5


@pytest.mark.slow
def test_a_misspelled_snapshot_metric_stops_all_processes_before_the_first_update(root: Path, tmp_path: Path) -> None:
    metric = {"keep": 1, "metric": "val_los"}
    code, stderr = run(root, str(tmp_path / "work"), snapshots=metric, batch_size=6, strategy="fsdp")
    assert code == 2 and "did you mean `val_loss`" in stderr, stderr


@pytest.mark.parametrize(
    ("settings", "config", "text"),
    [
        ({"devices": 2}, {"pooler_batch_norm": True}, "does not support batch norm"),
        ({"compile": True}, {}, "does not work with"),
    ],
)
def test_what_does_not_work_with_sharded_weights_is_refused(
    tmp_path: Path, settings: dict[str, Any], config: dict[str, Any], text: str
) -> None:
    toy: Toy = make_toy(tmp_path)
    with pytest.raises(ParamsError, match=text):
        toy.fit(tmp_path / "work", toy.model(**config), strategy="fsdp", **settings)


@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("first", "second", "equal"),
    [
        ({"strategy": "fsdp"}, {"strategy": "fsdp"}, True),
        ({"strategy": "fsdp"}, {"devices": 1}, False),
        ({"devices": 1}, {"strategy": "fsdp"}, False),
        ({"strategy": "ddp"}, {"strategy": "fsdp"}, False),
    ],
    ids=["fsdp", "fsdp-one-fsdp", "one-fsdp-one", "ddp-fsdp-ddp"],
)
def test_a_run_goes_on_with_other_processes(
    tmp_path: Path, first: dict[str, Any], second: dict[str, Any], equal: bool
) -> None:
    write_shards(tmp_path / "shards", train=43, val=7)
    write_tokenizer(tmp_path / "tokenizer")
    continues_elsewhere(tmp_path, first, second, equal=equal)


def test_strategy_without_its_folder_is_refused_by_plan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    params = write_workspace(tmp_path, trainer={"strategy": "fsdp"})
    check_runs(params)
    monkeypatch.delitem(STRATEGIES, "fsdp")
    with pytest.raises(MissingToolError, match=r"trainer\.strategy: fsdp` needs vlp_models/contrib/fsdp"):
        check_runs(params)
