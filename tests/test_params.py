"""params.yaml: the shipped file is valid, errors name the key, presets merge and are valid."""

from __future__ import annotations

import dataclasses
import shutil
import subprocess
import sys
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from vlp_models.cli.presets import apply_overlay, merge_overlay
from vlp_models.errors import ParamsError
from vlp_models.models import FAMILIES
from vlp_models.models.meta_model import meta_model
from vlp_models.params import (
    ModelParams,
    OptimizerParams,
    Params,
    build,
    load_params,
    parse_params,
    read_yaml,
    to_plain,
)
from vlp_models.params.load import parse_yaml

ROOT = Path(__file__).parent.parent


def edited(tmp_path: Path, edit: dict[str, object]) -> Path:
    """Write a copy of params.yaml with dotted keys replaced."""
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


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("defaults.finetune.optimizer.lr", float("nan")),
        ("defaults.finetune.batch_size", 0),
        ("defaults.finetune.optimizer.betas", [0.9, 1.0]),
        ("defaults.finetune.optimizer.ema_decay", 1.0),
        ("defaults.finetune.optimizer.groups", {"x": {"kind": "sgd", "momentum": 1.0}}),
        ("defaults.finetune.lora", {"rank": 8, "dropout": 1.0}),
        ("defaults.pretrain.snapshots", {"keep": 2, "metric": "loss"}),
        ("validate.max_bad_fraction", 7.0),
        ("ingest.max_bad_fraction", float("nan")),
        ("ingest.settle_seconds", -1.0),
        ("ingest.max_hash_distance", 99),
        ("ingest.processes", -1),
        ("drift.max_length_psi", float("nan")),
        ("drift.min_embedding_p", 7.0),
        ("drift.images", -1),
        ("promotion.seed", -1),
        ("promotion.resamples", 10**9),
        ("promotion.split", "tset"),
        ("evaluate.splits", ["x;y"]),
        ("cluster.workers", -1),
        ("cluster.cpus", 0),
        ("cluster.gpus", 2),
        ("tracking.model_prefix", "a'b"),
        ("tracking.experiment", ""),
    ],
)
def test_values_out_of_range_are_rejected_with_their_key(tmp_path: Path, key: str, value: object) -> None:
    with pytest.raises(ParamsError, match=key.rpartition(".")[2]):
        load_params(edited(tmp_path, {key: value}))


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(
    "wrong", [{"heads": 0}, {"hidden": 0}, {"dropout": 1.5}, {"attention_dropout": -0.1}, {"intermediate": 0}]
)
def test_configs_out_of_range_are_rejected_with_their_key(family: str, wrong: dict[str, float]) -> None:
    (key,) = wrong
    with pytest.raises(ParamsError, match=key):
        meta_model(ModelParams(family=family, config=wrong), "models.a.config")


@pytest.mark.parametrize("section", ["generate", "data", "models", "pretrain", "finetune"])
@pytest.mark.parametrize("name", ["x;touch pwned #", "$(id)", "..", "-x", "a b", "a/b", "a.b", ""])
def test_names_of_sections_are_safe_in_paths_and_commands(tmp_path: Path, section: str, name: str) -> None:
    raw = yaml.safe_load((ROOT / "params.yaml").read_text())
    raw[section][name] = next(iter(raw[section].values()))
    with pytest.raises(ParamsError, match="names may contain letters"):
        parse_params(raw)


def test_shipped_params_are_valid_and_plain() -> None:
    params = load_params(ROOT / "params.yaml")
    assert params.pretrain["tden"].recipe.objectives.keys() == {"mlm", "moc", "ism", "msg"}
    assert params.finetune["tden-vqa"].optimizer.muon_lr == 3.0e-3, "from `defaults`"
    assert params.chain("finetune/tden-vqa") == ["finetune/tden-vqa", "pretrain/tden", "initial/tden"]
    plain = to_plain(params)
    assert yaml.safe_load(yaml.safe_dump(plain)) == plain
    assert to_plain(parse_params(plain)) == plain


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        ({"pretrain.tden.max_epoch": 3}, r"unknown key `pretrain\.tden\.max_epoch`; did you mean `max_epochs`"),
        ({"defaults.finetune.optimizer.lrr": 1.0}, r"`finetune\.tden-captioning\.optimizer\.lrr`; did you mean `lr`"),
        ({"defaults.pretrain.max_epoch": 3}, r"unknown key `defaults\.pretrain\.max_epoch`; did you mean `max_epochs`"),
        ({"defaults.finetun": {}}, r"unknown key `defaults\.finetun`; did you mean `finetune`"),
        ({"pretrain.tden.batch_size": "many"}, r"`pretrain\.tden\.batch_size` must be an integer, found 'many'"),
        ({"pretrain.tden.batch_size": True}, r"`pretrain\.tden\.batch_size` must be an integer"),
        ({"pretrain.tden.batch_size": 0}, r"`pretrain\.tden\.batch_size: 0` should be greater than 0"),
        ({"pretrain.tden.recipe.mask_probability": 7.0}, r"mask_probability: 7\.0` should be less than or equal to 1"),
        ({"validate.max_bad_fraction": 7}, r"`validate\.max_bad_fraction: 7\.0` should be less than"),
        ({"validate.min_image_side": 3}, r"`validate\.min_image_side: 3` should be greater than or equal to 4"),
        ({"pretrain.tden.scheduled_sampling.scheme": "aa"}, r"must be one of none, a, b, c.*did you mean `a`"),
        ({"evaluate.splits": "test"}, r"`evaluate\.splits` must be a list"),
        ({"models": "tden"}, r"`models` must be a section"),
        ({"model": {"name": "tden"}}, r"unknown key `model`; did you mean `models`"),
        ({"pretrain.tden.model": "tdem"}, r"`pretrain\.tden\.model: tdem`: no such model; did you mean `tden`"),
        ({"pretrain.tden.start": "pretrain/tden"}, r"`pretrain\.tden` starts from itself"),
        ({"finetune.tden-vqa.start": "tden"}, r"must be initial/MODEL, pretrain/RUN or finetune/RUN"),
        ({"finetune.tden-vqa.start": "pretrain/tdem"}, r"not found; did you mean `tden`"),
        ({"finetune.tden-vqa.start": "pretrain/../../etc"}, r"must be initial/MODEL"),
        ({"generate.x;touch pwned #": {"generator": "objects"}}, "missing key|names may contain letters"),
    ],
)
def test_errors_name_the_key_and_the_nearest_one(tmp_path: Path, edit: dict[str, object], message: str) -> None:
    with pytest.raises(ParamsError, match=message):
        load_params(edited(tmp_path, edit))


LAUGHS = "a0: &a0 [x, x]\n" + "".join(f"a{n}: &a{n} [*a{n - 1}, *a{n - 1}]\n" for n in range(1, 40))
# A merge key repeats the pairs of each alias while it is loaded.
MERGES = "a0: &a0 {x: 1, y: 2}\n" + "".join(
    f"a{n}: &a{n}\n  <<: [{', '.join([f'*a{n - 1}'] * 9)}]\n" for n in range(1, 12)
)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[" * 50_000, "line 1: nested more than 50 levels deep"),
        ("{a: " * 3_000, "line 1: nested more than 50 levels deep"),
        (LAUGHS, "more than 200,000 keys and values"),
        (MERGES, "more than 200,000 keys and values"),
        ("a: &a [1, *a]", "line 1: the alias *a is within its own anchor"),
        ("a: " + "9" * 5000, "4300 digits"),
        ("a: 2026-13-45", "month must be in"),
    ],
    ids=["brackets", "braces", "billion laughs", "merge keys", "own anchor", "digits", "date"],
)
def test_yaml_that_would_exhaust_stack_or_memory_is_an_error(text: str, message: str, tmp_path: Path) -> None:
    """Each in its own process, which would crash without the check."""
    file = tmp_path / "params.yaml"
    file.write_text(text)
    script = f"from vlp_models.params import read_yaml\nread_yaml({str(file)!r})\n"
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1 and "ParamsError" in done.stderr and message in done.stderr, done.stderr[-500:]
    if message != "month must be in":  # the reader of presets keeps an impossible date as text
        shutil.copy(ROOT / "params.yaml", tmp_path / "kept.yaml")
        with pytest.raises(ParamsError, match=r"params.yaml: not valid YAML"):
            apply_overlay(tmp_path / "kept.yaml", file, [])
        assert (tmp_path / "kept.yaml").read_bytes() == (ROOT / "params.yaml").read_bytes()


def test_aliases_may_be_used() -> None:
    assert parse_yaml("a: &a [1, 2, 3]\nb: [*a, *a]\n", yaml.safe_load)["b"] == [[1, 2, 3], [1, 2, 3]]
    for preset in (ROOT / "vlp_models" / "presets").glob("*.yaml"):
        read_yaml(preset)


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (
            {"init": "checkpoints/imported/x", "image_init": "timm:resnet50"},
            "set `init` .* or `image_init` .*, not both",
        ),
        ({"init": "timm:resnet50"}, r"`models\.m`: `init: timm:resnet50` must be a checkpoint .* go to `image_init`"),
        ({"init": "a/b.safetensors"}, "must be a checkpoint made by `vlp import-checkpoint`"),
        ({"image_init": "checkpoints/imported/x"}, "`image_init: .*` must be a weights file, .* goes to `init`"),
    ],
)
def test_init_and_image_init_are_checked(model: dict[str, str], message: str) -> None:
    raw = yaml.safe_load((ROOT / "params.yaml").read_text())
    raw["models"]["m"] = {"family": "soho", **model}
    with pytest.raises(ParamsError, match=message):
        parse_params(raw)


def test_a_cycle_of_starts_is_an_error(tmp_path: Path) -> None:
    raw = yaml.safe_load((ROOT / "params.yaml").read_text())
    raw["pretrain"]["second"] = {**raw["pretrain"]["tden"], "start": "pretrain/tden"}
    raw["pretrain"]["tden"]["start"] = "pretrain/second"
    with pytest.raises(ParamsError, match=r"forms a cycle: pretrain/tden -> pretrain/second -> pretrain/tden"):
        parse_params(raw)


def test_a_start_of_another_family_is_an_error() -> None:
    raw = yaml.safe_load((ROOT / "params.yaml").read_text())
    raw["models"]["other"] = {"family": "other"}
    raw["pretrain"]["second"] = {**raw["pretrain"]["tden"], "start": "initial/other"}
    with pytest.raises(ParamsError, match=r"trains `tden` of the family tden, but starts from initial/other"):
        parse_params(raw)


def test_no_key_has_a_name_that_dvc_ignores() -> None:
    """DVC's run cache leaves keys called `size` and `nfiles` out of a stage's identity (treeverse/dvc#10296)."""

    def keys(hint: Any) -> Iterator[str]:
        for inner in typing.get_args(hint):
            yield from keys(inner)
        if dataclasses.is_dataclass(hint):
            for name, of_field in typing.get_type_hints(hint).items():
                yield name
                yield from keys(of_field)

    found = set(keys(Params))
    assert {"side", "vocab_size", "lr"} <= found
    assert not found & {"size", "nfiles"}


def test_scientific_notation_without_a_dot_is_a_number(tmp_path: Path) -> None:
    """YAML 1.1 reads 1e-4 as text. Also where a number may be null."""
    groups = {"object_encoder": {"lr": "1e-4"}}
    edit = {"optimizer.lr": "1e-4", "optimizer.groups": groups}
    path = edited(tmp_path, {f"defaults.pretrain.{key}": value for key, value in edit.items()})
    optimizer = load_params(path).pretrain["tden"].optimizer
    assert (optimizer.lr, optimizer.groups["object_encoder"].lr) == (1e-4, 1e-4)


@pytest.mark.parametrize(
    ("group", "message"),
    [
        ({"lr": "fast"}, r"`o\.groups\.head\.lr` must be a number, found 'fast'"),
        ({"lr": -1}, r"`o\.groups\.head\.lr: -1\.0` should be greater than or equal to 0"),
        ({"kind": "adamx"}, r"`o\.groups\.head\.kind` must be one of adamw, .*; did you mean `adam`"),
    ],
)
def test_errors_of_a_value_that_may_be_null_are_those_of_its_type(group: dict[str, Any], message: str) -> None:
    with pytest.raises(ParamsError, match=message):
        build(OptimizerParams, {"lr": 1.0, "groups": {"head": group}}, where="o")
    assert build(OptimizerParams, {"lr": 1.0, "groups": {"head": {"lr": None}}}, where="o").groups["head"].lr is None


def test_missing_file_and_bad_yaml_say_so(tmp_path: Path) -> None:
    with pytest.raises(ParamsError, match="not found; run in the project root"):
        load_params(tmp_path / "absent.yaml")
    (tmp_path / "bad.yaml").write_text("a: [1,")
    with pytest.raises(ParamsError, match="not valid YAML"):
        load_params(tmp_path / "bad.yaml")
    (tmp_path / "bad.yaml").write_text("a: 1\n<<<<<<< HEAD\nb: 2\n=======\nb: 3\n>>>>>>> other\n")
    with pytest.raises(ParamsError, match=r"bad\.yaml:2: git's conflict markers \(<<<<<<< HEAD\); keep one"):
        load_params(tmp_path / "bad.yaml")
    (tmp_path / "bad.yaml").write_bytes("trainer: {}\n".encode("utf-16"))
    with pytest.raises(ParamsError, match=r"bad\.yaml: UTF-16 text; save it as UTF-8"):
        load_params(tmp_path / "bad.yaml")
    (tmp_path / "bad.yaml").write_bytes(b"a: 1\nb: caf\xe9\n")
    with pytest.raises(ParamsError, match=r"bad\.yaml:2: not UTF-8 text"):
        load_params(tmp_path / "bad.yaml")


def test_overlay_merges_deletes_assigns_and_keeps_comments(tmp_path: Path) -> None:
    path = tmp_path / "params.yaml"
    shutil.copy(ROOT / "params.yaml", path)
    preset = tmp_path / "preset.yaml"
    preset.write_text("# x\nfinetune: {tden-vqa: null}\npretrain: {tden: {optimizer: {lr: 0.5}}}\n")
    changes = apply_overlay(path, preset, ["pretrain.tden.max_epochs=9"])
    run = load_params(path).pretrain["tden"]
    assert (run.max_epochs, run.optimizer.lr) == (9, 0.5)
    assert run.optimizer.warmup_fraction == 0.1, "a mapping is merged, not replaced"
    assert "tden-vqa" not in load_params(path).finetune
    assert "# The only file to edit" in path.read_text()
    assert "finetune.tden-vqa: removed" in changes


def test_null_in_a_new_mapping_is_dropped(tmp_path: Path) -> None:
    path = tmp_path / "params.yaml"
    shutil.copy(ROOT / "params.yaml", path)
    preset = tmp_path / "preset.yaml"
    preset.write_text("# x\npretrain: {tden: {sources: {scenes: 2, elsewhere: null}}}\n")
    assert apply_overlay(path, preset, []) == ["pretrain.tden.sources: (new) -> {'scenes': 2}"]
    assert load_params(path).pretrain["tden"].sources == {"scenes": 2}


def test_nulls_below_a_missing_mapping_create_nothing(tmp_path: Path) -> None:
    path = Path(shutil.copy(ROOT / "params.yaml", tmp_path))
    preset, before = tmp_path / "preset.yaml", path.read_bytes()
    preset.write_text("# x\npretrain: {absent: {optimizer: {groups: null}}}\nmodels: {absent: {text_init: null}}\n")
    assert apply_overlay(path, preset, []) == [] and path.read_bytes() == before


def test_a_preset_adds_runs_but_never_replaces_one(tmp_path: Path) -> None:
    path = tmp_path / "params.yaml"
    shutil.copy(ROOT / "params.yaml", path)
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


def test_overlay_keeps_line_endings(tmp_path: Path) -> None:
    path = tmp_path / "params.yaml"
    path.write_bytes((ROOT / "params.yaml").read_bytes().replace(b"\n", b"\r\n"))
    for epochs in (9, 8):
        apply_overlay(path, None, [f"pretrain.tden.max_epochs={epochs}"])
        assert load_params(path).pretrain["tden"].max_epochs == epochs
        changed = (ROOT / "params.yaml").read_text().replace("    max_epochs: 1\n", f"    max_epochs: {epochs}\n")
        assert path.read_bytes() == changed.encode().replace(b"\n", b"\r\n"), "every other byte stays"


SHARED = """\
  tden-vqa: &base
    task: vqa
    start: pretrain/tden
    max_epochs: 1   # of the base
    optimizer: &rates {lr: 1.0e-3, clip_norm: 1.0}
  again: {<<: *base, seed: 2}
  other: {task: vqa, start: pretrain/tden, optimizer: *rates}
"""


def shared_params(tmp_path: Path) -> Path:
    """Write a params.yaml whose runs share settings through aliases and a merge key."""
    whole, path = (ROOT / "params.yaml").read_text(), tmp_path / "params.yaml"
    line = next(line for line in whole.splitlines(keepends=True) if line.startswith("  tden-vqa: "))
    path.write_text(whole.replace(line, SHARED))
    return path


@pytest.mark.parametrize(
    ("setting", "change"),
    [
        ("other.optimizer.lr=5.0e-4", {"other": {"optimizer": {"lr": 5e-4}}}),
        ("other.optimizer.clip_norm=null", {"other": {"optimizer": {"clip_norm": None}}}),
        ("again.optimizer.lr=5.0e-4", {"again": {"optimizer": {"lr": 5e-4}}}),
        ("again.max_epochs=3", {"again": {"max_epochs": 3}}),
        ("again.seed=null", {"again": {"seed": None}}),
        ("other={seed: 3}", {"other": {"seed": 3}}),
        ("other=null", {"other": None}),
        ("tden-vqa=null", {"tden-vqa": None}),
    ],
)
def test_overlay_changes_only_the_named_run_of_those_that_share_settings(
    tmp_path: Path, setting: str, change: dict[str, Any]
) -> None:
    path = shared_params(tmp_path)
    before = yaml.safe_load(path.read_text())["finetune"]
    apply_overlay(path, None, [f"finetune.{setting}"])
    (name,) = change
    own = change[name]
    if own is None:
        del before[name]
    else:
        rates = {**before[name]["optimizer"], **own.get("optimizer", {})}
        before[name] = {**before[name], **own, "optimizer": rates}
        for section in (before[name], rates):
            for key in [key for key, value in section.items() if value is None]:
                del section[key]
    assert yaml.safe_load(path.read_text())["finetune"] == before
    assert load_params(path) and "# of the base" in path.read_text()


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("tden-vqa.optimizer.lr=0.5", r"`finetune\.again\.optimizer\.lr` would be 0\.5 instead of 0\.001"),
        ("tden-vqa.max_epochs=7", r"`finetune\.again\.max_epochs` would be 7 instead of 1"),
        ("again.max_epochs=null", r"`finetune\.again\.max_epochs` would be 1 instead of absent"),
        ("again.optimizer=null", r"`finetune\.again\.optimizer` would be .* instead of absent"),
    ],
)
def test_a_change_that_aliases_do_not_allow_is_refused(tmp_path: Path, setting: str, message: str) -> None:
    path = shared_params(tmp_path)
    before = path.read_bytes()
    with pytest.raises(ParamsError, match=message + r": a YAML alias or merge key .* write its value out"):
        apply_overlay(path, None, [f"finetune.{setting}"])
    assert path.read_bytes() == before


@pytest.mark.parametrize("word", ["on", "No", "y", "1:30", "1_0:30", "~x"])
def test_a_text_that_yaml_may_read_as_something_else_is_quoted(tmp_path: Path, word: str) -> None:
    path, preset = tmp_path / "params.yaml", tmp_path / "preset.yaml"
    shutil.copy(ROOT / "params.yaml", path)
    preset.write_text(f"finetune: {{tden-captioning: {{variant: {word}, sources: {{scenes: 1}}}}}}\n")
    merged = merge_overlay(path, preset, [f"finetune.tden-vqa.variant={word}"])
    path.write_text(merged.text)
    assert read_yaml(path) == merged.raw
    assert [run.variant for run in load_params(path).finetune.values()] == [word, word]
    assert load_params(path) == merged.params


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("pretrain.tden.seed=010", r"`pretrain\.tden\.seed` would be 8 instead of 10: write it as a decimal number"),
        ("pretrain.tden.seed=0o10", r"`pretrain\.tden\.seed` would be 0o10 instead of 8: write it as a decimal number"),
        (
            "finetune.on={task: vqa, start: pretrain/tden}",
            r"`finetune\.on` would be absent instead of .*in quotes if it is",
        ),
        ("finetune.tden-vqa.variant==", r"not valid YAML: line \d+, column \d+: could not determine a constructor"),
    ],
)
def test_what_yaml_may_read_as_something_else_is_refused(tmp_path: Path, setting: str, message: str) -> None:
    path = tmp_path / "params.yaml"
    shutil.copy(ROOT / "params.yaml", path)
    with pytest.raises(ParamsError, match=message):
        apply_overlay(path, None, [setting])
    assert path.read_bytes() == (ROOT / "params.yaml").read_bytes()


def test_what_overlay_does_not_change_is_read_as_before(tmp_path: Path) -> None:
    """A text that YAML 1.1 and 1.2 read differently, such as on, and a number such as 1e-4."""
    path = tmp_path / "params.yaml"
    whole = (ROOT / "params.yaml").read_text()
    path.write_text(whole.replace("  torch_threads: 0 ", "  compile: on\n  torch_threads: 0 "))
    assert load_params(path).trainer.compile
    settings = ["pretrain.tden.optimizer.groups.object_encoder.lr=1e-4", "promotion.tasks.vqa.relevant_gain=1e0"]
    for _ in range(2):  # the second time, they are there
        merged = merge_overlay(path, None, settings)
        path.write_text(merged.text)
        params = load_params(path)
        assert params == merged.params and params.trainer.compile and "compile: on\n" in merged.text
        assert params.pretrain["tden"].optimizer.groups["object_encoder"].lr == 1e-4
        assert params.promotion.tasks["vqa"].relevant_gain == 1.0


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("a.b=[1", r"--set a\.b: the value is not valid YAML"),
        ("trainer=*x", r"--set trainer: the value is not valid YAML"),
        ("models={tden: foo}", "models.tden"),
        ("data=text", "data"),
        ("flow.webhook_timeout=1e10", "at most 600 seconds"),
        ("flow.webhook_timeout=.inf", "at most 600 seconds"),
        ("promotion.tasks={vqq: {min_gain: 1}}", r"`promotion\.tasks: vqq`.*did you mean `vqa`"),
    ],
)
def test_overlay_errors_name_the_setting(tmp_path: Path, setting: str, message: str) -> None:
    path, preset = tmp_path / "params.yaml", tmp_path / "preset.yaml"
    shutil.copy(ROOT / "params.yaml", path)
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


def test_a_rejected_overlay_leaves_the_file_unchanged(tmp_path: Path) -> None:
    path = tmp_path / "params.yaml"
    shutil.copy(ROOT / "params.yaml", path)
    before = path.read_bytes()
    with pytest.raises(ParamsError, match=r"unknown key `pretrain\.tden\.speed`"):
        apply_overlay(path, None, ["pretrain.tden.speed=3"])
    assert path.read_bytes() == before
