"""examples/coca: a plugin family that passes the checks of `vlp try`."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from vlp_models.common.plugins import use_plugins
from vlp_models.contrib.plugin_kit.conformance.families import try_family
from vlp_models.contrib.plugin_kit.conformance.scenes import SampleScenes, write_sample_scenes
from vlp_models.contrib.plugin_kit.conformance.trial import build_trial, pretraining_batch

EXAMPLE = Path(__file__).parents[3] / "examples" / "coca" / "coca.py"


@pytest.fixture(scope="module")
def scenes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SampleScenes]:
    """Return the scenes; the plugin is in use."""
    folder, path = tmp_path_factory.mktemp("project"), list(sys.path)
    (folder / "plugins").mkdir()
    shutil.copyfile(EXAMPLE, folder / "plugins" / "coca.py")
    use_plugins({"families": {"coca": "plugins.coca:CoCa"}}, folder)
    yield write_sample_scenes(tmp_path_factory.mktemp("scenes"))
    use_plugins({}, folder)
    sys.path[:] = path


def test_it_passes_the_checks_of_a_family(scenes: SampleScenes) -> None:
    results = list(try_family("coca", None, scenes))
    assert [f"{one.check}: {one.problem}" for one in results if one.problem] == []
    tried = {one.check for one in results}
    assert {"objective contrast", "objective caption", "task captioning", "task retrieval", "task vqa"} <= tried


def test_words_do_not_read_later_words_and_cls_reads_all(scenes: SampleScenes) -> None:
    trial = build_trial("coca", {}, scenes)
    model: Any = trial.model.eval()
    batch = pretraining_batch(trial, seeded=False, last=4)
    text = batch.text
    last_N = text.mask_BT.sum(1) - 1
    changed = text.ids_BT.clone()
    changed[torch.arange(len(text)), last_N] = 7  # in place of [SEP]
    other = type(text)(ids_BT=changed, mask_BT=text.mask_BT, owner_N=text.owner_N)
    with torch.no_grad():
        (words, cls), (words_2, cls_2) = model.encode_text(text), model.encode_text(other)
        logits, logits_2 = (model.generation_logits(batch.image, one) for one in (text, other))
    before = torch.arange(words.shape[1]) < last_N[:, None]
    torch.testing.assert_close(words_2[before], words[before])
    torch.testing.assert_close(logits_2[before], logits[before])
    assert bool(((cls - cls_2).abs().amax(1) > 1e-3).all())
