"""BERT's and UniLM's weights in Hugging Face's layout, and checkpoints of Unified VLP's authors in their documented
layout, converted to Unified VLP."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from authors_unified_vlp import weights
from safetensors.torch import save_file
from tiny_unified_vlp import FACTS, MASK, SEP, tiny_unified_vlp
from transformers import BertConfig, BertForPreTraining

from vlp_models.common.state_dicts import read_state_dict
from vlp_models.contrib.public_weights.unified_vlp import convert_bert, convert_unified_vlp
from vlp_models.errors import CheckpointError
from vlp_models.models import build_model
from vlp_models.models.layers.attention import prefix_mask
from vlp_models.models.layers.packing import Packing
from vlp_models.models.unified_vlp.masking import BIDIRECTIONAL, SEQ2SEQ


def bert(seed: int = 0, **changes: Any) -> BertForPreTraining:
    torch.manual_seed(seed)
    config = BertConfig(
        vocab_size=30,
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=32,
        max_position_embeddings=32,
        layer_norm_eps=1e-5,
        attn_implementation="eager",
        **changes,
    )
    model = BertForPreTraining(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.rand_like(parameter) * 0.2)
    return model


@pytest.mark.parametrize("types", [2, 6])
@pytest.mark.parametrize("objective", [BIDIRECTIONAL, SEQ2SEQ])
def test_stack_equals_bert(tmp_path, make_batch, types, objective):
    """Random weights, float32: embeddings of words, the blocks under the paper's masks, and the words' logits, at most
    1e-5 from transformers'."""
    theirs, batch = bert(type_vocab_size=types), make_batch()
    state = {name: tensor.clone() for name, tensor in theirs.state_dict().items()}
    save_file(state, tmp_path / "model.safetensors")
    ours = tiny_unified_vlp().float()
    converted = convert_bert(
        read_state_dict(tmp_path / "model.safetensors"), theirs.config.to_dict(), ours.config
    ).weights
    result = ours.load_state_dict(converted, strict=False)
    assert not result.unexpected_keys
    assert {name.split(".")[0] for name in result.missing_keys} == {"region_embedding", "fusion"}

    image = batch.image.to("cpu")
    image = dataclasses.replace(
        image,
        features_BRF=image.features_BRF.float(),
        boxes_BR4=image.boxes_BR4.float(),
        class_probs_BRC=image.class_probs_BRC.float(),
    )
    segment = {2: {BIDIRECTIONAL: (0, 1), SEQ2SEQ: (0, 1)}, 6: {BIDIRECTIONAL: (0, 1), SEQ2SEQ: (4, 5)}}[types][
        objective
    ]
    ids = batch.text.ids_BT.clone()
    ids[:, 0] = SEP
    places = torch.arange(ids.shape[1])
    with torch.no_grad():
        words = ours.embed_words(batch.text.ids_BT, 0, objective)
        expected = theirs.bert.embeddings(
            input_ids=ids,
            position_ids=(ours.config.region_slots + 1 + places)[None],
            token_type_ids=torch.where(places == 0, *segment).expand_as(ids),
        )
        torch.testing.assert_close(words, expected, rtol=0, atol=1e-5)

        x = torch.cat([ours.embed_visual(ours.embed_regions(image), objective), words], 1)
        real = torch.cat([torch.ones(4, 1, dtype=torch.bool), image.mask_BR, batch.text.mask_BT], 1)
        causal = torch.full((4,), objective == SEQ2SEQ)
        mask = prefix_mask(real, image.mask_BR.shape[1] + 2, causal)
        states, packing = ours.encode(x, real, image.mask_BR.shape[1] + 2, causal)
        added = torch.zeros(mask.shape).masked_fill(~mask, torch.finfo(torch.float32).min)
        found = theirs.bert.encoder(x, attention_mask=added).last_hidden_state
        assert isinstance(packing, Packing)
        torch.testing.assert_close(states, found[real], rtol=0, atol=1e-5)
        logits = theirs.cls.predictions(found)[real]
        torch.testing.assert_close(ours.predict_words(states), logits, rtol=0, atol=1e-5)
    assert logits.std() > 0.1


def test_bert_of_other_sizes_is_refused():
    theirs, ours = bert(), tiny_unified_vlp()
    with pytest.raises(CheckpointError, match="token types 2 or 6, BERT's type_vocab_size 3"):
        convert_bert({}, {**theirs.config.to_dict(), "type_vocab_size": 3}, ours.config)
    state = dict(theirs.state_dict())
    state["bert.extra"] = torch.zeros(1)
    del state["bert.encoder.layer.1.output.dense.bias"]
    with pytest.raises(CheckpointError, match=r"missing: encoder.layer.1.output.dense.bias\n.*unexpected: extra"):
        convert_bert(state, theirs.config.to_dict(), ours.config)


def test_every_weight_is_needed():
    """Every name of the layout is needed, except those that are documented as unused."""
    small = {"vocab": 30, "features": 6, "classes": 5, "answers": 7}
    pretrained, state = weights(**small), weights(vqa=True, **small)
    state["crit_mask_lm_smoothed.one_hot"] = torch.ones(1, 30)
    unused = {"bert.pooler.dense.weight", "bert.pooler.dense.bias", "crit_mask_lm_smoothed.one_hot"}
    for name in state:
        without = {other: tensor for other, tensor in state.items() if other != name}
        if name in unused or name == "cls.predictions.decoder.weight":  # tied: the words again
            convert_unified_vlp(without, heads=2)
            continue
        with pytest.raises(CheckpointError):
            convert_unified_vlp(without, heads=2)
    tied = {"cls.predictions.decoder.weight": state["cls.predictions.decoder.weight"] + 1}
    for changed, task, message in (
        ({**state, "vis_embed.4.weight": torch.zeros(2)}, "", r"unexpected: vis_embed.4.weight"),
        ({**state, **tied}, "", "should be tied to"),
        (state, "captioning", "not of a captioning model"),
        (pretrained, "vqa", r"missing: ans_classifier\.0\.weight"),
        ({"token_embed.embeddings.weight": torch.zeros(3, 4)}, "", "not a checkpoint of the authors' Unified VLP code"),
    ):
        with pytest.raises(CheckpointError, match=message):
            convert_unified_vlp(changed, heads=2, task=task)
    assert convert_unified_vlp(pretrained, heads=2, task="captioning").task == "captioning"


def test_special_tokens_come_from_the_tokenizer():
    """The authors' file does not store which tokens [CLS], [SEP] and [MASK] are."""
    model = tiny_unified_vlp()
    assert (model.config.cls_id, model.config.sep_id, model.config.mask_id) == (2, SEP, MASK)
    facts = dataclasses.replace(FACTS, cls_id=11, sep_id=12, mask_id=13)
    other = build_model("unified_vlp", {"hidden": 16, "heads": 2, "intermediate": 8, "layers": 1}, facts).eval()
    with torch.no_grad():
        x = other.embed_words(torch.tensor([[5, 6]]), 0, SEQ2SEQ)
        y = other.embed_words(torch.tensor([[12, 6]]), 0, SEQ2SEQ)
    assert torch.equal(x, y), "the first place is [SEP]'s"
