"""The layers against PyTorch's own with the same weights."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from vlp_models.data.batch import Regions
from vlp_models.errors import DataError
from vlp_models.models import DataFacts, build_model
from vlp_models.models.layers.attention import MultiHeadAttention, causal_mask, padding_mask, scaled_dot_product
from vlp_models.models.layers.blocks import DecoderBlock, TransformerBlock, init_weights
from vlp_models.models.layers.embeddings import RegionEmbedding
from vlp_models.models.layers.heads import AttentionPooler
from vlp_models.models.layers.packing import Packing, changed_from, take

SIZES = {"dropout": 0.0, "attention_dropout": 0.0, "eps": 1e-5}
MASK = torch.arange(6) < torch.tensor([[6], [4], [1]])


def copy_attention(ours: MultiHeadAttention, theirs: nn.MultiheadAttention) -> None:
    ours.qkv.load_state_dict({"weight": theirs.in_proj_weight, "bias": theirs.in_proj_bias})
    ours.out.load_state_dict(theirs.out_proj.state_dict())


@pytest.fixture
def x() -> torch.Tensor:
    torch.manual_seed(0)
    return torch.randn(3, 6, 16, dtype=torch.float64)


@pytest.mark.parametrize("part", ["cross", "project"])
def test_parts_of_a_packed_projection_equal_slices_of_its_weights_to_the_bit(part):
    torch.manual_seed(0)
    attention = MultiHeadAttention(8, 2).eval()
    x = torch.randn(2, 3, 8)
    weight, bias = attention.qkv.weight, attention.qkv.bias
    if part == "project":
        keys, values = nn.functional.linear(x, weight[8:], bias[8:]).chunk(2, -1)
        found = attention.project(x)
        assert torch.equal(found.keys, keys.unflatten(-1, (2, -1)).transpose(1, 2))
        assert torch.equal(found.values, values.unflatten(-1, (2, -1)).transpose(1, 2))
    else:
        query = nn.functional.linear(x, weight[:8], bias[:8]).unflatten(-1, (2, -1)).transpose(1, 2)
        memory = attention.project(torch.randn(2, 4, 8))
        expected = nn.functional.scaled_dot_product_attention(query, memory.keys, memory.values)
        assert torch.equal(attention.cross(x, memory), attention.out(expected.transpose(1, 2).flatten(2)))


def test_attention_equals_torch(x):
    theirs = nn.MultiheadAttention(16, 4, batch_first=True, dtype=torch.float64)
    nn.init.normal_(theirs.in_proj_bias)
    ours = MultiHeadAttention(16, 4).double()
    copy_attention(ours, theirs)
    expected, _ = theirs(x, x, x, key_padding_mask=~MASK)
    torch.testing.assert_close(ours(x, padding_mask(MASK)), expected)
    memory = torch.randn(3, 9, 16, dtype=torch.float64)
    torch.testing.assert_close(ours.cross(x, ours.project(memory)), theirs(x, memory, memory)[0])


def test_attention_is_float32_in_mixed_precision_on_a_cpu(x):
    heads = x.float().unflatten(-1, (4, -1)).transpose(1, 2)
    plain = scaled_dot_product(heads, heads, heads, padding_mask(MASK), 0.0)
    with torch.autocast("cpu", torch.bfloat16):
        rounded = heads.bfloat16()
        mixed = scaled_dot_product(rounded, rounded, rounded, padding_mask(MASK), 0.0)
        assert (heads[0, 0] @ heads[0, 0].T).dtype == torch.bfloat16, "what is around it is not"
    assert mixed.dtype == torch.float32
    torch.testing.assert_close(mixed, plain, rtol=0.03, atol=0.03)
    exact = scaled_dot_product(*(rounded.float(),) * 3, padding_mask(MASK), 0.0)
    assert torch.equal(mixed, exact), "only what comes in is rounded"


def test_pooler_is_a_weighted_mean_of_real_tokens(x):
    pooler, packing = AttentionPooler(16, 8, dropout=0.0).double(), Packing.of(MASK)
    scores = pooler.score(x)[..., 0]
    for i, length in enumerate(MASK.sum(1)):
        weights = scores[i, :length].softmax(0)
        expected = pooler.project((weights[:, None] * x[i, :length]).sum(0))
        torch.testing.assert_close(pooler(packing.pack(x), packing)[i], expected, rtol=1e-6, atol=1e-6)


def test_region_embedding_starts_with_the_mean_of_visible_regions():
    embedding = RegionEmbedding(2, 16, dropout=0.0, eps=1e-5)
    regions = Regions(
        features_BRF=torch.tensor([[[2.0, 0.0], [4.0, 2.0], [9.0, 9.0], [0.0, 0.0]]]),
        boxes_BR4=torch.tensor([[[0.0, 0.0, 0.5, 0.5], [0.25, 0.5, 1.0, 1.0], [0.1, 0.1, 0.2, 0.3], [0.0] * 4]]),
        class_probs_BRC=torch.zeros(1, 4, 3),
        mask_BR=torch.tensor([[True, True, True, False]]),
    )
    x, packing = embedding(regions, torch.tensor([[False, False, True, False]]))
    assert packing.mask_BT.tolist() == [[True, True, True, True, False]]
    features = torch.tensor([[3.0, 1.0], [2.0, 0.0], [4.0, 2.0], [0.0, 0.0]])
    locations = torch.tensor(
        [[0, 0, 1, 1, 1], [0, 0, 0.5, 0.5, 0.25], [0.25, 0.5, 1, 1, 0.375], [0.1, 0.1, 0.2, 0.3, 0.02]]
    )
    expected = embedding.norm(embedding.features(features) + embedding.locations(locations))
    torch.testing.assert_close(x, expected)


def test_packed_tokens_equal_padded_ones(x):
    """In every block, with gradients; padding is neither read nor computed."""
    packing, memory = Packing.of(MASK), torch.randn(3, 9, 16, dtype=torch.float64)
    encoder, decoder = (b(16, 4, 32, **SIZES).double() for b in (TransformerBlock, DecoderBlock))
    for block in (encoder, decoder):
        results = []
        for packed in (False, True):
            inputs = x.clone().requires_grad_()
            rows = packing.pack(inputs) if packed else inputs
            more = (packing,) if packed else ()
            if block is encoder:
                y = block(rows, padding_mask(MASK), *more)
            else:
                remembered, everything = block.cross.project(memory), torch.ones(3, 1, 1, 9, dtype=torch.bool)
                y = block(rows, causal_mask(6), remembered, everything, *more, *more)
            y = y if packed else packing.pack(y)
            block.zero_grad()
            (y * torch.arange(16)).sum().backward()
            results.append([y, inputs.grad, *(p.grad.clone() for p in block.parameters())])
        for padded_one, packed_one in zip(*results, strict=True):
            torch.testing.assert_close(packed_one, padded_one, rtol=0, atol=1e-11)
        assert not results[1][1][~MASK].any()


def test_packing_places():
    packing = Packing.of(MASK)
    x = torch.randn(3, 6, 2)
    assert torch.equal(packing.pad(packing.pack(x)), x * MASK[..., None])
    assert torch.equal(packing.mask_BT, MASK)
    assert packing.rows_at(torch.arange(6).expand(3, 6) == 3).tolist() == [3, 9]
    other = Packing.of(torch.tensor([[True, False], [True, True], [True, True]]))
    joint = packing.concat(other)
    assert joint.shape == (3, 8) and joint.split == 11
    assert joint.mask_BT.sum(1).tolist() == [7, 6, 3]
    assert joint.positions_M[11:].tolist() == [6, 6, 7, 6, 7]

    owners = packing.by_owner(torch.tensor([1, 0, 1]), 3)  # sentences of 6, 4 and 1 tokens
    assert owners.shape == (3, 7)
    assert owners.mask_BT.sum(1).tolist() == [4, 7, 0]
    assert owners.places_M.tolist() == [*range(7, 13), *range(4), 13]
    assert packing.by_owner(None, 3) is packing


def test_nothing_is_copied_without_padding():
    x = torch.randn(2, 3, 4)
    packing = Packing.of(torch.ones(2, 3, dtype=torch.bool))
    assert packing.full and packing.pack(x).data_ptr() == x.data_ptr() == packing.pad(packing.pack(x)).data_ptr()
    pairs = Packing.of(torch.ones(6, 1, dtype=torch.bool))
    together = pairs.by_owner(torch.tensor([0, 0, 1, 1, 2, 2]), 3)
    assert together.full and together.shape == (3, 2)
    apart = pairs.by_owner(torch.tensor([0, 1, 2, 0, 1, 2]), 3)
    assert not apart.full and apart.places_M.tolist() == [0, 2, 4, 1, 3, 5]


def test_gradient_of_take_is_exact():
    x, rows = torch.randn(5, 3, dtype=torch.float64, requires_grad=True), torch.tensor([4, 0, 2])
    assert torch.autograd.gradcheck(lambda t: take(t, rows), (x,))


def test_second_pass_computes_the_changed_ends_only():
    """Values and gradients of both passes equal those of two complete passes."""
    block = DecoderBlock(16, 4, 32, **SIZES).double()
    words = torch.arange(18).reshape(3, 6)
    later = words.clone()
    later[0, 3], later[1, 0] = 50, 51
    table = torch.randn(60, 16, dtype=torch.float64)
    source = torch.randn(3, 4, 16, dtype=torch.float64)

    def total(reuse):
        block.zero_grad()
        memory, everything = block.cross.project(source), torch.ones(3, 1, 1, 4, dtype=torch.bool)
        first = Packing.of(MASK).caching()
        y = block(first.pack(table[words]), causal_mask(6), memory, everything, first, first)
        again = Packing.of(MASK & changed_from(later, words)).continuing(first) if reuse else Packing.of(MASK)
        z = block(again.pack(table[later]), causal_mask(6), memory, everything, again, again)
        if reuse:
            assert len(again) == 3 + 4
            z = first.pad(y).flatten(0, 1).index_copy(0, again.places_M, z)[first.places_M]
        loss = (y.sin() + 2 * z.cos()).sum()
        loss.backward()
        return [loss, *(p.grad.clone() for p in block.parameters())]

    for whole, part in zip(total(False), total(True), strict=True):
        torch.testing.assert_close(part, whole, rtol=0, atol=1e-11)


def test_first_rows_are_those_of_the_first_tokens() -> None:
    for mask in (MASK, MASK[:1], MASK[:0], torch.ones(3, 4, dtype=torch.bool)):
        packing = Packing.of(mask)
        rows = packing.first_rows()
        assert packing.places_M[rows].tolist() == [i * mask.shape[1] for i in range(len(mask))]
    for empty in range(3):  # a sequence without a first token
        mask = MASK.clone()
        mask[empty] = False
        with pytest.raises(
            DataError, match=r"1 of 3 texts in the batch have no first token: a text starts with \[CLS\]"
        ):
            Packing.of(mask).first_rows()
    with pytest.raises(DataError, match="2 of 2 texts"):
        Packing.of(MASK[:2, :0]).first_rows()


@pytest.mark.parametrize("decodes", [False, True])
def test_block_equals_torch(x, decodes):
    theirs_class = nn.TransformerDecoderLayer if decodes else nn.TransformerEncoderLayer
    theirs = theirs_class(16, 4, 32, dropout=0.0, activation="gelu", batch_first=True, dtype=torch.float64)
    ours = (DecoderBlock if decodes else TransformerBlock)(16, 4, 32, **SIZES).double()
    copy_attention(ours.attention, theirs.self_attn)
    norms = [ours.attention_end.norm, ours.ffn_end.norm]
    if decodes:
        copy_attention(ours.cross, theirs.multihead_attn)
        norms.insert(1, ours.cross_end.norm)
    for number, norm in enumerate(norms, 1):
        norm.load_state_dict(getattr(theirs, f"norm{number}").state_dict())
    for layer, linear in ((ours.ffn[0], theirs.linear1), (ours.ffn[2], theirs.linear2)):
        layer.load_state_dict(linear.state_dict())
    if not decodes:
        torch.testing.assert_close(ours(x, padding_mask(MASK)), theirs(x, src_key_padding_mask=~MASK))
        return
    memory, everything = torch.randn(3, 9, 16, dtype=torch.float64), torch.ones(3, 9, dtype=torch.bool)
    causal = nn.Transformer.generate_square_subsequent_mask(6, dtype=torch.float64)
    expected = theirs(x, memory, tgt_mask=causal, tgt_key_padding_mask=torch.zeros(3, 6).double())
    projected = ours.cross.project(memory)
    torch.testing.assert_close(ours(x, causal_mask(6), projected, padding_mask(everything)), expected)


@pytest.mark.parametrize("family", ["tden", "unified_vlp", "xgpt"])
def test_features_are_dropped_in_all_regions_of_an_image(family):
    small = {"hidden": 16, "heads": 2, "intermediate": 32, "feature_dropout": 0.5}
    facts = DataFacts(vocab_size=20, mask_id=4, feature_dim=32, num_classes=3)
    torch.manual_seed(1)
    embedding, seen = build_model(family, small, facts).region_embedding, []
    embedding.features.register_forward_hook(lambda module, inputs, output: seen.append(inputs[0]))
    regions = Regions(
        features_BRF=torch.ones(2, 3, 32),
        boxes_BR4=torch.rand(2, 3, 4),
        class_probs_BRC=torch.full((2, 3, 3), 1 / 3),
        mask_BR=torch.ones(2, 3, dtype=torch.bool),
    )
    embedding(regions)
    embedding.eval()(regions)
    # TDEN has [IMG], the mean of the regions, before the regions of each image.
    dropped, kept = (x.view(2, -1, 32) for x in seen)
    assert set(dropped.unique().tolist()) == {0.0, 2.0} and bool((kept == 1).all())
    assert torch.equal(dropped, dropped[:, :1].expand_as(dropped))
    assert not torch.equal(dropped[0], dropped[1])


def test_initial_weights():
    block = TransformerBlock(256, 4, 512, **SIZES)
    block.temperature = nn.Parameter(torch.tensor(0.07))  # a scalar keeps its value
    nn.init.constant_(block.ffn_end.norm.weight, 3.0)
    init_weights(block, 0.02)
    assert float(block.ffn[0].weight.detach().std()) == pytest.approx(0.02, rel=0.03)
    assert not block.attention.qkv.bias.any()
    assert bool((block.ffn_end.norm.weight == 1).all())
    assert block.temperature.item() == pytest.approx(0.07)
