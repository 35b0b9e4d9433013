"""params.yaml as typed, frozen dataclasses: one section per stage.

An unknown key, a missing key or a value of the wrong type is a `ParamsError` that names the key's place and, for a
misspelt key, the nearest known one. Nothing else in the project reads YAML.
"""

from __future__ import annotations

import dataclasses
import difflib
import types
import typing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeVar

from vlp_models.errors import ParamsError

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class WorldParams:
    """One synthetic dataset. `objects`: scenes in COCO and VQA v2 form; `boxes`: NLVR v1 form."""

    world: Literal["objects", "boxes"]
    seed: int
    train: int  # images (objects) or examples of six permuted images (boxes)
    val: int
    test: int
    questions_per_image: int = 12  # objects only
    size: int = 128  # pixels, objects only
    vcr_per_image: int = 0  # VCR questions as well, objects only; they are read as a dataset of format vcr
    statements: int = 1  # sentences per example, boxes only; genuine NLVR has one
    permutations: int = 6  # images per example, one per order of its boxes, boxes only
    simple: bool = False  # few items, one fact a sentence: a first lesson, boxes only
    descriptions: int = 0  # captions per image that list what it shows, boxes only


@dataclass(frozen=True, kw_only=True)
class SourceParams:
    """One dataset on disk, in a public format. File lists are relative to `root`, keyed by split.

    The key `all` stands for files that hold every split; the Karpathy file (or `split_by`) then divides them.
    """

    format: Literal["coco", "nlvr", "pairs", "vcr"]
    root: str
    images: str = "images"
    captions: dict[str, list[str]] = field(default_factory=dict)
    instances: dict[str, list[str]] = field(default_factory=dict)
    karpathy: str = ""
    questions: dict[str, list[str]] = field(default_factory=dict)
    annotations: dict[str, list[str]] = field(default_factory=dict)
    truth: str = ""  # scene graphs (scenes only), for the truthfulness of captions
    pairs: str = ""  # CSV or JSONL of image,caption[,split]
    validation_directories: list[str] = field(default_factory=list)  # nlvr: train directories held out whole
    splits: list[str] = field(default_factory=list)  # nlvr, vcr: which splits to read; empty: all present
    limit: int = 0  # first records only; 0: all


@dataclass(frozen=True, kw_only=True)
class ValidateParams:
    max_bad_fraction: float
    min_caption_words: int
    max_caption_words: int
    max_image_pixels: int
    min_image_side: int
    max_box_overhang: float  # pixels a box may stick out of its image


@dataclass(frozen=True, kw_only=True)
class DetectorParams:
    source: Literal["train", "weights", "none"]
    weights: str  # path, for source: weights
    sources: list[str]  # datasets whose boxes it learns; empty: all that have boxes
    seed: int
    backbone: Literal["small", "resnet50_fpn"]
    steps: int
    batch_size: int
    lr: float
    max_images: int  # of the train split, per run; 0: all
    feature_dim: int


@dataclass(frozen=True, kw_only=True)
class FeaturesParams:
    source: Literal["detector", "grid", "boxes", "tsv", "npz"]  # boxes: ground-truth objects as symbols, no pixels
    content: Literal["roi", "probabilities"]  # of a detector's region: the RoI head's output, or what it makes of it
    path: str  # for tsv and npz
    max_regions: int
    min_score: float
    batch_size: int


@dataclass(frozen=True, kw_only=True)
class TokenizerParams:
    source: Literal["train", "vocab"]
    vocab: str  # path of a BERT vocab.txt, for source: vocab
    size: int
    min_frequency: int
    lowercase: bool
    min_answer_count: int  # an answer enters the vocabulary from this many questions on


@dataclass(frozen=True, kw_only=True)
class ShardsParams:
    images_per_shard: int
    pixels: bool


@dataclass(frozen=True, kw_only=True)
class ModelParams:
    name: Literal["tden"]
    config: dict[str, Any]  # checked against the model's own config dataclass


@dataclass(frozen=True, kw_only=True)
class TrainerParams:
    """How to run a training loop; the same for pretraining and fine-tuning."""

    accelerator: str
    devices: int
    precision: Literal["auto", "32-true", "bf16-mixed"]
    num_workers: int
    checkpoint_every_steps: int
    log_every_steps: int
    torch_threads: int  # 0: leave it to torch


@dataclass(frozen=True, kw_only=True)
class OptimizerParams:
    lr: float
    muon_lr: float = 0.0  # of the blocks' matrices, by Muon; 0: AdamW for them, too
    weight_decay: float = 0.01
    betas: list[float] = field(default_factory=lambda: [0.9, 0.999])
    eps: float = 1e-8
    warmup_fraction: float = 0.1
    schedule: Literal["linear", "cosine", "constant"] = "linear"
    clip_norm: float = 1.0
    ema_decay: float = 0.0  # 0: off


@dataclass(frozen=True, kw_only=True)
class PairsParams:
    """What every pretraining on image-text pairs needs to know."""

    seed: int
    sources: dict[str, int]  # dataset -> how often its pairs are seen per epoch; empty: every dataset once
    max_epochs: int
    max_steps: int  # 0: as many as the epochs hold
    batch_size: int
    accumulate: int
    max_text_len: int
    max_regions: int
    objectives: dict[str, float]  # name -> weight (sum), probability (draw) or share of turns
    mask_probability: float
    optimizer: OptimizerParams


@dataclass(frozen=True, kw_only=True)
class PretrainParams(PairsParams):
    mix: Literal["sum", "draw", "turns"]
    init: str = ""  # a checkpoint to start from, made by `vlp import-checkpoint`; empty: fresh weights


@dataclass(frozen=True, kw_only=True)
class RampParams:
    """The share of masked words that scheduled sampling replaces: from `start` to `end` in `steps` updates."""

    start: float = 1.0
    end: float = 1.0
    steps: int = 0


@dataclass(frozen=True, kw_only=True)
class ScheduledSamplingParams(PairsParams):
    scheme: Literal["none", "a", "b", "c"]  # none: hand checkpoints/pretrain on as it is
    init: Literal["pretrain", "scratch"]  # scratch: two passes from the start, as in the paper
    sample: Literal["multinomial", "argmax"]
    ramp: RampParams = field(default_factory=RampParams)


@dataclass(frozen=True, kw_only=True)
class SelfCriticalParams:
    """Self-critical training of a captioner (tasks/self_critical.py); `init` is a run of cross-entropy."""

    samples: int = 5  # descriptions drawn per image and step
    baseline: Literal["greedy", "mean_of_others"] = "greedy"  # the second needs two samples or more
    sampling_dropout: bool = False  # draw them with dropout on, as the public code does


@dataclass(frozen=True, kw_only=True)
class FinetuneParams:
    task: Literal["captioning", "vqa", "nlvr", "retrieval", "vcr"]
    init: str  # `pretrain`, `scheduled_sampling` or the name of another fine-tuning run
    sources: dict[str, int]
    seed: int
    max_epochs: int
    max_steps: int
    batch_size: int
    accumulate: int
    max_text_len: int
    max_regions: int
    optimizer: OptimizerParams
    scratch: bool = False  # ignore init's weights: TDEN- of the paper
    blank_images: bool = False  # text-only control: every region feature zero, boxes too
    label_smoothing: float = 0.0
    self_critical: SelfCriticalParams | None = None  # captioning only: CIDEr-D as reward instead of cross-entropy
    options: dict[str, Any] = field(default_factory=dict)  # the task's own: `TaskModel.options_class`


@dataclass(frozen=True, kw_only=True)
class EvaluateParams:
    batch_size: int
    beam_size: int
    max_caption_len: int
    splits: list[str]
    blank_control: list[str]  # tasks scored once more with every image blanked
    bootstrap: int  # resamples behind each 95% interval
    gallery: int


@dataclass(frozen=True, kw_only=True)
class TrackingParams:
    uri: str  # sqlite:///..., or http(s)://...; empty: trainings are not logged there
    artifacts: str
    experiment: str
    model_prefix: str
    metric: dict[str, str]  # task -> the metric that says which version is better


@dataclass(frozen=True, kw_only=True)
class Params:
    generate: dict[str, WorldParams]
    data: dict[str, SourceParams]
    validate: ValidateParams
    detector: DetectorParams
    features: FeaturesParams
    tokenizer: TokenizerParams
    shards: ShardsParams
    model: ModelParams
    trainer: TrainerParams
    pretrain: PretrainParams
    scheduled_sampling: ScheduledSamplingParams
    finetune: dict[str, FinetuneParams]
    evaluate: EvaluateParams
    tracking: TrackingParams


def load_params(path: Path | str = "params.yaml") -> Params:
    """Reads and checks params.yaml.

    Raises:
        ParamsError: the file is missing, is no YAML mapping, or breaks the schema.
    """
    import yaml

    path = Path(path)
    try:
        raw = yaml.safe_load(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ParamsError(f"{path}: no such file; run from the project's root, or pass --params") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ParamsError(f"{path}: not valid YAML: {error}") from None
    if not isinstance(raw, dict):
        raise ParamsError(f"{path}: expected one section per stage, found {type(raw).__name__}")
    return build(Params, raw, where="", file=str(path))


def build(cls: type[T], raw: dict[str, Any], *, where: str, file: str = "params.yaml") -> T:
    """Makes the dataclass `cls` from plain data, checking keys and types all the way down."""
    hints = typing.get_type_hints(cls)
    fields = {f.name: f for f in dataclasses.fields(cls)}  # type: ignore[arg-type]
    for key in raw:
        if key not in fields:
            near = difflib.get_close_matches(str(key), fields, n=1)
            hint = f"; did you mean `{near[0]}`?" if near else f"; known: {', '.join(fields)}"
            raise ParamsError(f"{file}: unknown key `{_dot(where, key)}`{hint}")
    values = {}
    for name, f in fields.items():
        if name in raw:
            values[name] = _convert(raw[name], hints[name], _dot(where, name), file)
        elif f.default is dataclasses.MISSING and f.default_factory is dataclasses.MISSING:
            raise ParamsError(f"{file}: missing key `{_dot(where, name)}`")
    return cls(**values)


def to_plain(value: Any) -> Any:
    """A params dataclass as plain dicts and lists: what JSON, MLflow and Lightning can hold."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: to_plain(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if isinstance(value, dict):
        return {k: to_plain(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [to_plain(v) for v in value]
    return value


def _dot(where: str, key: str) -> str:
    return f"{where}.{key}" if where else str(key)


def _convert(value: Any, hint: Any, where: str, file: str) -> Any:
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if hint is Any:
        return value
    if dataclasses.is_dataclass(hint):
        if not isinstance(value, dict):
            raise ParamsError(f"{file}: `{where}` must be a section, found {value!r}")
        return build(typing.cast(type, hint), value, where=where, file=file)
    if origin is Literal:
        if value not in args:
            near = difflib.get_close_matches(str(value), [str(a) for a in args], n=1)
            hint_text = f"; did you mean `{near[0]}`?" if near else ""
            raise ParamsError(
                f"{file}: `{where}` must be one of {', '.join(map(str, args))}; found {value!r}{hint_text}"
            )
        return value
    if origin is dict:
        if not isinstance(value, dict):
            raise ParamsError(f"{file}: `{where}` must be a section, found {value!r}")
        return {str(k): _convert(v, args[1], f"{where}.{k}", file) for k, v in value.items()}
    if origin is list:
        if not isinstance(value, list):
            raise ParamsError(f"{file}: `{where}` must be a list, found {value!r}")
        return [_convert(v, args[0], f"{where}[{i}]", file) for i, v in enumerate(value)]
    if origin in (typing.Union, types.UnionType):
        if value is None and type(None) in args:
            return None
        return _convert(value, next(a for a in args if a is not type(None)), where, file)
    if hint is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if hint is float and isinstance(value, str):  # YAML 1.1 reads 1e-4 as a string
        try:
            return float(value)
        except ValueError:
            pass
    if not isinstance(value, hint) or (hint is int and isinstance(value, bool)):
        raise ParamsError(f"{file}: `{where}` must be {hint.__name__}, found {value!r}")
    return value
