"""Two processes that share SOHO's batches learn what one learns from all of them: gradients, and one dictionary."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from soho_ranks import learn

RANKS = 2


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("soho")
    script = Path(__file__).with_name("soho_ranks.py")
    started = [
        subprocess.Popen([sys.executable, str(script), str(rank), str(RANKS), str(folder)]) for rank in range(RANKS)
    ]
    try:
        assert [process.wait(timeout=120) for process in started] == [0] * RANKS
    finally:
        for process in started:
            process.kill()
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("update", ["paper", "released"])
def test_processes_match_one_process_and_share_a_dictionary(folder: Path, update: str) -> None:
    wanted = learn(update)
    ranks = [load_file(folder / f"{update}-{rank}.safetensors") for rank in range(RANKS)]
    assert (wanted["dictionary.idle"] == 0).any() and wanted["text_embedding.words.weight"].any()
    for name, tensor in wanted.items():
        for found in ranks:
            torch.testing.assert_close(found[name], tensor, rtol=1e-8, atol=1e-9, msg=f"{update}: {name}")
        if name.startswith("dictionary."):
            assert torch.equal(ranks[0][name], ranks[1][name]), name
