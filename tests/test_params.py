"""params.yaml: the shipped file is valid, mistakes are named, presets merge and are valid."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import yaml

from vlp_models.errors import ParamsError
from vlp_models.overlay import apply_overlay
from vlp_models.params import load_params, to_plain

ROOT = Path(__file__).parent.parent


def edited(tmp_path: Path, edit: dict[str, object]) -> Path:
    """A copy of params.yaml with dotted keys replaced."""
    raw = yaml.safe_load((ROOT / "params.yaml").read_text())
    for dotted, value in edit.items():
        *parents, last = dotted.split(".")
        node = raw
        for parent in parents:
            node = node[parent]
        node[last] = value
    path = tmp_path / "params.yaml"
    path.write_text(yaml.safe_dump(raw))
    return path


def test_shipped_params_are_valid_and_plain() -> None:
    params = load_params(ROOT / "params.yaml")
    assert params.pretrain.objectives.keys() == {"mlm", "moc", "ism", "msg"}
    assert yaml.safe_load(yaml.safe_dump(to_plain(params))) == to_plain(params)


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        ({"pretrain.max_epoch": 3}, r"unknown key `pretrain\.max_epoch`; did you mean `max_epochs`"),
        ({"finetune.vqa.optimizer.lrr": 1.0}, r"unknown key `finetune\.vqa\.optimizer\.lrr`; did you mean `lr`"),
        ({"pretrain.batch_size": "many"}, r"`pretrain\.batch_size` must be int, found 'many'"),
        ({"pretrain.batch_size": True}, r"`pretrain\.batch_size` must be int"),
        ({"evaluate.splits": "test"}, r"`evaluate\.splits` must be a list"),
        ({"model": "tden"}, r"`model` must be a section"),
    ],
)
def test_mistakes_are_named(tmp_path: Path, edit: dict[str, object], message: str) -> None:
    with pytest.raises(ParamsError, match=message):
        load_params(edited(tmp_path, edit))


def test_scientific_notation_without_a_dot_is_a_number(tmp_path: Path) -> None:
    path = edited(tmp_path, {"pretrain.optimizer.lr": "1e-4"})
    assert load_params(path).pretrain.optimizer.lr == pytest.approx(1e-4)


def test_missing_file_and_bad_yaml_say_so(tmp_path: Path) -> None:
    with pytest.raises(ParamsError, match="no such file"):
        load_params(tmp_path / "absent.yaml")
    (tmp_path / "bad.yaml").write_text("a: [1,")
    with pytest.raises(ParamsError, match="not valid YAML"):
        load_params(tmp_path / "bad.yaml")


@pytest.mark.parametrize("preset", sorted((ROOT / "presets").glob("*.yaml")), ids=lambda p: p.stem)
def test_every_preset_gives_valid_params(tmp_path: Path, preset: Path) -> None:
    assert preset.read_text().startswith("#"), "a preset begins with its command"
    path = tmp_path / "params.yaml"
    shutil.copy(ROOT / "params.yaml", path)
    assert apply_overlay(path, preset, [])
    load_params(path)


def test_overlay_merges_deletes_assigns_and_keeps_comments(tmp_path: Path) -> None:
    path = tmp_path / "params.yaml"
    shutil.copy(ROOT / "params.yaml", path)
    preset = tmp_path / "preset.yaml"
    preset.write_text("# x\nfinetune: {vqa: null}\npretrain: {optimizer: {lr: 0.5}}\n")
    changes = apply_overlay(path, preset, ["pretrain.max_epochs=9"])
    params = load_params(path)
    assert (params.pretrain.max_epochs, params.pretrain.optimizer.lr) == (9, 0.5)
    assert params.pretrain.optimizer.warmup_fraction == 0.1, "a mapping is merged, not replaced"
    assert "vqa" not in params.finetune
    assert "# The only file to edit" in path.read_text()
    assert "finetune.vqa: removed" in changes


def test_a_refused_overlay_leaves_the_file_alone(tmp_path: Path) -> None:
    path = tmp_path / "params.yaml"
    shutil.copy(ROOT / "params.yaml", path)
    before = path.read_bytes()
    with pytest.raises(ParamsError, match=r"unknown key `pretrain\.speed`"):
        apply_overlay(path, None, ["pretrain.speed=3"])
    assert path.read_bytes() == before
