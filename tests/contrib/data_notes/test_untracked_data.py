"""Data that neither git nor DVC tracks is named with the command that tracks it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from cloned_project import commit, new_clone, run, run_in_process
from photos import photo

from vlp_models.common.workspace import Workspace
from vlp_models.contrib.data_notes.untracked import find_untracked
from vlp_models.params import DatasetParams, load_params

PAIRS = "data.pairs={format: pairs, root: data/raw/pairs, pairs: pairs.csv}"
ADD = "dvc add data/raw/pairs && git add data/raw/pairs.dvc"
SENTENCE = (
    "`data.pairs.root: data/raw/pairs` is in neither git nor DVC, so a clone, a colleague and `dvc exp run --temp` "
    f"will not have it: run `{ADD}`"
)


@pytest.mark.slow
def test_own_pairs_are_missing_elsewhere_until_the_named_command_is_run(tmp_path: Path) -> None:
    project = tmp_path / "project"
    project.mkdir()
    new_clone(project)
    folder = project / "data" / "raw" / "pairs"
    folder.mkdir(parents=True)
    for number in range(6):
        photo(number).save(folder / f"{number}.png")
    (folder / "pairs.csv").write_text("image,caption\n" + "".join(f"{n}.png,a photo\n" for n in range(6)))
    assert SENTENCE in run_in_process(project, "vlp", "use", "--set", PAIRS).stderr
    assert SENTENCE in run_in_process(project, "vlp", "plan").stderr.splitlines()
    commit(project, "without the photos")
    alone = run(project, "dvc", "exp", "run", "--temp", "prepare@pairs", check=False)
    assert alone.returncode and "data/raw/pairs" in alone.stderr

    run(project, "bash", "-c", ADD)
    assert run(project, "git", "diff", "--cached", "--name-only").stdout.split() == ["data/raw/pairs.dvc"]
    assert "neither git" not in run_in_process(project, "vlp", "plan").stderr
    commit(project, "with the photos")
    run(project, "dvc", "exp", "run", "--temp", "prepare@pairs")


def test_every_file_of_a_dataset_outside_of_its_folder_is_checked(tmp_path: Path) -> None:
    new_clone(tmp_path)
    lists = tmp_path / "data" / "lists"
    lists.mkdir(parents=True)
    (lists / "b.json").write_text("{}")
    commit(tmp_path, "one of two lists")
    (lists / "a.json").write_text("{}")
    files = {"captions": {"all": ["../../lists/a.json", "../../lists/b.json"]}}
    genome = DatasetParams(format="coco", root="data/raw/vg", options=files)
    params = replace(load_params(tmp_path / "params.yaml"), data={"vg": genome})
    (sentence,) = find_untracked(params, Workspace(tmp_path))
    assert sentence.startswith("`data.vg: data/lists/a.json` is in neither git nor DVC")


def test_what_cannot_be_added_below_an_ignored_folder_is_reported(tmp_path: Path) -> None:
    project = tmp_path / "project"
    project.mkdir()
    new_clone(project)
    (project / "data" / "raw" / "deep" / "pairs").mkdir(parents=True)
    (project / "data" / "kept").mkdir()
    (project / "data" / "kept" / "pairs.csv").write_text("image,caption\n")
    (tmp_path / "outside").mkdir()
    for folder in (project / "data" / "raw" / "deep" / "pairs", tmp_path / "outside"):
        (folder / "pairs.csv").write_text("image,caption\n")
    commit(project, "a small dataset in git")
    for name, root in {"deep": "data/raw/deep/pairs", "kept": "data/kept", "far": f"{tmp_path}/outside"}.items():
        run_in_process(
            project, "vlp", "use", "--set", PAIRS.replace("pairs=", f"{name}=").replace("data/raw/pairs", root)
        )
    (line,) = (one for one in run_in_process(project, "vlp", "plan").stderr.splitlines() if "neither git" in one)
    assert line.startswith("`data.deep.root: data/raw/deep/pairs` is in neither git nor DVC")
    assert "`git check-ignore -v data/raw/deep/pairs.dvc` to see which line of .gitignore to change" in line
    assert "data/raw/deep/pairs.dvc" in run(project, "git", "check-ignore", "-v", "data/raw/deep/pairs.dvc").stdout


def test_data_in_another_git_clone_must_be_copied(tmp_path: Path) -> None:
    """Git refuses a .dvc file there, whatever .gitignore has."""
    project = tmp_path / "project"
    project.mkdir()
    new_clone(project)
    (project / "data" / "raw" / "repository" / "pairs").mkdir(parents=True)
    run(project / "data" / "raw" / "repository", "git", "init", "-q")
    used = run_in_process(project, "vlp", "use", "--set", PAIRS.replace("data/raw/pairs", "data/raw/repository/pairs"))
    (line,) = (one for one in used.stderr.splitlines() if "neither git" in one)
    assert line.endswith(
        "copy it out of the git clone data/raw/repository, for example to data/raw/pairs, "
        "and name the copy in `data.pairs.root`"
    )
