"""Starting from another stage's checkpoint: what fits is taken, the rest is named."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from vlp_models.errors import CheckpointError


def given(model):
    """What a checkpoint says of itself."""
    return model.state_dict(), dataclasses.asdict(model.config)


def test_another_stages_model_fills_what_both_have(tiny):
    other = tiny(7, encoder_layers=3, decoder_layers=1, similarity_dim=8)
    model = tiny(0)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    adopted = model.adopt(*given(other))
    assert {name.split(".")[1] for name in adopted.left_out if name.startswith("cross_encoder")} == {"2"}
    fresh = {".".join(name.split(".")[:2]) for name in adopted.fresh}
    assert fresh == {"cross_decoder.1", "text_pooler.project", "image_poolers.0"}
    for name, tensor in model.state_dict().items():
        expected = before[name] if name in adopted.fresh else other.state_dict()[name]
        assert torch.equal(tensor, expected), name


def test_the_same_model_is_taken_whole(tiny, batch):
    other, model = tiny(7), tiny(0)
    adopted = model.adopt(*given(other))
    assert adopted.left_out == adopted.fresh == []
    assert torch.equal(model.embed_image(batch.image), other.embed_image(batch.image))


def test_a_longer_table_keeps_the_rows_that_both_have(tiny):
    table = "text_embedding.positions.weight"
    short, long = tiny(7, max_positions=8), tiny(0, max_positions=12)
    old, last = short.state_dict()[table].clone(), long.state_dict()[table][8:].clone()
    adopted = long.adopt(*given(short))
    assert adopted.fresh == [table] and adopted.left_out == []
    assert torch.equal(long.state_dict()[table], torch.cat([old, last]))
    adopted = tiny(1, max_positions=6).adopt(*given(short))
    assert adopted.left_out == [f"{table}[6:]"] and adopted.fresh == []


def test_an_untied_head_begins_as_the_words_it_was_tied_to(tiny):
    tied, free = tiny(7), tiny(0, tie_lm_head=False)
    assert free.adopt(*given(tied)).fresh == []
    assert torch.equal(free.word_head.weight, tied.text_embedding.words.weight)
    assert tiny(0).adopt(*given(free)).left_out == ["word_head.weight"]


@pytest.mark.parametrize(("key", "value"), [("heads", 4), ("hidden", 32), ("separate_region_norms", True)])
def test_what_would_mean_something_else_is_refused(tiny, key, value):
    """Other heads leave every shape as it was, and no number its meaning."""
    with pytest.raises(CheckpointError, match=f"{key}: .* here, {value} there"):
        tiny(0).adopt(*given(tiny(7, **{key: value})))


def test_weights_of_nothing_alike_are_refused(tiny):
    with pytest.raises(CheckpointError, match="nothing of these weights fits"):
        tiny(0).adopt({"a.weight": torch.zeros(3)}, {})


@pytest.mark.parametrize("config", [{}, {"separate_ffn": True, "fusion": "product"}, {"structure": "single_stream"}])
def test_every_parameter_is_in_one_group(tiny, config):
    model = tiny(**config)
    grouped = [id(p) for parameters in model.parameter_groups().values() for p in parameters]
    assert sorted(grouped) == sorted(map(id, model.parameters()))
    assert "heads" in model.parameter_groups()
