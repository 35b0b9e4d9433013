"""examples/referring: a task on located states, outside the package, tried on every family and run by `vlp run`."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from cloned_project import copy_project, run, run_in_process
from paper_families import PAPER_FAMILIES

from vlp_models.common.plugins import import_target, use_plugins
from vlp_models.contrib.plugin_kit.conformance.formats import try_format
from vlp_models.contrib.plugin_kit.conformance.scenes import SampleScenes, write_sample_scenes
from vlp_models.contrib.plugin_kit.conformance.tasks import try_task
from vlp_models.contrib.plugin_kit.conformance.trial import build_trial, generator, make_task, small_config
from vlp_models.params import GeneratorParams, SourceParams
from vlp_models.synthetic.scenes.dataset import write
from vlp_models.synthetic.scenes.scene import SHAPES, Scene, SceneObject, is_at, sample_scene

EXAMPLE = Path(__file__).parents[3] / "examples" / "referring"
PLUGINS = {
    "views": {"expressions": "plugins.referring.view:VIEW"},
    "formats": {"referring_scenes": "plugins.referring.scenes:read"},
    "tasks": {"referring": "plugins.referring.task:Referring"},
}


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    root = tmp_path_factory.mktemp("referring")
    shutil.copytree(EXAMPLE / "plugins", root / "plugins")
    use_plugins(PLUGINS, root)
    yield root
    use_plugins({}, root)


@pytest.fixture(scope="module")
def scenes(project: Path) -> SampleScenes:
    (project / "scenes").mkdir()
    return write_sample_scenes(project / "scenes")


@pytest.mark.parametrize("family", PAPER_FAMILIES)
def test_vlp_try_passes_on_every_family(family: str, scenes: SampleScenes) -> None:
    results = list(try_task("referring", scenes, family))
    assert {result.check: result.problem for result in results if result.problem} == {}
    assert "save and load" in {result.check for result in results}


def test_the_box_of_the_object_is_learned(scenes: SampleScenes) -> None:
    """On the regions of symbols, which are the objects, 60 updates overfit eight scenes."""
    trial = build_trial("tden", small_config("tden"), scenes)
    made = make_task(trial, "referring")
    samples = scenes.samples("expressions", made.reader)[::2]
    batch = made.collate(samples)
    optimizer = torch.optim.Adam(made.parameters(), lr=3e-3)
    for update in range(60):
        loss = made.loss(batch, generator=generator(update)).mean
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    found = made.predict(batch, samples)
    close = [np.abs(np.subtract(p["box"], s["boxes"][0])).max() < 0.05 for p, s in zip(found, samples, strict=True)]
    assert all(close) and all(p["best_overlap"] > 0.5 for p in found)


def fits(text: str, item: SceneObject) -> bool:
    """Return whether an expression is true of an object, from its words."""
    head, _, place = text.removeprefix("the ").partition(" in the ")
    words = head.replace(" at the ", " @").replace(" on the ", " @").split()
    places = [word[1:] for word in words if word.startswith("@")] + ([place] if place else [])
    own = {item.shape, item.color, item.size, item.texture}
    return all(word in own for word in words if not word.startswith("@")) and all(is_at(item, p) for p in places)


def test_an_expression_is_true_of_one_object_and_no_longer_than_needed(project: Path) -> None:
    expression = import_target("plugins.referring.scenes:expression")
    lengths, skipped = [], 0
    for seed in range(150):
        scene: Scene = sample_scene(np.random.default_rng(seed), image_id="1", split="train", side=96)
        for item in scene.objects:
            text = expression(item, scene)
            if not text:
                skipped += 1
                continue
            assert [fits(text, other) for other in scene.objects].count(True) == 1 and fits(text, item), text
            if sum(other.shape == item.shape for other in scene.objects) == 1:
                assert text == f"the {item.shape}"
            lengths.append(len(text.split()))
    assert set(SHAPES) and skipped < len(lengths) / 5 and min(lengths) == 2 and max(lengths) > 3


def test_the_format_reads_what_the_generator_writes(project: Path) -> None:
    sizes = {"train": 5, "val": 2, "test": 2, "side": 96, "questions_per_image": 1}
    write(GeneratorParams(generator="objects", seed=3, **sizes), project / "raw")
    found = {r.check: r for r in try_format(SourceParams(format="referring_scenes", root="raw"), project)}
    assert not [r for r in found.values() if r.problem]
    assert any("expressions" in r.check or "expressions" in r.detail for r in found.values())


@pytest.mark.pipeline
@pytest.mark.slow
@pytest.mark.long
@pytest.mark.timeout(1200)
def test_the_example_runs_in_a_project(built_project: Path, tmp_path: Path) -> None:
    """The README's commands at a small size: only the new stages run, and the scores are in the report's folder."""
    folder = copy_project(built_project, tmp_path / "project")
    shutil.copytree(EXAMPLE / "plugins" / "referring", folder / "plugins" / "referring")
    (folder / "presets").mkdir(exist_ok=True)
    shutil.copy(EXAMPLE / "presets" / "referring.yaml", folder / "presets")
    small = (
        *(f"generate.referring.{name}={size}" for name, size in (("train", 16), ("val", 6), ("test", 6), ("side", 96))),
        "finetune.tden-referring.max_epochs=1",
        "tokenizer.sources=[scenes]",  # else new words train everything again
    )
    run_in_process(folder, "vlp", "use", "referring", *(part for one in small for part in ("--set", one)))
    done = run(folder, "vlp", "run", "evaluate@tden-referring")
    assert "Running stage 'pretrain@tden'" not in done.stdout
    scores = json.loads((folder / "reports" / "eval" / "tden-referring" / "scores.json").read_text())
    found = {s["metric"]: s["value"] for s in scores if s["split"] == "test"}
    assert 0 <= found["accuracy"] <= found["reachable"] <= 100
