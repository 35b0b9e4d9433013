"""Shared fixtures: quiet tools, one thread, nothing written outside the test's temporary folder."""

from __future__ import annotations

import functools
import importlib.util
import os
import shutil
from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("DVC_NO_ANALYTICS", "1")
os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
os.environ.setdefault("MLFLOW_ALLOW_PICKLE_DESERIALIZATION", "false")
os.environ.setdefault("GX_ANALYTICS_ENABLED", "false")
os.environ.setdefault("DO_NOT_TRACK", "1")

import pytest
from hypothesis import settings

from vlp_models.common.log import configure_logging
from vlp_models.common.plugins import contrib_folders
from vlp_models.contrib import CONTRIB as FOLDERS

CONTRIB = Path(__file__).parents[1] / "vlp_models" / "contrib"
# Tests that try their subject on the samples or readers of other contrib folders -> those folders
BORROWERS = {
    "benchmarks/test_labeling.py": ["label"],
    "cli/test_presets.py": [
        "augment",
        "detector",
        "public_weights",
        "reasoning_tasks",
        "research_formats",
        "web_scenes",
    ],
    "contrib/bisect/test_points.py": ["ingest"],
    "contrib/boxes/test_boxes.py": ["research_formats"],
    "contrib/bundles/test_replay_copy.py": ["imported_features", "public_weights"],
    "contrib/export/test_export.py": ["detector"],
    "contrib/hub_models/test_fine_tuning.py": ["lora"],
    "contrib/int8/test_int8_export.py": ["export"],
    "contrib/lmms_eval/test_lmms_eval.py": ["export"],
    "contrib/plugin_kit/test_new_plugins.py": ["reasoning_tasks"],
    "contrib/shared_objectives/test_shared_objectives.py": ["plugin_kit"],
    "contrib/demo_page/test_corrections.py": ["ingest"],
    "contrib/drift/test_drift.py": ["ingest"],
    "contrib/stack/test_kills.py": ["notify"],
    "contrib/stack/test_stack.py": ["commit", "notify"],
    "contrib/forgetting/test_withdrawn.py": ["ingest"],
    "contrib/ingest/test_ingest.py": ["hub_datasets"],
    "fuzz/test_fuzz.py": [
        "detector",
        "imported_features",
        "ingest",
        "plugin_kit",
        "reasoning_tasks",
        "research_formats",
    ],
    "flows/test_deployment.py": ["artifacts", "drift", "ingest"],
    "flows/test_unattended.py": ["drift", "ingest"],
    "models/test_images_per_text.py": ["plugin_kit", "reasoning_tasks"],
    "models/test_vlmo_cnn_stem.py": ["public_weights"],
    "pipeline/test_cache_types.py": ["export"],
    "pipeline/test_features_stage.py": ["detector"],
    "objectives/test_several_texts.py": ["plugin_kit"],
    "training/test_distributed_losses.py": ["fsdp"],
    "pipeline/test_crossing_splits.py": ["research_formats"],
    "pipeline/test_crossing_visual_genome.py": ["research_formats"],
    "pipeline/test_languages.py": ["public_weights"],
    "pipeline/test_memory_of_many.py": ["drift"],
    "pipeline/test_odd_pictures.py": ["report_pictures"],
    "registry/test_two_images.py": ["reasoning_tasks", "research_formats"],
    "serving/test_pixel_models.py": ["plugin_kit", "reasoning_tasks"],
    "training/test_streamed_fit.py": ["streaming"],
    "end_to_end/test_new_model.py": ["drift"],
    "end_to_end/test_flickr8k.py": ["public_weights"],
    "end_to_end/test_own_pairs.py": ["data_notes", "public_weights"],
    "contrib/reasoning_tasks/test_scene_entailment.py": ["research_formats"],
    "contrib/reasoning_tasks/test_scene_pairs.py": ["research_formats"],
    "contrib/reasoning_tasks/test_scene_vcr.py": ["research_formats"],
    "contrib/public_weights/test_authors_tden.py": ["reasoning_tasks"],
    "contrib/public_weights/test_authors_vlmo.py": ["reasoning_tasks"],
    "contrib/public_weights/test_import_checkpoint.py": ["reasoning_tasks"],
    "contrib/public_weights/test_import_vlmo.py": ["reasoning_tasks"],
    "contrib/report_pictures/test_report_pictures.py": ["reasoning_tasks"],
    "evaluation/test_report_in_a_browser.py": ["report_pictures"],
    "metrics/test_judgments.py": ["compare"],
    "contrib/lora/test_adapters.py": ["plugin_kit", "reasoning_tasks"],
    "pipeline/test_retrieval_and_vcr.py": ["reasoning_tasks", "research_formats"],
}
# A folder of contrib can be deleted: its tests are ignored then.
collect_ignore = [
    file for file, folders in BORROWERS.items() if not all((CONTRIB / folder).is_dir() for folder in folders)
]
# The docs describe all of contrib.
collect_ignore += ["docs"] if contrib_folders() != list(FOLDERS) else []
collect_ignore += [
    str(tests) for tests in Path(__file__).parent.glob("contrib/*") if not (CONTRIB / tests.name).is_dir()
]

settings.register_profile("here", deadline=None)  # a busy machine is no fault; pytest-timeout ends what hangs
settings.load_profile("here")
configure_logging()  # as every command does; tests read messages with capsys


@pytest.hookimpl(trylast=True)  # only of the selected tests
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Run files that take minutes first, so that no process is left with them at the end.

    The very first one builds `built_project`; its other users come last, so that no process waits for it.
    """
    minutes = {item.path for item in items if item.get_closest_marker("pipeline") or item.get_closest_marker("server")}
    copies = {item.path for item in items if "built_project" in getattr(item, "fixturenames", ())}
    builder = next((item.path for item in items if item.path in copies), None)

    def order(item: pytest.Item) -> int:
        if item.path == builder:
            return 0
        return 2 if item.path in copies else 1 if item.path in minutes else 3

    items.sort(key=order)


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """Return Chromium, or skip where it or playwright is missing (requirements-pictures.lock)."""
    if importlib.util.find_spec("playwright") is None:
        pytest.skip("playwright is not installed: requirements-pictures.lock")
    path = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if path is None:
        pytest.skip("Chromium is not on this machine")
    from playwright.sync_api import sync_playwright

    with sync_playwright() as driver:
        flags = ["--no-sandbox"] if os.geteuid() == 0 else []
        chromium = driver.chromium.launch(executable_path=path, args=flags)
        yield chromium
        chromium.close()


@pytest.fixture(scope="session", autouse=True)
def shared_meteor() -> Iterator[None]:
    """Score the captions of all tests with one METEOR process: it loads its tables for seconds.

    Tests that change PATH or `Meteor` start their own.
    """
    from vlp_models.metrics import caption

    java, meteor_class, meteor_process = shutil.which("java"), caption.Meteor, caption._meteor_process
    with caption.SharedMeteor() as shared, pytest.MonkeyPatch.context() as patch:

        @functools.wraps(meteor_process)
        def process(kept: caption.SharedMeteor | None) -> AbstractContextManager[caption.Meteor | str]:
            is_changed = shutil.which("java") != java or caption.Meteor is not meteor_class
            return meteor_process(kept if kept or is_changed else shared)

        patch.setattr(caption, "_meteor_process", process)
        yield


@pytest.fixture(scope="module")
def few_items_suffice() -> Iterator[None]:
    """Report intervals and ranks for the handful of items that a test has."""
    with pytest.MonkeyPatch.context() as patch:
        # these first: imported after the patch of bootstrap, they would have 1 for good
        patch.setattr("vlp_models.pipeline.stages.evaluate.MIN_GROUPS", 1)
        patch.setattr("vlp_models.metrics.bootstrap.MIN_GROUPS", 1)
        patch.setattr("vlp_models.tasks.retrieval.MAX_CHANCE", 100.0)
        yield


@pytest.fixture(scope="session")
def built_project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a clone of the project after `vlp run` at the tiny size, shared by all test processes: only copy it."""
    from cloned_project import build_project

    folder = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        folder = folder.parent  # of all workers
    return build_project(folder / "built-project")
