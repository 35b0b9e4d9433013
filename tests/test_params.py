"""params.yaml: the shipped file is valid, mistakes are named, presets merge and are valid."""

from __future__ import annotations

import dataclasses
import shutil
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from vlp_models.cli.presets import apply_overlay
from vlp_models.errors import ParamsError
from vlp_models.params import Params, load_params, parse_params, to_plain

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


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("defaults.finetune.optimizer.lr", float("nan")),
        ("defaults.finetune.batch_size", 0),
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
        ("tracking.model_prefix", "a'b"),
        ("tracking.experiment", ""),
    ],
)
def test_numbers_out_of_range_and_names_that_are_none_are_refused_with_their_key(
    tmp_path: Path, key: str, value: object
) -> None:
    with pytest.raises(ParamsError, match=key.rpartition(".")[2]):
        load_params(edited(tmp_path, {key: value}))


@pytest.mark.parametrize("section", ["generate", "data", "models", "pretrain", "finetune"])
@pytest.mark.parametrize("name", ["x;touch pwned #", "$(id)", "..", "-x", "a b", "a/b", ""])
def test_names_that_reach_a_command_line_or_a_path_are_limited(tmp_path: Path, section: str, name: str) -> None:
    raw = yaml.safe_load((ROOT / "params.yaml").read_text())
    raw[section][name] = next(iter(raw[section].values()))
    with pytest.raises(ParamsError, match="a name has letters"):
        parse_params(raw)


def test_shipped_params_are_valid_and_plain() -> None:
    params = load_params(ROOT / "params.yaml")
    assert params.pretrain["tden"].recipe.objectives.keys() == {"mlm", "moc", "ism", "msg"}
    assert params.finetune["tden-vqa"].optimizer.muon_lr == 3.0e-3, "what an entry does not say, `defaults` does"
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
        ({"pretrain.tden.batch_size": "many"}, r"`pretrain\.tden\.batch_size` must be int, found 'many'"),
        ({"pretrain.tden.batch_size": True}, r"`pretrain\.tden\.batch_size` must be int"),
        ({"pretrain.tden.batch_size": 0}, r"`pretrain\.tden\.batch_size: 0` should be greater than 0"),
        ({"pretrain.tden.recipe.mask_probability": 7.0}, r"mask_probability: 7\.0` should be less than or equal to 1"),
        ({"validate.max_bad_fraction": 7}, r"`validate\.max_bad_fraction: 7\.0` should be less than"),
        ({"validate.min_image_side": 3}, r"`validate\.min_image_side: 3` should be greater than or equal to 4"),
        ({"pretrain.tden.scheduled_sampling.scheme": "aa"}, r"must be one of none, a, b, c.*did you mean `a`"),
        ({"evaluate.splits": "test"}, r"`evaluate\.splits` must be a list"),
        ({"models": "tden"}, r"`models` must be a section"),
        ({"model": {"name": "tden"}}, r"name models in `models`"),
        ({"pretrain.tden.model": "tdem"}, r"`pretrain\.tden\.model: tdem`; did you mean `tden`"),
        ({"pretrain.tden.start": "pretrain/tden"}, r"`pretrain\.tden` starts from itself"),
        ({"finetune.tden-vqa.start": "tden"}, r"a start is initial/MODEL, pretrain/RUN or finetune/RUN"),
        ({"finetune.tden-vqa.start": "pretrain/tdem"}, r"there is none; did you mean `tden`"),
        ({"finetune.tden-vqa.start": "pretrain/../../etc"}, r"a start is initial/MODEL"),
        ({"generate.x;touch pwned #": {"generator": "objects"}}, "missing key|a name has letters"),
    ],
)
def test_mistakes_are_named(tmp_path: Path, edit: dict[str, object], message: str) -> None:
    with pytest.raises(ParamsError, match=message):
        load_params(edited(tmp_path, edit))


def test_a_name_that_could_be_a_command_is_refused(tmp_path: Path) -> None:
    raw = yaml.safe_load((ROOT / "params.yaml").read_text())
    raw["generate"]["x;touch pwned #"] = raw["generate"]["scenes"]
    with pytest.raises(ParamsError, match="a name has letters, digits"):
        parse_params(raw)


def test_runs_that_start_from_each_other_are_told_as_a_circle(tmp_path: Path) -> None:
    raw = yaml.safe_load((ROOT / "params.yaml").read_text())
    raw["pretrain"]["second"] = {**raw["pretrain"]["tden"], "start": "pretrain/tden"}
    raw["pretrain"]["tden"]["start"] = "pretrain/second"
    with pytest.raises(ParamsError, match=r"circle: pretrain/tden -> pretrain/second -> pretrain/tden"):
        parse_params(raw)


def test_weights_are_not_exchanged_between_families() -> None:
    raw = yaml.safe_load((ROOT / "params.yaml").read_text())
    raw["models"]["other"] = {"family": "other"}
    raw["pretrain"]["second"] = {**raw["pretrain"]["tden"], "start": "initial/other"}
    with pytest.raises(ParamsError, match=r"trains `tden` of the family tden, but starts from initial/other"):
        parse_params(raw)


def test_no_key_has_a_name_that_dvc_ignores() -> None:
    """DVC's run cache leaves keys called `size` and `nfiles` out of what identifies a stage (treeverse/dvc#10296)."""

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
    path = edited(tmp_path, {"defaults.pretrain.optimizer.lr": "1e-4"})
    assert load_params(path).pretrain["tden"].optimizer.lr == pytest.approx(1e-4)


def test_missing_file_and_bad_yaml_say_so(tmp_path: Path) -> None:
    with pytest.raises(ParamsError, match="no such file"):
        load_params(tmp_path / "absent.yaml")
    (tmp_path / "bad.yaml").write_text("a: [1,")
    with pytest.raises(ParamsError, match="not valid YAML"):
        load_params(tmp_path / "bad.yaml")


BENEATH = {
    "tden-coco": ["tden-cc3m"],
    "tden-vqa": ["tden-cc3m"],
    "tden-vcr": ["tden-cc3m"],
    "tden-flickr30k": ["tden-cc3m"],
    **{f"soho-{name}": ["soho-coco"] for name in ("vqa", "flickr30k", "snli-ve", "nlvr2", "coco-retrieval")},
    **{f"vlmo-{name}": ["vlmo-base"] for name in ("flickr30k", "nlvr2", "snli-ve")},
    **{f"flickr8k-{name}": ["flickr8k"] for name in ("soho", "unified-vlp", "vlmo", "without", "xgpt")},
    "flickr8k-vlmo-vit": ["flickr8k", "flickr8k-vlmo"],
    "nlvr-structured": ["nlvr"],
    "nlvr-pixels": ["nlvr"],
    "soho-retrieval": ["soho"],
    "soho-tasks": ["scenes-tasks", "soho"],
    "vlmo-large": ["vlmo-base"],
    "xgpt-augment": ["xgpt"],
    "xgpt-coco": ["xgpt-cc3m"],
    "xgpt-flickr30k": ["xgpt-cc3m"],
    "xgpt-two-pass": ["xgpt"],
    **{f"unified-vlp-{name}": ["unified-vlp-cc3m"] for name in ("coco", "flickr30k", "vqa")},
}


@pytest.mark.parametrize("preset", sorted((ROOT / "presets").glob("*.yaml")), ids=lambda p: p.stem)
def test_every_preset_gives_valid_params(tmp_path: Path, preset: Path) -> None:
    assert preset.read_text().startswith("#"), "a preset begins with its command"
    path = tmp_path / "params.yaml"
    shutil.copy(ROOT / "params.yaml", path)
    for name in BENEATH.get(preset.stem, ()):
        assert f"presets/{name}.yaml" in preset.read_text().splitlines()[0], "its command says what it lies on"
        apply_overlay(path, ROOT / "presets" / f"{name}.yaml", [])
    assert apply_overlay(path, preset, [])
    load_params(path)


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


def test_null_in_a_mapping_that_is_new_leaves_nothing_there(tmp_path: Path) -> None:
    path = tmp_path / "params.yaml"
    shutil.copy(ROOT / "params.yaml", path)
    preset = tmp_path / "preset.yaml"
    preset.write_text("# x\npretrain: {tden: {sources: {scenes: 2, elsewhere: null}}}\n")
    assert apply_overlay(path, preset, []) == ["pretrain.tden.sources: (new) -> {'scenes': 2}"]
    assert load_params(path).pretrain["tden"].sources == {"scenes": 2}


def test_a_preset_adds_beside_what_is_there_but_never_in_its_place(tmp_path: Path) -> None:
    path = tmp_path / "params.yaml"
    shutil.copy(ROOT / "params.yaml", path)
    apply_overlay(path, ROOT / "presets" / "tden-two-pass.yaml", [])
    params = load_params(path)
    assert list(params.finetune) == ["tden-captioning", "tden-vqa", "tden-two-pass-captioning", "tden-two-pass-vqa"]
    assert params.model_of("tden-two-pass-vqa") == "tden"
    preset, before = tmp_path / "preset.yaml", path.read_bytes()
    preset.write_text("# x\nfinetune: {tden-vqa: {task: captioning, start: pretrain/tden}}\n")
    with pytest.raises(ParamsError, match=r"`finetune\.tden-vqa` is taken, by one with `task: vqa`"):
        apply_overlay(path, preset, [])
    assert path.read_bytes() == before


def test_the_file_stays_what_it_was_and_no_secret_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole, path = tmp_path / "elsewhere.yaml", tmp_path / "params.yaml"
    shutil.copy(ROOT / "params.yaml", whole)
    whole.chmod(0o600)
    path.symlink_to(whole)
    copymode, modes = shutil.copymode, []

    def seen(source: Path, target: Path) -> None:
        modes.append(target.stat().st_mode & 0o777)
        copymode(source, target)

    monkeypatch.setattr(shutil, "copymode", seen)
    (change,) = apply_overlay(path, None, ["flow.webhook=https://hooks.example.org/services/T0/B0/HUSH"])
    assert change.startswith("flow.webhook: ") and "HUSH" not in change
    assert path.is_symlink() and whole.stat().st_mode & 0o777 == 0o600
    assert modes == [0o600], "nor for a moment another one"
    assert load_params(path).flow.webhook.endswith("HUSH")
    for setting in ("flow.webhook=[HUSH", "flow.webhook=*HUSH", "flow.webhook:HUSH"):
        with pytest.raises(ParamsError, match=r"^--set flow\.webhook: ") as told:
            apply_overlay(path, None, [setting])
        assert "HUSH" not in str(told.value)


def test_lines_end_as_they_did(tmp_path: Path) -> None:
    path = tmp_path / "params.yaml"
    path.write_bytes((ROOT / "params.yaml").read_bytes().replace(b"\n", b"\r\n"))
    apply_overlay(path, None, ["pretrain.tden.max_epochs=9"])
    assert path.read_bytes().count(b"\r\n") == path.read_bytes().count(b"\n")
    assert load_params(path).pretrain["tden"].max_epochs == 9


@pytest.mark.parametrize(
    ("setting", "said"),
    [
        ("a.b=[1", r"--set a\.b: the value is not valid YAML"),
        ("trainer=*x", r"--set trainer: the value is not valid YAML"),
        ("models={tden: foo}", "models.tden"),
        ("data=text", "data"),
        ("flow.webhook_timeout=1e10", "600 seconds at most"),
        ("flow.webhook_timeout=.inf", "600 seconds at most"),
        ("promotion.tasks={vqq: {min_gain: 1}}", r"`promotion\.tasks: vqq`.*did you mean `vqa`"),
    ],
)
def test_what_can_not_be_merged_is_told(tmp_path: Path, setting: str, said: str) -> None:
    path, preset = tmp_path / "params.yaml", tmp_path / "preset.yaml"
    shutil.copy(ROOT / "params.yaml", path)
    with pytest.raises(ParamsError, match=said):
        apply_overlay(path, None, [setting])
    key, _, value = setting.partition("=")
    if "." not in key:  # the same in a preset
        preset.write_text(f"{key}: {value}\n")
        with pytest.raises(ParamsError):
            apply_overlay(path, preset, [])
    path.write_text("")
    with pytest.raises(ParamsError, match=r"params\.yaml: a mapping of params, found NoneType"):
        apply_overlay(path, None, [setting])


def test_a_refused_overlay_leaves_the_file_alone(tmp_path: Path) -> None:
    path = tmp_path / "params.yaml"
    shutil.copy(ROOT / "params.yaml", path)
    before = path.read_bytes()
    with pytest.raises(ParamsError, match=r"unknown key `pretrain\.tden\.speed`"):
        apply_overlay(path, None, ["pretrain.tden.speed=3"])
    assert path.read_bytes() == before
