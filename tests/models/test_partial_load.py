"""Start from a checkpoint with another config: what fits is loaded, the rest is reported."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from vlp_models.errors import CheckpointError
from vlp_models.models.partial_load import load_partial


def checkpoint_of(model):
    """The weights and config that a checkpoint of `model` holds."""
    return model.state_dict(), dataclasses.asdict(model.config)


def test_model_of_another_stage_fills_what_both_have(tiny):
    other = tiny(7, encoder_layers=3, decoder_layers=1, similarity_dim=8)
    model = tiny(0)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    report = load_partial(model, *checkpoint_of(other))
    assert {name.split(".")[1] for name in report.left_out if name.startswith("cross_encoder")} == {"2"}
    missing = {".".join(name.split(".")[:2]) for name in report.missing}
    assert missing == {"cross_decoder.1", "text_pooler.project", "image_poolers.0"}
    for name, tensor in model.state_dict().items():
        expected = before[name] if name in report.missing else other.state_dict()[name]
        assert torch.equal(tensor, expected), name


def test_same_model_is_loaded_completely(tiny, batch):
    other, model = tiny(7), tiny(0)
    report = load_partial(model, *checkpoint_of(other))
    assert report.left_out == report.missing == []
    assert torch.equal(model.embed_image(batch.image), other.embed_image(batch.image))


def test_tables_of_other_lengths_share_the_rows_that_both_have(tiny):
    table = "text_embedding.positions.weight"
    short, long = tiny(7, max_positions=8), tiny(0, max_positions=12)
    old, last = short.state_dict()[table].clone(), long.state_dict()[table][8:].clone()
    report = load_partial(long, *checkpoint_of(short))
    assert report.missing == [table] and report.left_out == []
    assert torch.equal(long.state_dict()[table], torch.cat([old, last]))
    report = load_partial(tiny(1, max_positions=6), *checkpoint_of(short))
    assert report.left_out == [f"{table}[6:]"] and report.missing == []


def test_untied_head_starts_as_the_word_embeddings_of_a_tied_checkpoint(tiny):
    tied, free = tiny(7), tiny(0, tie_lm_head=False)
    assert load_partial(free, *checkpoint_of(tied)).missing == []
    assert torch.equal(free.word_head.weight, tied.text_embedding.words.weight)
    assert load_partial(tiny(0), *checkpoint_of(free)).left_out == ["word_head.weight"]


@pytest.mark.parametrize(("key", "value"), [("heads", 4), ("hidden", 32), ("separate_region_norms", True)])
def test_config_keys_that_change_the_meaning_of_weights_are_refused(tiny, key, value):
    """Another number of heads keeps every shape and changes what every number means."""
    with pytest.raises(CheckpointError, match=rf"{key}: .* in the model, {value} in the weights"):
        load_partial(tiny(0), *checkpoint_of(tiny(7, **{key: value})))


def test_unrelated_weights_are_refused(tiny):
    with pytest.raises(CheckpointError, match="none of these weights fits"):
        load_partial(tiny(0), {"a.weight": torch.zeros(3)}, {})
