"""VLMo through the real stages: images alone, texts alone, pairs; killed and resumed; contrast over a whole update."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from pixel_toys import train, write_shards, write_workspace
from safetensors.torch import load_file
from toy_dataset import KilledAt, same_weights, untimed, write_tokenizer

from vlp_models.common.workspace import Workspace
from vlp_models.errors import ParamsError
from vlp_models.pipeline.stages import pretrain

FROZEN = {name: {"frozen": True} for name in ("attention", "vision_expert", "image_embedding")}
RUNS = {
    "images": {"view": "images", "recipe": {"objectives": {"mim": 1.0}}},
    "texts": {
        "view": "texts",
        "start": "pretrain/images",
        "recipe": {"objectives": {"mlm": 1.0}},
        "optimizer": {"lr": 1e-2, "groups": FROZEN},
    },
    "pairs": {"start": "pretrain/texts", "recipe": {"objectives": {"itc": 1.0, "itm": 1.0, "mlm": 1.0}}},
    "wrong": {"view": "texts", "recipe": {"objectives": {"itc": 1.0}}},
}


@pytest.fixture(scope="module")
def toys(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("toys")
    write_shards(root / "shards")
    write_tokenizer(root / "tokenizer")
    return root


def test_each_of_three_runs_starts_from_the_previous_one(tmp_path: Path) -> None:
    params, workspace = write_workspace(tmp_path, **RUNS), Workspace(tmp_path)
    weights = {"fresh": load_file(workspace.checkpoint("initial/vlmo") / "model.safetensors")}
    for name in ("images", "texts", "pairs"):
        pretrain.run(params, workspace, name)
        weights[name] = load_file(workspace.checkpoint(f"pretrain/{name}") / "model.safetensors")

    def changed(before: str, after: str) -> set[str]:
        return {name for name, tensor in weights[before].items() if not torch.equal(tensor, weights[after][name])}

    of_images, of_texts = changed("fresh", "images"), changed("images", "texts")
    assert "model.blocks.0.experts.vision.ffn.0.weight" in of_images
    assert not [name for name in of_images if "language" in name or "text" in name]
    assert "model.blocks.0.experts.language.ffn.0.weight" in of_texts
    assert not [name for name in of_texts if ".attention" in name or "vision" in name or "image" in name]
    assert "model.blocks.1.experts.vision_language.ffn.0.weight" in changed("texts", "pairs")
    header = workspace.curve("pretrain/pairs").read_text().partition("\n")[0].split(",")
    assert {"itc", "itc_accuracy", "itm", "itm_accuracy", "mlm", "val_loss"} <= set(header)
    with pytest.raises(ParamsError, match=r"can't learn \['itc'\] from `view: texts`"):
        pretrain.run(params, workspace, "wrong")


@pytest.mark.slow
@pytest.mark.parametrize(("accumulate", "contrast_over"), [(1, "batch"), (2, "update")])
def test_resume_after_kill_is_bitwise_equal(toys: Path, tmp_path: Path, accumulate: int, contrast_over: str) -> None:
    """Crops, dropped paths and words, masks and negatives are drawn again, and the same."""
    settings = {
        "batch_size": 8 // accumulate,
        "accumulate": accumulate,
        "contrast_over": contrast_over,
        "max_epochs": 2,
    }
    whole, result = train(toys, tmp_path / "whole", **settings)
    assert result.steps == 6
    for step in (2, 4):
        work = tmp_path / f"killed-{step}"
        with pytest.raises(InterruptedError):
            train(toys, work, tracker=KilledAt(work, step), **settings)
        resumed, after = train(toys, work, **settings)
        assert after.resumed_from == step
        assert same_weights(whole, resumed), f"killed after {step}"
        assert untimed(after.rows) == untimed(result.rows)


def test_contrast_over_an_update_equals_a_large_batch(toys: Path, tmp_path: Path) -> None:
    """Three micro-batches of 8 learn what a batch of 24 does; without the others' embeddings they don't."""
    config = {"drop_path": 0.0, "dropout": 0.0}
    common = {"objectives": ("itc",), "config": config}
    large, of_large = train(toys, tmp_path / "large", batch_size=24, **common)
    cached, of_cached = train(toys, tmp_path / "cached", batch_size=8, accumulate=3, contrast_over="update", **common)
    plain, _ = train(toys, tmp_path / "plain", batch_size=8, accumulate=3, **common)
    assert of_large.steps == of_cached.steps == 1
    first, second = (result.rows[0] for result in (of_large, of_cached))
    assert first["itc"] == pytest.approx(second["itc"], rel=1e-5)
    assert first["gradient_norm"] == pytest.approx(second["gradient_norm"], rel=1e-4)
    distances = []
    for other in (cached, plain):
        pairs = zip(large.state_dict().values(), other.state_dict().values(), strict=True)
        distances.append(sum(float((a - b).abs().sum()) for a, b in pairs))
    assert distances[0] < 0.05 * distances[1], distances


def test_looking_ahead_leaves_running_statistics_alone(toys: Path, tmp_path: Path) -> None:
    config = {"stem": "convolutions"}
    common = {"objectives": ("itc",), "config": config, "batch_size": 8, "accumulate": 3}
    model, _ = train(toys, tmp_path, contrast_over="update", **common)
    seen = [int(value) for name, value in model.state_dict().items() if name.endswith("num_batches_tracked")]
    assert seen and set(seen) == {3}, "three micro-batches"


def test_contrast_over_an_update_needs_a_model_that_embeds_pairs(toys: Path, tmp_path: Path) -> None:
    from vlp_models.params import ObjectiveParams, RecipeParams, ScheduledSamplingParams
    from vlp_models.training.scheduled_sampling import make_loss

    recipe = RecipeParams(objectives={"mlm": ObjectiveParams()}, contrast_over="update")
    model = torch.nn.Linear(1, 1)
    model.objectives = ("mlm",)  # type: ignore[assignment]
    with pytest.raises(ParamsError, match="contrast_over: update"):
        make_loss(model, recipe, ScheduledSamplingParams(), name="linear")
