"""examples/language_model_decoder: a plugin family with a frozen language model of transformers, tiny and random."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import AutoModelForCausalLM, GPT2Config, LlamaConfig

from vlp_models.common.plugins import use_plugins
from vlp_models.contrib.plugin_kit.conformance.families import try_family
from vlp_models.contrib.plugin_kit.conformance.scenes import SampleScenes, write_sample_scenes
from vlp_models.contrib.plugin_kit.conformance.trial import Trial, build_trial, pretraining_batch
from vlp_models.errors import CheckpointError, ParamsError
from vlp_models.models.checkpoint import WEIGHTS, build_from_config, read_config, write_checkpoint
from vlp_models.models.decoding.search import EncodedImages, beam_search, greedy

EXAMPLE = Path(__file__).parents[3] / "examples" / "language_model_decoder" / "language_model_decoder.py"
NAME, TOKENS = "language_model_decoder", 700
MODELS = {
    "gpt2": GPT2Config(vocab_size=TOKENS, n_embd=32, n_layer=2, n_head=2, n_positions=96),
    "llama": LlamaConfig(
        vocab_size=TOKENS,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
    ),
}


@pytest.fixture(scope="module")
def scenes(tmp_path_factory: pytest.TempPathFactory) -> SampleScenes:
    return write_sample_scenes(tmp_path_factory.mktemp("scenes"))


@pytest.fixture(params=MODELS)
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Path]:
    """Return the folder of a tiny language model; the plugin is in use."""
    path = list(sys.path)
    (tmp_path / "plugins").mkdir()
    shutil.copyfile(EXAMPLE, tmp_path / "plugins" / EXAMPLE.name)
    use_plugins({"families": {NAME: f"plugins.{NAME}:LanguageModelDecoder"}}, tmp_path)
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(MODELS[request.param]).save_pretrained(tmp_path / "lm")
    yield tmp_path / "lm"
    use_plugins({}, tmp_path)
    sys.path[:] = path


def trial_of(folder: Path, scenes: SampleScenes) -> Trial:
    return build_trial(NAME, {"language_model": str(folder)}, scenes)


def test_it_passes_the_checks_of_a_family(folder: Path, scenes: SampleScenes) -> None:
    results = list(try_family(NAME, {"language_model": str(folder)}, scenes))
    assert [f"{one.check}: {one.problem}" for one in results if one.problem] == []
    assert {"objective caption", "task captioning", "decoding", "save and load"} <= {one.check for one in results}


def test_a_checkpoint_refers_to_the_language_model(folder: Path, scenes: SampleScenes, tmp_path: Path) -> None:
    trial = trial_of(folder, scenes)
    saved = tmp_path / "saved"
    saved.mkdir()
    write_checkpoint(saved, nn.ModuleDict({"model": trial.model}), trial.info(), scenes.tokenizer)
    names = set(load_file(saved / WEIGHTS))
    assert names == {f"model.{name}" for name, _ in trial.model.named_parameters()}
    assert not any("lm_head" in name or "wte" in name or "embed_tokens" in name for name in names)
    info = read_config(saved)
    assert info.model_config["language_model"] == str(folder) and len(info.model_config["sha256"]) == 64
    build_from_config(info, scenes.tokenizer, saved)

    weights = load_file(folder / WEIGHTS)
    save_file({name: weight + 1 for name, weight in weights.items()}, folder / WEIGHTS, metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match=r"model\.safetensors: has the sha256 .* trained with"):
        build_from_config(info, scenes.tokenizer, saved)
    (folder / WEIGHTS).unlink()
    with pytest.raises(CheckpointError, match=r"does not exist; copy a language model"):
        build_from_config(info, scenes.tokenizer, saved)


def test_only_the_image_side_learns_and_decoding_leaves_a_state_as_it_is(folder: Path, scenes: SampleScenes) -> None:
    trial = trial_of(folder, scenes)
    model: Any = trial.model
    frozen = {name: weight.clone() for name, weight in model.language_model.state_dict().items()}
    batch = pretraining_batch(trial)
    optimizer, losses = torch.optim.Adam(model.parameters(), lr=1e-2), []
    for _ in range(15):
        loss = (
            model.train()
            .pretraining_losses(batch, objectives={"caption": None}, generator=torch.Generator(), mask_probability=0.0)[
                "caption"
            ]
            .mean
        )
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    assert losses[-1] < losses[0]
    assert all(torch.equal(weight, frozen[name]) for name, weight in model.language_model.state_dict().items())

    model.eval()
    tokens = {"max_len": 6, "bos_id": scenes.tokenizer.cls_id, "eos_id": scenes.tokenizer.sep_id}
    with torch.no_grad():
        image = batch.image.select(torch.tensor([0, 2, 4]))
        encoded = EncodedImages(model=model, state=model.start(image, max_len=6))
        first = greedy(encoded, image, **tokens)
        beam_search(encoded, image, beam_size=3, **tokens)
        assert [one.ids for one in greedy(encoded, image, **tokens)] == [one.ids for one in first]


def test_a_smaller_vocabulary_and_a_missing_folder_are_named(folder: Path, scenes: SampleScenes) -> None:
    with pytest.raises(ParamsError, match=r"nothing/model\.safetensors does not exist"):
        trial_of(folder.parent / "nothing", scenes)
    config = type(MODELS["gpt2"])(vocab_size=20, n_embd=8, n_layer=1, n_head=1)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    with pytest.raises(ParamsError, match=r"has 20 tokens, but the tokenizer has .*use its own"):
        trial_of(folder, scenes)
