"""The further files about the scenes: the same params give the same bytes, and no other file changes."""

from __future__ import annotations

from pathlib import Path

from vlp_models.common.io import hash_path
from vlp_models.params import GeneratorParams
from vlp_models.synthetic.scenes.dataset import write


def test_the_same_params_give_the_same_bytes_and_leave_other_files_alone(tmp_path: Path) -> None:
    options = {"vcr_per_image": 3, "hypotheses_per_image": 4, "pair_sentences": 5}
    for name, further in (("plain", {}), ("one", options), ("two", options)):
        params = GeneratorParams(generator="objects", seed=3, train=8, val=4, test=4, side=64, **further)  # type: ignore[arg-type]
        counts = write(params, tmp_path / name)
        assert {"choices", "hypotheses", "statements"} & counts.keys() == (
            {"choices", "hypotheses", "statements"} if further else set()
        )
    assert hash_path(tmp_path / "one") == hash_path(tmp_path / "two")
    plain = {file.relative_to(tmp_path / "plain") for file in (tmp_path / "plain").rglob("*") if file.is_file()}
    assert all((tmp_path / "one" / file).read_bytes() == (tmp_path / "plain" / file).read_bytes() for file in plain)
    more = {file.relative_to(tmp_path / "one") for file in (tmp_path / "one").rglob("*") if file.is_file()} - plain
    assert {file.parts[0] for file in more} == {
        *("images", "nlvr2", "train.jsonl", "val.jsonl", "test.jsonl"),
        *("snli_ve_train.jsonl", "snli_ve_dev.jsonl", "snli_ve_test.jsonl"),
    }, "in `images` are the images' metadata"
