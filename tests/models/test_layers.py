"""Our layers against PyTorch's own, with the same weights."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from vlp_models.data.batch import Regions
from vlp_models.models.layers.attention import MultiHeadAttention
from vlp_models.models.layers.blocks import DecoderBlock, TransformerBlock
from vlp_models.models.layers.embeddings import RegionEmbedding
from vlp_models.models.layers.init import init_weights
from vlp_models.models.layers.masks import causal_mask, padding_mask
from vlp_models.models.layers.pooling import AttentionPooler

SIZES = {"dropout": 0.0, "attention_dropout": 0.0, "eps": 1e-5}
MASK = torch.arange(6) < torch.tensor([[6], [4], [1]])


def copy_attention(ours: MultiHeadAttention, theirs: nn.MultiheadAttention) -> None:
    ours.qkv.load_state_dict({"weight": theirs.in_proj_weight, "bias": theirs.in_proj_bias})
    ours.out.load_state_dict(theirs.out_proj.state_dict())


def copy(pairs: list[tuple[nn.Module, nn.Module]]) -> None:
    for ours, theirs in pairs:
        ours.load_state_dict(theirs.state_dict())


@pytest.fixture
def x() -> torch.Tensor:
    torch.manual_seed(0)
    return torch.randn(3, 6, 16, dtype=torch.float64)


def test_attention_equals_torch(x):
    theirs = nn.MultiheadAttention(16, 4, batch_first=True, dtype=torch.float64)
    nn.init.normal_(theirs.in_proj_bias)
    ours = MultiHeadAttention(16, 4).double()
    copy_attention(ours, theirs)
    expected, _ = theirs(x, x, x, key_padding_mask=~MASK)
    torch.testing.assert_close(ours(x, padding_mask(MASK)), expected)
    memory = torch.randn(3, 9, 16, dtype=torch.float64)
    torch.testing.assert_close(ours.cross(x, ours.project(memory)), theirs(x, memory, memory)[0])


def test_block_equals_torch(x):
    theirs = nn.TransformerEncoderLayer(
        16, 4, 32, dropout=0.0, activation="gelu", batch_first=True, norm_first=False, dtype=torch.float64
    )
    ours = TransformerBlock(16, 4, 32, **SIZES).double()
    copy_attention(ours.attention, theirs.self_attn)
    copy(
        [
            (ours.attention_end.norm, theirs.norm1),
            (ours.ffn[0], theirs.linear1),
            (ours.ffn[2], theirs.linear2),
            (ours.ffn_end.norm, theirs.norm2),
        ]
    )
    expected = theirs(x, src_key_padding_mask=~MASK)
    torch.testing.assert_close(ours(x, padding_mask(MASK)), expected)


def test_decoder_block_equals_torch(x):
    theirs = nn.TransformerDecoderLayer(
        16, 4, 32, dropout=0.0, activation="gelu", batch_first=True, norm_first=False, dtype=torch.float64
    )
    ours = DecoderBlock(16, 4, 32, **SIZES).double()
    copy_attention(ours.attention, theirs.self_attn)
    copy_attention(ours.cross, theirs.multihead_attn)
    copy(
        [
            (ours.attention_end.norm, theirs.norm1),
            (ours.cross_end.norm, theirs.norm2),
            (ours.ffn[0], theirs.linear1),
            (ours.ffn[2], theirs.linear2),
            (ours.ffn_end.norm, theirs.norm3),
        ]
    )
    memory = torch.randn(3, 9, 16, dtype=torch.float64)
    everything = torch.ones(3, 9, dtype=torch.bool)
    causal = nn.Transformer.generate_square_subsequent_mask(6, dtype=torch.float64)
    expected = theirs(x, memory, tgt_mask=causal, tgt_key_padding_mask=torch.zeros(3, 6).double())
    mask = causal_mask(torch.ones(3, 6, dtype=torch.bool))
    torch.testing.assert_close(ours(x, mask, memory, padding_mask(everything)), expected)


def test_pooler_is_a_weighted_mean_of_real_tokens(x):
    pooler = AttentionPooler(16, 8, dropout=0.0).double()
    scores = pooler.score(x)[..., 0]
    for i, length in enumerate(MASK.sum(1)):
        weights = scores[i, :length].softmax(0)
        expected = pooler.project((weights[:, None] * x[i, :length]).sum(0))
        torch.testing.assert_close(pooler(x, MASK)[i], expected, rtol=1e-6, atol=1e-6)


def test_region_embedding_begins_with_the_mean_of_visible_regions():
    embedding = RegionEmbedding(2, 16, dropout=0.0, eps=1e-5)
    regions = Regions(
        features_BRF=torch.tensor([[[2.0, 0.0], [4.0, 2.0], [9.0, 9.0], [0.0, 0.0]]]),
        boxes_BR4=torch.tensor([[[0.0, 0.0, 0.5, 0.5], [0.25, 0.5, 1.0, 1.0], [0.1, 0.1, 0.2, 0.3], [0.0] * 4]]),
        class_probs_BRC=torch.zeros(1, 4, 3),
        mask_BR=torch.tensor([[True, True, True, False]]),
    )
    x, mask = embedding(regions, torch.tensor([[False, False, True, False]]))
    assert mask.tolist() == [[True, True, True, True, False]]
    features = torch.tensor([[3.0, 1.0], [2.0, 0.0], [4.0, 2.0], [0.0, 0.0]])
    locations = torch.tensor(
        [[0, 0, 1, 1, 1], [0, 0, 0.5, 0.5, 0.25], [0.25, 0.5, 1, 1, 0.375], [0.1, 0.1, 0.2, 0.3, 0.02]]
    )
    expected = embedding.norm(embedding.features(features) + embedding.locations(locations))
    torch.testing.assert_close(x[0, :4], expected)


def test_initial_weights():
    block = TransformerBlock(256, 4, 512, **SIZES)
    init_weights(block, 0.02)
    assert float(block.ffn[0].weight.detach().std()) == pytest.approx(0.02, rel=0.03)
    assert not block.attention.qkv.bias.any()
    assert bool((block.ffn_end.norm.weight == 1).all())
