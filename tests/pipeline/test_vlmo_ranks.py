"""Contrast over an update, in two processes: the large batch's gradient, also where one of them has no pairs left."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from pixel_toys import train, write_shards
from safetensors.torch import load_file
from toy_dataset import write_tokenizer
from vlmo_update_ranks import COMMON


@pytest.mark.slow
def test_two_processes_and_three_micro_batches_match_one_batch(tmp_path: Path) -> None:
    """25 pairs at once, or 6 and 6, 6 and 6, 1 and none."""
    write_shards(tmp_path / "shards", train=25)
    write_tokenizer(tmp_path / "tokenizer")
    script = str(Path(__file__).with_name("vlmo_update_ranks.py"))
    subprocess.run([sys.executable, script, str(tmp_path)], check=True, timeout=150)
    first, second = (load_file(tmp_path / "two" / f"weights-{rank}.safetensors") for rank in (0, 1))
    assert all(torch.equal(weight, second[name]) for name, weight in first.items())

    large, of_large = train(tmp_path, tmp_path / "large", batch_size=25, **COMMON)
    apart, _ = train(tmp_path, tmp_path / "apart", batch_size=12, accumulate=3, **COMMON)
    (row,) = json.loads((tmp_path / "two" / "rows.json").read_text())
    assert row["itc"] == pytest.approx(of_large.rows[0]["itc"], rel=1e-5)
    assert row["gradient_norm"] == pytest.approx(of_large.rows[0]["gradient_norm"], rel=1e-4)
    wanted = large.state_dict()
    near, far = (
        sum(float((wanted[n] - w).abs().sum()) for n, w in other.items()) for other in (first, apart.state_dict())
    )
    assert near < 0.001 * far, (near, far)
