"""Plugins: names in params.yaml or entry points that become models, tasks, formats and generators."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from vlp_models.common import plugins
from vlp_models.common.plugins import add_plugins, import_target, use_plugins
from vlp_models.common.source_hash import hash_sources, plugin_packages
from vlp_models.errors import ParamsError
from vlp_models.pipeline.stages.plan import code_modules
from vlp_models.tasks import TASKS, task_class

TARGET = "plugins.guess:Guess"


@pytest.fixture
def project(tmp_path: Path) -> Iterator[Path]:
    """Return a project with plugins/guess.py, which imports a module next to it and one of the package."""
    folder = tmp_path / "plugins"
    folder.mkdir()
    (folder / "guess.py").write_text("from plugins import helper\nimport vlp_models.metrics.vqa\nclass Guess: pass\n")
    (folder / "helper.py").write_text("x = 1\n")
    (folder / "unused.py").touch()
    path = list(sys.path)
    yield tmp_path
    use_plugins({}, tmp_path)
    sys.path[:] = path
    for name in [name for name in sys.modules if name.partition(".")[0] == "plugins"]:
        del sys.modules[name]


def test_a_plugin_is_an_entry_of_the_table_until_another_project_is_read(project: Path) -> None:
    builtin = list(TASKS)
    use_plugins({"tasks": {"guess": TARGET}}, project)
    assert list(TASKS) == [*builtin, "guess"] and task_class("guess").__name__ == "Guess"
    assert code_modules()["tasks"]["guess"] == TARGET
    use_plugins({}, project)
    assert list(TASKS) == builtin


def test_an_unknown_name_of_an_absent_folder_names_the_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vlp_models.params.schema.absent_entries", lambda kind: {"paint": f"{kind}_folder"})
    with pytest.raises(ParamsError, match="unknown task 'paint'; it needs vlp_models/contrib/tasks_folder"):
        task_class("paint")


def test_its_code_is_hashed_with_what_it_imports(project: Path) -> None:
    use_plugins({"tasks": {"guess": TARGET}}, project)
    assert plugin_packages() == {"plugins": project / "plugins"}
    before = hash_sources([TARGET])
    assert {TARGET, "plugins:guess.py", "plugins:helper.py", "metrics/vqa.py"} <= before.keys()
    assert "plugins:unused.py" not in before
    (project / "plugins" / "helper.py").write_text('"""A docstring."""\nx = 1  # one\n')
    assert hash_sources([TARGET]) == before
    (project / "plugins" / "helper.py").write_text("x = 2\n")
    changed = {name for name, digest in hash_sources([TARGET]).items() if digest != before[name]}
    assert changed == {"plugins:helper.py"}


def test_plugins_of_another_project_take_their_place(project: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    other = tmp_path_factory.mktemp("other")
    (other / "plugins").mkdir()
    (other / "plugins" / "guess.py").write_text("class Guess: other = True\n")
    for folder in (project, other, project):
        use_plugins({"tasks": {"guess": TARGET}}, folder)
        assert hasattr(task_class("guess"), "other") == (folder == other)
        assert plugin_packages() == {"plugins": folder / "plugins"}
        # What another process is sent.
        assert plugins._on_path == {str(folder)}


def test_plugins_of_a_registered_version_come_next_to_those_of_the_project(project: Path, tmp_path: Path) -> None:
    """A version may have been registered when the project had other plugins."""
    (tmp_path / "code" / "plugins").mkdir(parents=True)
    (tmp_path / "code" / "plugins" / "older.py").write_text("class Older: pass\n")
    use_plugins({"tasks": {"guess": TARGET}}, project)
    add_plugins({"tasks": {"older": "plugins.older:Older"}}, tmp_path / "code")
    assert task_class("older").__name__ == "Older" and task_class("guess").__name__ == "Guess"
    use_plugins({"tasks": {"guess": TARGET}}, project)
    assert "older" not in TASKS


def test_installed_packages_declare_plugins_as_entry_points(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    info = project / "site" / "other-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: other\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[vlp_flows.tasks]\ncounts = other_tasks:Counts\nvqa = other_tasks:Counts\n")
    (project / "site" / "other_tasks.py").write_text("class Counts: pass\n")
    monkeypatch.syspath_prepend(project / "site")
    plugins._entry_points.cache_clear()
    use_plugins({}, project)
    assert plugins._active.get("tasks", {}) == {"counts": "other_tasks:Counts"}, "vqa is built in"
    assert task_class("counts").__name__ == "Counts"
    assert "other_tasks:other_tasks.py" in hash_sources([TASKS["counts"]])
    plugins._entry_points.cache_clear()


@pytest.mark.parametrize(
    ("declared", "message"),
    [
        ({"task": {"a": TARGET}}, "`plugins.task`: no such kind of plugin; known: families, tasks, formats"),
        ({"tasks": {"vqa": TARGET}}, "`plugins.tasks.vqa`: vqa is built in; choose another name"),
        ({"tasks": {"a b": TARGET}}, "`plugins.tasks.a b`: a name has letters, digits"),
        ({"tasks": {"a": "plugins.guess"}}, "`plugins.tasks.a: plugins.guess`: expected `module:object`, such as"),
        ({"tasks": {"a": "plugins.gues:A"}}, r"`plugins.tasks.a: plugins.gues:A`: .*plugins/gues\.py does not exist"),
        ({"tasks": {"a": "not_there.b:A"}}, "no package not_there is installed"),
    ],
    ids=["kind", "built in", "name", "target", "file", "package"],
)
def test_a_wrong_declaration_is_refused(project: Path, declared: dict[str, dict[str, str]], message: str) -> None:
    with pytest.raises(ParamsError, match=message):
        use_plugins(declared, project)


@pytest.mark.parametrize(
    ("code", "message"),
    [
        ("import not_there\n", r"plugins/guess\.py:1: ModuleNotFoundError: No module named 'not_there'"),
        ("def f(:\n", "SyntaxError"),
        ("x = 1\n", r"plugins/guess\.py: AttributeError: .* has no attribute 'Guess'"),
        ("1 / 0\n", r"plugins/guess\.py:1: ZeroDivisionError: division by zero"),
    ],
    ids=["import", "syntax", "name", "error"],
)
def test_a_plugin_that_cannot_be_imported_names_the_file(project: Path, code: str, message: str) -> None:
    (project / "plugins" / "guess.py").write_text(code)
    use_plugins({"tasks": {"guess": TARGET}}, project)
    with pytest.raises(ParamsError, match=f"plugin plugins.guess:Guess: cannot be imported: .*{message}"):
        import_target(TARGET)
