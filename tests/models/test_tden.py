"""TDEN's structure: its parts, and where captions may leak."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from vlp_models.models import DataFacts, build_model
from vlp_models.objectives.masked_modeling import Corruption

STRUCTURES = ["decoupled", "two_stream", "single_stream"]


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
