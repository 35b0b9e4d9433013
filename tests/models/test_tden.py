"""TDEN's structure: which outputs depend on which inputs, and cached decoding equals teacher forcing."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from invariance import (
    check_cached_steps_equal_teacher_forcing,
    check_later_words_have_no_effect,
    check_samples_are_independent,
)

from vlp_models.data.batch import Batch, Pixels
from vlp_models.errors import DataError, ParamsError
from vlp_models.models import DataFacts, build_model
from vlp_models.objectives.masked_modeling import Corruption

VARIANTS = [
    {},
    {
        "separate_ffn": True,
        "tie_lm_head": False,
        "ism_pooling": "all_layers",
        "similarity_dim": 24,
        "pooler_batch_norm": True,
        "understanding_decoder_mask": "bidirectional",
        "fusion": "product",
    },
    {"use_decoder_in_fusion": False},
    {"fusion_decoder": "apart", "fusion_pooling": "all_layers", "fusion_dim": 24},
    {"structure": "two_stream", "ism_source": "cross_modal"},
    {"structure": "single_stream"},
]
STRUCTURES = ["decoupled", "two_stream", "single_stream"]


def everything(model, batch: Batch) -> dict[str, torch.Tensor]:
    """Return all outputs that tasks use, one row per sample."""
    with torch.no_grad():
        fused = model.fuse(batch.image, batch.text)
        return {
            "pooled": fused.pooled_BP,
            **({} if fused.decoder_BP is None else {"decoder": fused.decoder_BP}),
            "image": model.embed_image(batch.image),
            "text": model.embed_text(batch.text),
            "scores": model.score(model.encode_image(batch.image), batch.text, torch.arange(len(batch))),
            "fused text": fused.text_BTD * batch.text.mask_BT[..., None],
            "logits": model.generation_logits(batch.image, batch.text) * batch.text.mask_BT[..., None],
        }


@pytest.mark.parametrize("variant", VARIANTS)
def test_sample_does_not_depend_on_its_batch(tiny, batch, variant):
    check_samples_are_independent(everything, tiny(**variant), batch)


@pytest.mark.parametrize("structure", STRUCTURES)
def test_generation_does_not_depend_on_later_words(tiny, batch, structure):
    check_later_words_have_no_effect(tiny(structure=structure), batch)


@pytest.mark.parametrize(("source", "leaks"), [("object_encoder", False), ("cross_encoder", True)])
def test_caption_leaks_through_the_image_only_if_configured(tiny, batch, source, leaks):
    """In one pretraining pass, another sentence in the encoder must not change the decoder's predictions."""
    model = tiny(decoder_visual_source=source)
    ids, other = batch.text.ids_BT, batch.text.ids_BT.clone()
    other[:, 1] = 29
    words = torch.zeros_like(batch.text.mask_BT)
    words[:, 1] = True
    corruption = Corruption(ids_BT=ids, words_BT=words)
    visual = model.encode_corrupted(batch, corruption)

    def predictions(encoder_ids):
        done = model.masked_pass(batch, corruption, visual, {"mlm": None, "msg": None}, {"encoder": encoder_ids})
        return done.word_logits["encoder"], done.output.logits_MV

    (mlm, msg), (other_mlm, other_msg) = predictions(ids), predictions(other)
    assert not torch.allclose(mlm, other_mlm)
    assert torch.equal(msg, other_msg) is not leaks


def test_image_and_text_both_reach_every_output(tiny, batch):
    model = tiny()
    before, blank = everything(model, batch), everything(model, dataclasses.replace(batch, image=batch.image.blanked()))
    for name in ("pooled", "image", "scores", "fused text", "logits"):
        assert not torch.allclose(before[name], blank[name]), name
    ids = batch.text.ids_BT.clone()
    ids[:, 1] = 29
    other = everything(model, dataclasses.replace(batch, text=dataclasses.replace(batch.text, ids_BT=ids)))
    for name in ("pooled", "text", "scores", "logits"):
        assert not torch.allclose(before[name], other[name]), name


@pytest.mark.parametrize("structure", STRUCTURES)
def test_cached_steps_equal_teacher_forcing(tiny, batch, structure):
    check_cached_steps_equal_teacher_forcing(tiny(structure=structure), batch)


@pytest.mark.parametrize("structure", STRUCTURES)
def test_structure_has_no_unused_weights(tiny, structure):
    parts = {name.split(".")[0] for name in tiny(structure=structure).state_dict()}
    absent = {"cross_decoder"} if structure != "decoupled" else set()
    absent |= {"object_encoder", "sentence_encoder"} if structure == "single_stream" else set()
    stacks = {"object_encoder", "sentence_encoder", "cross_encoder", "cross_decoder"}
    assert parts & stacks == stacks - absent


def test_sizes_equal_the_authors_model():
    """The authors' code counts 316.13M for pretraining, 233.77M for captioning, 162.67M for retrieval, 294.85M for VQA
    and 233.53M for VCR; it has one more text type (768), and no pooled feature for VQA in the first three."""
    public = {
        "separate_ffn": True,
        "tie_lm_head": False,
        "ism_pooling": "all_layers",
        "similarity_dim": 1024,
        "pooler_batch_norm": True,
    }
    facts = DataFacts(vocab_size=30522, mask_id=103, feature_dim=2048, num_classes=1601)
    with torch.device("meta"):
        model = build_model("tden", public, facts)
    count = {name: sum(p.numel() for p in part.parameters()) for name, part in model.named_children()}
    encoders = ["region_embedding", "text_embedding", "object_encoder", "sentence_encoder"]
    pretraining = sum(count.values()) - count["fusion_poolers"] - count["fusion_norm"]
    assert round((pretraining + 768) / 1e6, 2) == 316.13
    assert round((sum(count[c] for c in [*encoders, "cross_decoder", "word_head"]) + 768) / 1e6, 2) == 233.77
    assert round((sum(count[c] for c in [*encoders, "text_pooler", "image_poolers"]) + 768) / 1e6, 2) == 162.67

    fusion = {"fusion": "product", "fusion_pooling": "all_layers", "fusion_decoder": "apart"}
    for own, parts, head, expected in (
        ({}, [*encoders, "cross_encoder", "cross_decoder"], 2 * (768 + 1) * 3129, 294.85),  # VQA
        ({"fusion_dim": 1024, "use_decoder_in_fusion": False}, [*encoders, "cross_encoder"], 1025, 233.53),  # VCR
    ):
        with torch.device("meta"):
            model = build_model("tden", {**public, **fusion, **own}, dataclasses.replace(facts, num_classes=0))
        count = {name: sum(p.numel() for p in part.parameters()) for name, part in model.named_children()}
        fused = sum(number for name, number in count.items() if name.startswith("fusion_"))
        assert round((sum(count[c] for c in parts) + fused + head + 768) / 1e6, 2) == expected


def test_wrong_inputs_are_explained(tiny, batch):
    with pytest.raises(ParamsError, match="known: tden"):
        build_model("tedn", {}, DataFacts(vocab_size=30, mask_id=4))
    with pytest.raises(DataError, match="region features"):
        tiny().embed_image(Pixels(pixels_B3HW=torch.zeros(1, 3, 8, 8)))
    model = tiny(max_positions=8)
    with pytest.raises(ParamsError, match="max_positions is 8"):
        model.embed_text(batch.text)
    with pytest.raises(ParamsError, match="max_positions is 8"):
        model.start(batch.image, max_len=9)
