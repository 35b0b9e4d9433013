"""The weights and inputs that TDEN's authors' code was run on, generated again.

tests/golden/authors_tden.json has the checksums of its checkpoints' names and shapes. A weight's values follow from its
name, an input's from its place, by NumPy's `RandomState`, whose streams are stable.

Shape suffixes: N pairs, R regions, T text tokens, A answers.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from public_tden import PUBLIC, public_layout, public_task_layout
from torch import Tensor, nn

from vlp_models.contrib.public_weights.tden import read_xmodaler
from vlp_models.data.batch import Batch, Regions, Text
from vlp_models.data.tokenizer import SPECIAL_TOKENS, Tokenizer
from vlp_models.models import DataFacts, build_model
from vlp_models.models.checkpoint import CheckpointInfo
from vlp_models.models.convert import ImportedModel, ImportRequest
from vlp_models.models.tden.model import TDEN
from vlp_models.objectives import masked_modeling as masking
from vlp_models.params import to_plain
from vlp_models.tasks import task_class
from vlp_models.tasks.base import TaskModel

HEADS, BOS, EOS, MASK = 3, 2, 3, 4
SIZES: dict[str, int] = {"hidden": 24, "heads": HEADS, "intermediate": 40, "sentence": 3, "object": 2, "encoder": 2}
SIZES |= {"decoder": 2, "similarity": 16, "fusion": 32, "vocab": 41, "positions": 24, "features": 6, "classes": 7}
SIZES |= {"answers": 9}
FACTS = DataFacts(vocab_size=41, mask_id=MASK, feature_dim=6, num_classes=7)
CONFIG: dict[str, Any] = {
    **PUBLIC,
    "hidden": 24,
    "heads": HEADS,
    "intermediate": 40,
    "object_layers": 2,
    "sentence_layers": 3,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "similarity_dim": 16,
    "max_positions": 24,
}
KINDS = ("pretraining", "captioning", "retrieval", "vqa", "vcr")  # of checkpoints
# How the authors' code corrupts and matches in pretraining, which no file stores
CORRUPTING = {"mask_scheme": "bert", "zero_overlapping_regions": True, "ism_negatives": "hardest"}

SCENES = {"a": (640, 427, 5), "b": (300, 500, 7), "c": (480, 480, 1), "d": (500, 333, 4)}  # width, height, regions
PAIRS = ("a", "b", "a", "c", "d")  # one image comes twice
LENGTHS = (10, 6, 8, 5, 4)
# Of each word, and of each region, what chance decides: masked, replaced by `REPLACEMENT`, kept but predicted, left
WORDS = ("mm.r.k..", ".m..", "m..kr.", "..m", "..")
REGIONS = ("m....", "..m..m.", "...m.", "m", "....")
REPLACEMENT = 11
CAPTIONED = ("a", "b")  # three captions each
CAPTIONS = (3, 8, 11, 5, 9, 1)  # words; `MOST` tokens are read, and predicted
MOST, BEAMS = 10, 3
DRAWN = ((7, 20, 3), (9, 8, 30, 12, 5, 6, 39, 15, 16, 17), (3,), (22, 7, 7, 9, 3))  # two of each image
REWARDS = (0.7, -0.4, 0.25, -1.1)
CHOICES = ("b", "d")  # images of questions with four answers each
SEGMENTS = ((4, 6, 3, 5, 5, 4, 8, 4), (4, 2, 7, 3, 1, 6, 2, 5))  # tokens before the last segment, and in it
GALLERY, QUERIES = 12, 120
SMOOTHING, MARGIN = 0.1, 0.2
SMALL = 40  # numbers of an output that are kept as they are
NOTHING = 1e-6  # a gradient this small is none: what a softmax does not see, and rounding

NEGATIVES: tuple[Literal["all", "hardest"], ...] = ("all", "hardest")

Numbers = dict[str, Tensor]


def drawn(name: str, *shape: int) -> Tensor:
    """N(0, 1), float32."""
    return torch.from_numpy(np.random.RandomState(zlib.crc32(name.encode())).standard_normal(shape)).float()


def weight(name: str, shape: tuple[int, ...]) -> Tensor:
    """One tensor of a checkpoint, of a scale that lets every path matter."""
    if name.endswith("num_batches_tracked"):
        return torch.tensor(7)
    values = drawn("predictor.bias" if name == "predictor.decoder.bias" else name, *shape)  # one there
    last = name.rpartition(".")[2]
    if last == "running_var":
        return (0.2 * values).exp()
    if last in ("bias", "running_mean"):
        values = 0.2 * values
        if name in ("predictor.bias", "predictor.decoder.bias"):
            values[EOS] += 1.5  # so that some captions end
        return values
    if len(shape) == 1:
        return 1 + 0.2 * values
    if name.endswith((".output.dense.weight", "_output.dense.weight")):
        return 0.45 * values / math.sqrt(shape[1])  # so that the states of different words are distinct
    if name in ("token_embed.embeddings.weight", "bert.embeddings.word_embeddings.weight"):
        return (2.1 if name.startswith("token") else 0.7) * values
    if "position_embeddings" in name or "token_type" in name:
        return 0.7 * values
    return 1.5 * values / math.sqrt(shape[1])


def layout(kind: str) -> dict[str, tuple[int, ...]]:
    """Names and shapes of a checkpoint, one of `KINDS`, as documented (public_tden.py)."""
    if kind in ("vqa", "vcr"):
        vcr = {"use_decoder_in_fusion": False, "segment_types": True, "fusion_dim": 32} if kind == "vcr" else {}
        model = build_model("tden", {**CONFIG, **vcr}, FACTS)
        linear = nn.Linear(24, SIZES["answers"]), nn.Linear(24, SIZES["answers"])
        head = nn.Linear(32, 1) if kind == "vcr" else nn.ModuleDict({"fused": linear[0], "decoder": linear[1]})
        assert isinstance(model, TDEN)
        state = public_task_layout(model, head)
    else:
        model = build_model("tden", CONFIG, FACTS)
        assert isinstance(model, TDEN)
        state = public_layout(model)
        common = ("token_embed.", "visual_embed.", "encoder.")
        own = {"captioning": ("decoder.g_layers.", "predictor."), "retrieval": ("similarity_predictor.",)}.get(kind)
        if own:
            state = {name: tensor for name, tensor in state.items() if name.startswith((*common, *own))}
    return {name: tuple(tensor.shape) for name, tensor in state.items()}


def checksum(shapes: Mapping[str, tuple[int, ...]]) -> int:
    return zlib.crc32("\n".join(f"{name} {list(shape)}" for name, shape in sorted(shapes.items())).encode())


def checkpoint(kind: str) -> dict[str, Tensor]:
    return {name: weight(name, shape) for name, shape in layout(kind).items()}


def imported(kind: str, folder: Path) -> ImportedModel:
    """By way of a file, laid out as that code's own checkpointer does."""
    whole = {"model": checkpoint(kind), "optimizer": {"state": {}}, "scheduler": {}, "iteration": 5}
    torch.save(whole, folder / f"{kind}.pth")
    return read_xmodaler(folder / f"{kind}.pth", ImportRequest(facts=FACTS, config={}, heads=HEADS))


def built(found: ImportedModel, dtype: torch.dtype = torch.float32, **config: Any) -> TDEN:
    torch.manual_seed(0)
    own = {name: value for name, value in found.config.items() if name != "vocab_size"}
    config = {**own, "dropout": 0.0, "attention_dropout": 0.0, **config}
    model = build_model("tden", config, FACTS)
    assert isinstance(model, TDEN)
    assert not model.load_state_dict(dict(found.weights), strict=False).unexpected_keys
    return model.eval().to(dtype)


def task_model(found: ImportedModel, task: str, dtype: torch.dtype, options: Any = None, **config: Any) -> TaskModel:
    """The task on these weights, its classifier's included."""
    model = built(found, dtype, **config)
    vocabulary = [*SPECIAL_TOKENS, *(f"w{i}" for i in range(FACTS.vocab_size - len(SPECIAL_TOKENS)))]
    plain = to_plain(model.config)
    info = CheckpointInfo(
        family="tden", name="tden", model_config=plain, task=task, max_text_len=24, options=options or {}
    )
    labels = [f"a{i}" for i in range(SIZES["answers"])] if task == "vqa" else []
    made = task_class(task)(model, Tokenizer(vocabulary, lowercase=True), info, labels=labels)
    if found.head:
        made.head.load_state_dict(dict(found.head))
    return made.eval().to(dtype)


# ---- Inputs ------------------------------------------------------------------------------------------------------


def scene(name: str) -> dict[str, np.ndarray]:
    """As a detector's file has it: boxes in pixels. The second box lies over the first, in part."""
    width, height, regions = SCENES.get(name, (320, 240, 2))
    corners = np.random.RandomState(zlib.crc32(f"boxes {name}".encode())).uniform(0, 1, (regions, 2, 2))
    low, high = corners.min(1), corners.max(1)
    boxes = np.concatenate([0.7 * low, 0.7 * low + 0.1 + 0.2 * (high - low)], 1)
    boxes[1:2] = boxes[:1] + 0.02
    boxes = (boxes * [width, height, width, height]).round(1)
    return {
        "features": drawn(f"features {name}", regions, SIZES["features"]).numpy(),
        "cls_prob": (1.5 * drawn(f"classes {name}", regions, SIZES["classes"])).softmax(-1).numpy(),
        "boxes": boxes.astype(np.float32),
        "image_w": np.array([width]),
        "image_h": np.array([height]),
    }


def words(name: str, length: int) -> list[int]:
    """Ids of words, no special ones."""
    return (5 + (drawn(name, length).abs() * 1e4).long() % 36).tolist()


def regions(names: tuple[str, ...], dtype: torch.dtype) -> Regions:
    scenes = [scene(name) for name in names]

    def padded(key: str) -> Tensor:
        return nn.utils.rnn.pad_sequence([torch.from_numpy(one[key]) for one in scenes], True).to(dtype)

    sides = torch.tensor([[int(one["image_w"][0]), int(one["image_h"][0])] * 2 for one in scenes], dtype=dtype)
    counts = torch.tensor([len(one["boxes"]) for one in scenes])
    return Regions(
        features_BRF=padded("features"),
        boxes_BR4=padded("boxes") / sides[:, None],
        class_probs_BRC=padded("cls_prob"),
        mask_BR=torch.arange(int(counts.max())) < counts[:, None],
    )


def as_text(rows: list[list[int]], **more: Any) -> Text:
    ids = nn.utils.rnn.pad_sequence([torch.tensor(row) for row in rows], True)
    return Text(ids_BT=ids, mask_BT=torch.arange(ids.shape[1]) < torch.tensor([[len(r)] for r in rows]), **more)


def captions(kind: str) -> list[list[int]]:
    """[CLS] words [SEP] of each pair."""
    return [[BOS, *words(f"{kind} {i}", length - 2), EOS] for i, length in enumerate(LENGTHS)]


def pairs(dtype: torch.dtype, kind: str = "caption") -> Batch:
    return Batch(
        sample_ids=tuple(f"s/{i}" for i in range(len(PAIRS))),
        image_ids=PAIRS,
        image=regions(PAIRS, dtype),
        text=as_text(captions(kind)),
    )


def scores() -> Tensor:
    """Of the answers to five questions. [N, A]"""
    found = torch.zeros(len(PAIRS), SIZES["answers"])
    found[0, 3], found[0, 7], found[1, 1], found[2, 8], found[3, 0] = 1.0, 0.3, 0.6, 0.9, 0.3
    return found


def choices() -> tuple[list[list[int]], list[list[int]]]:
    """Ids and types of texts in two segments, four a question."""
    rows = [
        [BOS, *words(f"first {i}", first - 2), EOS, *words(f"last {i}", last - 1), EOS]
        for i, (first, last) in enumerate(zip(*SEGMENTS, strict=True))
    ]
    return rows, [[0] * first + [1] * last for first, last in zip(*SEGMENTS, strict=True)]


@contextmanager
def chance(shape: tuple[int, int, int]) -> Iterator[None]:
    """`corrupt` draws what `WORDS` and `REGIONS` say. shape: N, T and R."""
    count, tokens, regions = shape
    selected, action, hidden = torch.ones(count, tokens), torch.zeros(count, tokens), torch.ones(count, regions)
    for row in range(count):
        for place, fate in enumerate(WORDS[row], 1):
            selected[row, place] = float(fate == ".")
            action[row, place] = {"k": 0.85, "r": 0.95}.get(fate, 0.0)
        for place, fate in enumerate(REGIONS[row]):
            hidden[row, place] = float(fate == ".")
    answers = iter([selected, action, hidden])
    before = masking.draw_uniform, masking.draw_local_rows
    masking.draw_uniform = lambda *_: next(answers)
    masking.draw_local_rows = lambda size, _: torch.full(size, REPLACEMENT)
    try:
        yield
    finally:
        masking.draw_uniform, masking.draw_local_rows = before
