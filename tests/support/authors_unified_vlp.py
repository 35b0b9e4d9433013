"""The weights and inputs that the code of Unified VLP's authors was run on, generated again, and our model with them.

The model is imported from the file that the authors' code would have saved.

Shape suffixes: N texts, A answers.
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from bert_shapes import add_linear, bert_shapes
from torch import Tensor

from vlp_models.contrib.public_weights.unified_vlp import read_unified_vlp
from vlp_models.data.batch import Batch, ScoredRegions, Text
from vlp_models.models import DataFacts, build_model
from vlp_models.models.convert import ImportedModel, ImportRequest
from vlp_models.models.unified_vlp.model import UnifiedVLP

CLS, SEP, MASK = 101, 102, 103  # in BERT's vocabulary
VOCAB, HIDDEN, HEADS, INTERMEDIATE, LAYERS, POSITIONS = 160, 32, 4, 64, 3, 128
REGIONS, FEATURES, CLASSES, ANSWERS = 100, 2048, 1601, 3129  # the public code's
COUNT_EPS = 1e-5  # which the public code adds to the number of hidden words
STEPS = 20  # of its decoding
SIDES = ((640, 480), (480, 640), (333, 500), (1000, 90))  # of the images, in pixels


def normal(name: str, *shape: int) -> np.ndarray[Any, np.dtype[np.float64]]:
    """The same numbers for a name, ever: NumPy has frozen this generator."""
    return np.random.RandomState(zlib.crc32(name.encode())).standard_normal(shape)


def weights(
    vqa: bool = False,
    *,
    vocab: int = VOCAB,
    features: int = FEATURES,
    classes: int = CLASSES,
    answers: int = ANSWERS,
) -> dict[str, Tensor]:
    """A checkpoint as the public code lays it out, float32. Every part counts: no bias is 0, no norm 1."""
    shapes = bert_shapes(
        vocab=vocab, positions=POSITIONS, types=6, hidden=HIDDEN, intermediate=INTERMEDIATE, layers=LAYERS
    )
    add_linear(shapes, "bert.pooler.dense", HIDDEN, HIDDEN)
    add_linear(shapes, "vis_embed.0", features, features)
    add_linear(shapes, "vis_embed.2", HIDDEN, features)
    add_linear(shapes, "vis_pe_embed.0", HIDDEN, 6 + classes)
    if vqa:
        add_linear(shapes, "ans_classifier.0", 2 * HIDDEN, HIDDEN)
        add_linear(shapes, "ans_classifier.2", answers, 2 * HIDDEN)
    scales = {"word_": 0.4, "position_": 0.6, "token_type_": 0.4, "query": 1.6 / HIDDEN**0.5, "key": 1.6 / HIDDEN**0.5}
    state = {}
    for name, shape in shapes.items():
        drawn = "embedding" in name or name == "cls.predictions.bias"
        values = normal(name + "40" * drawn, *shape)  # of 60 such names one whose captions differ in length
        if len(shape) == 2:
            values *= next((scale for part, scale in scales.items() if part in name), 1.4 / shape[1] ** 0.5)
        elif name == "cls.predictions.bias":
            values *= 1.7
            values[SEP : SEP + 1] = 3  # none in a smaller vocabulary
        else:
            values = values * 0.2 + name.endswith("LayerNorm.weight")
        state[name] = torch.from_numpy(values).float()
    state["cls.predictions.decoder.weight"] = state["bert.embeddings.word_embeddings.weight"]
    return state


@dataclass(frozen=True, kw_only=True)
class Picture:
    """Of one image: features [100, 2048], class probabilities [100, 1601], boxes in pixels [100, 4], confidence [100];
    float32."""

    features: Any
    classes: Any
    boxes: Any
    scores: Any


def picture(number: int) -> Picture:
    width, height = SIDES[number]
    corners = np.random.RandomState(number).uniform(0.02, 0.97, (REGIONS, 2, 2))
    corners.sort(axis=1)
    boxes = (corners * (width, height)).reshape(REGIONS, 4)
    boxes[7, 2:] = boxes[7, :2]  # a box without area
    boxes[9] = boxes[9, [2, 1, 0, 3]]  # and one of less
    logits = 3 * normal(f"classes {number}", REGIONS, CLASSES)
    classes = np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)
    scores = np.sort(np.random.RandomState(50 + number).uniform(0.2, 1, REGIONS))[::-1]
    features = np.maximum(normal(f"features {number}", REGIONS, FEATURES) + normal(f"image {number}", FEATURES), 0)
    return Picture(
        features=features.astype(np.float32),
        classes=classes.astype(np.float32),
        boxes=boxes.astype(np.float32),
        scores=scores.astype(np.float32),
    )


# (image, words before the cut to 20, objective); images come several times
SAMPLES = (
    (0, 12, "seq2seq"),
    (1, 1, "bidirectional"),
    (0, 23, "bidirectional"),
    (2, 7, "seq2seq"),
    (3, 16, "bidirectional"),
    (2, 20, "seq2seq"),
    (1, 5, "seq2seq"),
    (3, 20, "bidirectional"),
)


def sentence(sample: int) -> list[int]:
    """Words that are none of the special ones."""
    words = [i for i in range(1, VOCAB) if not 100 <= i <= MASK]
    picked: list[int] = np.random.RandomState(70 + sample).choice(words, SAMPLES[sample][1]).tolist()
    return picked


def answer_scores() -> Tensor:
    """Soft scores of each sample's answers, float64 [N, A]."""
    random = np.random.RandomState(80)
    shape = (len(SAMPLES), ANSWERS)
    scores = random.choice([0.3, 0.6, 0.9, 1.0], shape) * (random.uniform(size=shape) < 0.002)
    return torch.from_numpy(scores)


def drawn() -> tuple[Tensor, Tensor, Tensor]:
    """What self-critical training would have drawn: 21 tokens of four captions, none [SEP]; logits; advantages."""
    tokens = np.random.RandomState(90).randint(1, 100, (4, 21))
    logits = torch.from_numpy(2 * normal("drawn", 4, 21, VOCAB))
    return torch.from_numpy(tokens), logits, torch.from_numpy(normal("advantages", 4))


ENDS = (4, 20, 0, 11)  # where the same captions have [SEP], if they end


def imported(folder: Path, vqa: bool = False) -> tuple[UnifiedVLP, ImportedModel]:
    file = folder / "model.30.bin"
    torch.save(weights(vqa), file, _use_new_zipfile_serialization=False)  # as torch 1.1 did
    facts = DataFacts(vocab_size=VOCAB, cls_id=CLS, sep_id=SEP, mask_id=MASK, feature_dim=FEATURES, num_classes=CLASSES)
    found = read_unified_vlp(file, ImportRequest(facts=facts, config={}, heads=HEADS))
    own = {key: value for key, value in found.config.items() if key not in ("vocab_size", "feature_dim", "num_classes")}
    model = build_model(found.family, own, facts)
    assert isinstance(model, UnifiedVLP)
    assert not model.load_state_dict(found.weights, strict=False).unexpected_keys
    return model.eval(), found


def images(dtype: torch.dtype) -> ScoredRegions:
    """All four, with two places of padding behind the regions."""
    pictures = [picture(number) for number in range(len(SIDES))]

    def padded(part: str) -> Tensor:
        values = torch.from_numpy(np.stack([getattr(p, part) for p in pictures])).to(dtype)
        return torch.cat([values, torch.zeros_like(values[:, :2])], 1)

    sides_B14 = torch.tensor([[[*side, *side]] for side in SIDES], dtype=dtype)
    return ScoredRegions(
        features_BRF=padded("features"),
        boxes_BR4=padded("boxes") / sides_B14,
        class_probs_BRC=padded("classes"),
        scores_BR=padded("scores"),
        mask_BR=(torch.arange(REGIONS + 2) < REGIONS).expand(len(SIDES), -1).clone(),
    )


def texts() -> Text:
    rows = [torch.tensor([CLS, *sentence(i)[:20], SEP]) for i in range(len(SAMPLES))]
    lengths = torch.tensor([[len(row)] for row in rows])
    ids_NT = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
    owner_N = torch.tensor([image for image, _, _ in SAMPLES])
    return Text(ids_BT=ids_NT, mask_BT=torch.arange(ids_NT.shape[1]) < lengths, owner_N=owner_N)


def batch(dtype: torch.dtype) -> Batch:
    numbers = tuple(map(str, range(len(SAMPLES))))
    return Batch(sample_ids=numbers, image_ids=numbers[: len(SIDES)], image=images(dtype), text=texts())
