"""params.yaml: the shipped file is valid, and errors name the key."""

from __future__ import annotations

import dataclasses
import re
import shutil
import subprocess
import sys
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from paper_families import PAPER_FAMILIES

from vlp_models.cli.presets import apply_overlay
from vlp_models.common.plugins import import_target
from vlp_models.errors import ParamsError
from vlp_models.models.meta_model import meta_model
from vlp_models.params import ModelParams, OptimizerParams, Params, build, load_params, parse_params, schema, to_plain
from vlp_models.params.schema import PARAMS_SECTIONS, Share

ROOT = Path(__file__).parents[2]


@dataclasses.dataclass(frozen=True, kw_only=True)
class OwnParams:
    share: Share = 0.5


@pytest.fixture
def sections_of_contrib(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sections `own`, top-level and of a fine-tuning; sections and a launcher `absent`, of a missing folder."""
    for name in ("own", "finetune.NAME.own"):
        monkeypatch.setitem(PARAMS_SECTIONS, name, f"{__name__}:OwnParams")
    absent = {"params": {"absent": "gone", "finetune.NAME.absent": "gone"}, "launchers": {"absent": "gone"}}
    monkeypatch.setattr(schema, "absent_entries", lambda kind: absent.get(kind, {}))


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
        ("defaults.pretrain.snapshots", {"keep": 2, "metric": "loss"}),
        ("flow.retry_delays", [-1]),
        ("flow.timeout_hours", {"finetune": 0.0}),
        ("flow.wait_minutes", -1.0),
        ("validate.max_bad_fraction", 7.0),
        ("ingest.max_bad_fraction", float("nan")),
        ("ingest.settle_seconds", -1.0),
        ("ingest.max_hash_distance", 99),
        ("ingest.processes", -1),
        ("promotion.seed", -1),
        ("promotion.resamples", 10**9),
        ("promotion.split", "tset"),
        ("evaluate.splits", ["x;y"]),
        ("tracking.model_prefix", "a'b"),
        ("tracking.experiment", ""),
    ],
)
def test_values_out_of_range_are_rejected_with_their_key(tmp_path: Path, key: str, value: object) -> None:
    with pytest.raises(ParamsError, match=key.rpartition(".")[2]):
        load_params(edited(tmp_path, {key: value}))


@pytest.mark.parametrize("family", PAPER_FAMILIES)
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


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        ({"defaults.finetune.own": {"share": 1.5}}, r"`finetune\.tden-captioning\.own\.share: 1\.5` should be less"),
        ({"finetune.tden-vqa.own": {"rate": 1}}, r"unknown key `finetune\.tden-vqa\.own\.rate`"),
        ({"finetune.tden-vqa.own": 1}, r"`finetune\.tden-vqa\.own` must be a section"),
        ({"finetune.tden-vqa.absent": {"share": 1}}, r"`finetune\.tden-vqa\.absent` needs vlp_models/contrib/gone"),
        ({"defaults.finetune.absent": {}}, r"`defaults\.finetune\.absent` needs vlp_models/contrib/gone"),
        ({"trainer.launcher": "absent"}, r"`trainer\.launcher: absent` needs vlp_models/contrib/gone"),
        ({"trainer.launcher": "locl"}, r"`trainer\.launcher` must be one of local.*did you mean `local`"),
    ],
)
def test_errors_in_sections_of_contrib_name_the_key_or_the_absent_folder(
    tmp_path: Path, edit: dict[str, object], message: str, sections_of_contrib: None
) -> None:
    with pytest.raises(ParamsError, match=message):
        load_params(edited(tmp_path, edit))


def test_sections_of_contrib_have_defaults_and_those_of_absent_folders_are_ignored(
    tmp_path: Path, sections_of_contrib: None
) -> None:
    params = load_params(edited(tmp_path, {"absent": {"any": 1}, "defaults.finetune.own": {"share": 0.25}}))
    assert params.section(OwnParams) == OwnParams(share=0.5)
    assert params.finetune["tden-vqa"].section(OwnParams) == OwnParams(share=0.25)
    plain = to_plain(params)
    assert plain["own"] == {"share": 0.5} and plain["finetune"]["tden-vqa"]["own"] == {"share": 0.25}
    assert "absent" not in plain and parse_params(plain) == params


LAUGHS = "a0: &a0 [x, x]\n" + "".join(f"a{n}: &a{n} [*a{n - 1}, *a{n - 1}]\n" for n in range(1, 40))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[" * 50_000, "line 1: nested more than 50 levels deep"),
        ("{a: " * 3_000, "line 1: nested more than 50 levels deep"),
        ("a: [" + "x, " * 200_000 + "x]", "line 1: more than 200,000 keys and values"),
        (LAUGHS, "line 2: YAML aliases (`*a0`) are not supported; write the value out"),
        ("a: &a [1, *a]", "line 1: YAML aliases (`*a`) are not supported"),
        ("a: &a {x: 1}\nb: {<<: *a}", "line 2: YAML aliases (`*a`) are not supported"),
        ("a: " + "9" * 5000, "4300 digits"),
        ("a: 2026-13-45", "month must be in"),
    ],
    ids=["brackets", "braces", "many values", "billion laughs", "own anchor", "merge key", "digits", "date"],
)
def test_yaml_that_would_exhaust_stack_or_memory_is_an_error(text: str, message: str, tmp_path: Path) -> None:
    """Each in its own process, which would crash without the check."""
    file = tmp_path / "params.yaml"
    file.write_text(text)
    script = f"from vlp_models.params import read_yaml\nread_yaml({str(file)!r})\n"
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1 and "ParamsError" in done.stderr and message in done.stderr, done.stderr[-500:]
    original = shutil.copy(ROOT / "params.yaml", tmp_path / "original.yaml")
    with pytest.raises(ParamsError, match=r"params.yaml: not valid YAML"):  # as a preset
        apply_overlay(original, file, [])
    assert original.read_bytes() == (ROOT / "params.yaml").read_bytes()


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


def test_starts_that_form_a_cycle_or_are_of_another_family_are_errors() -> None:
    raw = yaml.safe_load((ROOT / "params.yaml").read_text())
    first = raw["pretrain"]["tden"]
    raw["pretrain"] |= {"second": {**first, "start": "pretrain/tden"}, "tden": {**first, "start": "pretrain/second"}}
    with pytest.raises(ParamsError, match=r"forms a cycle: pretrain/tden -> pretrain/second -> pretrain/tden"):
        parse_params(raw)
    raw["models"]["other"] = {"family": "other"}
    raw["pretrain"] |= {"second": {**first, "start": "initial/other"}, "tden": first}
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

    names = set(keys(Params)).union(*(keys(import_target(target)) for target in PARAMS_SECTIONS.values()))
    assert {"side", "vocab_size", "lr"} <= names
    assert not names & {"size", "nfiles"}


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("compile: yes", r"`trainer\.compile` must be true or false, found 'yes'"),
        ("devices: 2", r"not valid YAML: line \d+, column \d+: found duplicate key"),
        ("torch_threads: 1:30", r"`trainer\.torch_threads` must be an integer, found '1:30'"),
    ],
)
def test_what_dvc_would_read_as_another_value_is_refused(tmp_path: Path, line: str, message: str) -> None:
    path = tmp_path / "params.yaml"
    text = re.sub(r"(?m)^  torch_threads:.*\n", "", (ROOT / "params.yaml").read_text())
    path.write_text(re.sub(r"(?m)^trainer:$", f"trainer:\n  {line}", text))
    with pytest.raises(ParamsError, match=message):
        load_params(path)


def test_a_name_that_yaml_reads_as_a_number_is_refused() -> None:
    raw = yaml.safe_load((ROOT / "params.yaml").read_text())
    raw["pretrain"][10] = raw["pretrain"]["tden"]  # `010:` in the file
    with pytest.raises(ParamsError, match=r"`pretrain\.10`: the name is read as 10, not text; quote it"):
        parse_params(raw)


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
