"""The steps that rebuild a registered version, in a clone and in a project of an installed package."""

from __future__ import annotations

import pytest

from vlp_models.contrib.lineage.commands import rebuild_commands


@pytest.mark.parametrize(
    ("packages", "install"),
    [
        ({}, ["make install"]),
        (
            {"vlp-flows": "0.1.0", "colors-vlp": "1.2"},
            ['pip install "vlp-flows[pipeline]==0.1.0"', "pip install colors-vlp==1.2"],
        ),
    ],
    ids=["clone", "project without a commit"],
)
def test_a_rebuild_installs_the_packages_that_the_version_was_made_with(
    packages: dict[str, str], install: list[str]
) -> None:
    record = {"name": "vlp-vqa", "version": 1, "git_commit": "unknown", "locks": {}, "target": "finetune@tden-vqa"}
    assert rebuild_commands({**record, "packages": packages}) == [*install, "dvc repro finetune@tden-vqa"]
