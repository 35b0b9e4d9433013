"""A params.yaml of the version with one model, written anew."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from vlp_models.errors import ParamsError
from vlp_models.migrate import KEPT, migrate_params
from vlp_models.params import load_params

RUN = {"sources": {}, "seed": 3, "max_epochs": 2, "max_steps": 0, "batch_size": 8, "accumulate": 1, "max_regions": 4}
RUN |= {"max_text_len": 16, "optimizer": {"lr": 0.1}}
PRETRAIN = {**RUN, "objectives": {"mlm": 1.0, "msg": 0.5}, "mask_probability": 0.2}


def old_params(**changes: Any) -> dict[str, Any]:
    shipped = yaml.safe_load((Path(__file__).parent.parent / "params.yaml").read_text())
    for section in ("models", "defaults", "pretrain", "finetune"):
        del shipped[section]
    shipped["tokenizer"]["size"] = shipped["tokenizer"].pop("vocab_size")
    shipped["generate"]["scenes"]["size"] = shipped["generate"]["scenes"].pop("side")
    return {
        **shipped,
        "model": {"name": "tden", "config": {"hidden": 32}},
        "pretrain": {**PRETRAIN, "mix": "sum"},
        "scheduled_sampling": {**PRETRAIN, "scheme": "c", "init": "pretrain", "sample": "argmax"},
        "finetune": {
            "captioning": {**RUN, "task": "captioning", "init": "scheduled_sampling", "label_smoothing": 0.1},
            "scst": {**RUN, "task": "captioning", "init": "captioning", "self_critical": {"samples": 3}},
            "blind": {**RUN, "task": "vqa", "init": "pretrain", "scratch": True, "blank_images": True},
        },
        **changes,
    }


def migrated(tmp_path: Path, **changes: Any) -> Any:
    file = tmp_path / "params.yaml"
    file.write_text(yaml.safe_dump(old_params(**changes)))
    with pytest.raises(ParamsError, match="`vlp migrate`"):
        load_params(file)
    migrate_params(file)
    return load_params(file)


def test_runs_keep_their_numbers_and_get_names(tmp_path: Path) -> None:
    params = migrated(tmp_path)
    assert params.models["tden"].config == {"hidden": 32} and params.models["tden"].seed == 3
    first, second = params.pretrain["tden"], params.pretrain["tden-two-pass"]
    assert (first.start, first.passes.scheme, first.max_epochs) == ("initial/tden", "single", 2)
    assert {name: o.weight for name, o in first.recipe.objectives.items()} == {"mlm": 1.0, "msg": 0.5}
    assert first.recipe.mask_probability == 0.2
    assert (second.start, second.passes.scheme, second.passes.sample) == ("pretrain/tden", "c", "argmax")
    assert params.finetune["captioning"].start == "pretrain/tden-two-pass"
    assert params.finetune["captioning"].options == {"label_smoothing": 0.1}
    assert params.finetune["scst"].start == "finetune/captioning"
    assert params.finetune["scst"].options["self_critical"] == {"samples": 3}
    assert params.finetune["blind"].start == "initial/tden" and params.finetune["blind"].blank_images
    assert params.generate["scenes"].side == 128 and params.tokenizer.vocab_size == 1000


def test_without_a_second_pretraining_its_runs_start_from_the_first(tmp_path: Path) -> None:
    params = migrated(tmp_path, scheduled_sampling={**PRETRAIN, "scheme": "none", "init": "pretrain"})
    assert list(params.pretrain) == ["tden"]
    assert params.finetune["captioning"].start == "pretrain/tden"


def test_turns_and_probabilities_become_shares(tmp_path: Path) -> None:
    objectives = {"mlm": 2.0, "msg": 1.0}
    params = migrated(tmp_path, pretrain={**PRETRAIN, "mix": "turns", "objectives": objectives})
    assert {n: (o.share, o.weight) for n, o in params.pretrain["tden"].recipe.objectives.items()} == {
        "mlm": (2.0, 1.0),
        "msg": (1.0, 1.0),
    }


def test_the_old_file_is_kept_and_never_overwritten(tmp_path: Path) -> None:
    file = tmp_path / "params.yaml"
    text = yaml.safe_dump(old_params())
    file.write_text(text)
    migrate_params(file)
    assert (tmp_path / KEPT).read_text() == text
    file.write_text(text)
    with pytest.raises(ParamsError, match="there already"):
        migrate_params(file)
    assert file.read_text() == text
    with pytest.raises(ParamsError, match="nothing to migrate"):
        migrate_params(Path(__file__).parent.parent / "params.yaml")
