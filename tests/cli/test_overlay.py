"""`vlp use` edits params.yaml in place: it merges, deletes, keeps comments and layout, and checks before it writes."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from dvc.utils.serialize import parse_yaml

from vlp_models.cli.presets import apply_overlay, merge_overlay
from vlp_models.errors import ParamsError
from vlp_models.params import load_params, read_yaml

ROOT = Path(__file__).parents[2]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """Return a copy of params.yaml."""
    return Path(shutil.copy(ROOT / "params.yaml", tmp_path))


def test_overlay_merges_deletes_assigns_and_keeps_comments(tmp_path: Path, path: Path) -> None:
    preset = tmp_path / "preset.yaml"
    preset.write_text("# x\nfinetune: {tden-vqa: null}\npretrain: {tden: {optimizer: {lr: 0.5}}}\n")
    changes = apply_overlay(path, preset, ["pretrain.tden.max_epochs=9"])
    run = load_params(path).pretrain["tden"]
    assert (run.max_epochs, run.optimizer.lr) == (9, 0.5)
    assert run.optimizer.warmup_fraction == 0.1, "a mapping is merged, not replaced"
    assert "tden-vqa" not in load_params(path).finetune
    assert "# The only file to edit" in path.read_text()
    assert "finetune.tden-vqa: removed" in changes


def test_nulls_create_nothing_where_their_key_is_missing(tmp_path: Path, path: Path) -> None:
    preset, before = tmp_path / "preset.yaml", path.read_bytes()
    preset.write_text("# x\npretrain: {absent: {optimizer: {groups: null}}}\nmodels: {absent: {text_init: null}}\n")
    assert apply_overlay(path, preset, []) == [] and path.read_bytes() == before
    preset.write_text("# x\npretrain: {tden: {sources: {scenes: 2, elsewhere: null}}}\n")
    assert apply_overlay(path, preset, []) == ["pretrain.tden.sources: (new) -> {'scenes': 2}"]
    assert load_params(path).pretrain["tden"].sources == {"scenes": 2}


def test_a_preset_adds_runs_but_never_replaces_one(tmp_path: Path, path: Path) -> None:
    apply_overlay(path, ROOT / "vlp_models" / "presets" / "tden-two-pass.yaml", [])
    params = load_params(path)
    assert list(params.finetune) == ["tden-captioning", "tden-vqa", "tden-two-pass-captioning", "tden-two-pass-vqa"]
    assert params.model_of("tden-two-pass-vqa") == "tden"
    preset, before = tmp_path / "preset.yaml", path.read_bytes()
    preset.write_text("# x\nfinetune: {tden-vqa: {task: captioning, start: pretrain/tden}}\n")
    with pytest.raises(ParamsError, match=r"`finetune\.tden-vqa` is used by an entry with `task: vqa`"):
        apply_overlay(path, preset, [])
    assert path.read_bytes() == before


def test_overlay_keeps_link_and_mode_and_prints_no_secret(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole, path = tmp_path / "elsewhere.yaml", tmp_path / "params.yaml"
    shutil.copy(ROOT / "params.yaml", whole)
    whole.chmod(0o600)
    path.symlink_to(whole)
    copymode, modes = shutil.copymode, []

    def copy_mode(source: Path, target: Path) -> None:
        modes.append(target.stat().st_mode & 0o777)
        copymode(source, target)

    monkeypatch.setattr(shutil, "copymode", copy_mode)
    (change,) = apply_overlay(path, None, ["flow.webhook=https://hooks.example.org/services/T0/B0/HUSH"])
    assert change.startswith("flow.webhook: ") and "HUSH" not in change
    assert path.is_symlink() and whole.stat().st_mode & 0o777 == 0o600
    assert modes == [0o600], "at no time a wider mode"
    assert load_params(path).flow.webhook.endswith("HUSH")
    for setting in ("flow.webhook=[HUSH", "flow.webhook=*HUSH", "flow.webhook:HUSH"):
        with pytest.raises(ParamsError, match=r"^--set flow\.webhook: ") as error:
            apply_overlay(path, None, [setting])
        assert "HUSH" not in str(error.value)


def test_overlay_keeps_line_endings(path: Path) -> None:
    path.write_bytes((ROOT / "params.yaml").read_bytes().replace(b"\n", b"\r\n"))
    for epochs in (9, 8):
        apply_overlay(path, None, [f"pretrain.tden.max_epochs={epochs}"])
        assert load_params(path).pretrain["tden"].max_epochs == epochs
        changed = (ROOT / "params.yaml").read_text().replace("    max_epochs: 1\n", f"    max_epochs: {epochs}\n")
        assert path.read_bytes() == changed.encode().replace(b"\n", b"\r\n"), "every other byte stays"


@pytest.mark.parametrize(
    "word", ["on", "No", "1:30", "010", "0o10", "1e-4", "1E+12", "08", "1_000", "0x1f", ".inf", "~x", "2024-01-01"]
)
def test_a_value_is_one_in_a_preset_a_setting_params_yaml_and_dvc(tmp_path: Path, path: Path, word: str) -> None:
    """YAML 1.1 and 1.2 read most of these words as different values; in quotes each is a text."""
    preset = tmp_path / "preset.yaml"
    preset.write_text(f"launchers: {{slurm: {{options: {{a: {word}, b: '{word}'}}}}}}\n")
    merged = merge_overlay(path, preset, [f"launchers.slurm.options.c={word}"])
    path.write_text(merged.text)
    recorded = parse_yaml(path.read_text(), path)
    assert read_yaml(path) == merged.raw == recorded
    value = parse_yaml(f"x: {word}", path)["x"]
    assert recorded["launchers"]["slurm"]["options"] == {"a": value, "b": word, "c": value}


def test_what_is_refused_leaves_the_file_unchanged(path: Path) -> None:
    before = path.read_bytes()
    with pytest.raises(ParamsError, match=r"unknown key `pretrain\.tden\.speed`"):
        apply_overlay(path, None, ["pretrain.tden.speed=3"])
    assert path.read_bytes() == before
    path.write_text((ROOT / "params.yaml").read_text() + "launchers: {slurm: {options: {a: &a [1], b: *a}}}\n")
    before = path.read_bytes()
    with pytest.raises(ParamsError, match=r"line \d+: YAML aliases \(`\*a`\) are not supported; write the value out"):
        apply_overlay(path, None, ["pretrain.tden.seed=3"])
    assert path.read_bytes() == before


def test_what_overlay_does_not_change_is_read_as_before(path: Path) -> None:
    whole = (ROOT / "params.yaml").read_text()
    path.write_text(whole.replace("  torch_threads: 0 ", "  compile: True\n  torch_threads: 0 "))
    settings = ["pretrain.tden.optimizer.groups.object_encoder.lr=1e-4", "promotion.tasks.vqa.relevant_gain=1e0"]
    for _ in range(2):  # the second time, they are there
        merged = merge_overlay(path, None, settings)
        path.write_text(merged.text)
        params = load_params(path)
        assert params == merged.params and params.trainer.compile and "compile: True\n" in merged.text
        assert params.pretrain["tden"].optimizer.groups["object_encoder"].lr == 1e-4
        assert params.promotion.tasks["vqa"].relevant_gain == 1.0


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("a.b=[1", r"--set a\.b: the value is not valid YAML"),
        ("trainer=*x", r"--set trainer: the value is not valid YAML"),
        ("models={tden: foo}", "models.tden"),
        ("data=text", "data"),
        ("flow.webhook_timeout=1e10", "should be less than or equal to 600"),
        ("flow.webhook_timeout=.inf", "should be less than or equal to 600"),
        ("promotion.tasks={vqq: {min_gain: 1}}", r"`promotion\.tasks: vqq`.*did you mean `vqa`"),
    ],
)
def test_overlay_errors_name_the_setting(tmp_path: Path, path: Path, setting: str, message: str) -> None:
    preset = tmp_path / "preset.yaml"
    with pytest.raises(ParamsError, match=message):
        apply_overlay(path, None, [setting])
    key, _, value = setting.partition("=")
    if "." not in key:  # the same in a preset
        preset.write_text(f"{key}: {value}\n")
        with pytest.raises(ParamsError):
            apply_overlay(path, preset, [])
    path.write_text("")
    with pytest.raises(ParamsError, match=r"params\.yaml: expected a mapping of params, found NoneType"):
        apply_overlay(path, None, [setting])
