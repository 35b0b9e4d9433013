"""Registered models as a model of lmms-eval: `lmms-eval --model vlp_flows --model_args version=vlp-vqa@champion`.

lmms-eval finds `manifest` by the entry point group `lmms_eval.models`, and model.py only when the model is
used. What a request asks and how it is answered is here, which imports neither lmms-eval nor torch.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vlp_models.common.plugins import Table, import_target
from vlp_models.errors import DataError, MissingToolError, ParamsError, VLPError
from vlp_models.registry.versions import CHALLENGER, CHAMPION, PREVIOUS

if TYPE_CHECKING:
    from vlp_models.serving.predictor import Predictor

EXPORTS = Table("exports", {})  # "find" -> the function that finds an export
MODEL_ID = "vlp_flows"
CLASS_PATH = "vlp_models.contrib.lmms_eval.model.RegisteredModel"
ANSWERS = {"captioning": "caption", "vqa": "answer"}  # task -> the key of the prediction that is scored
INSTALL = 'pip install "vlp-flows[lmms-eval]"'
ALIASES = (CHAMPION, CHALLENGER, PREVIOUS)
# <image>, <image1>, <image 1> and <image_1>.
IMAGE_TAG = re.compile(r"<image(?:[ _]?\d+)?>")  # where the image belongs in a prompt of several modalities
# The only one that reading a registry needs when there is no params.yaml: an MLflow server has it from the start.
DEFAULT_EXPERIMENT = "Default"


def manifest() -> Any:
    """Return lmms-eval's description of the model; called for the entry point `vlp_flows`."""
    from lmms_eval.models.registry_v2 import ModelManifest

    return ModelManifest(model_id=MODEL_ID, simple_class_path=CLASS_PATH)


@dataclass(frozen=True, kw_only=True)
class ModelArgs:
    """The model arguments, `--model_args`, and lmms-eval's options `--batch_size` and `--device`.

    version     a task or version of the registry (captioning, vlp-vqa/3, vlp-vqa@champion); with `model`, its number or
                alias alone
    model       a task or registered model
    project     the project's folder, or the address of an MLflow server
    pretrained  instead of these: an export, by its folder or its repository on the Hugging Face Hub
    """

    version: str = ""
    model: str = ""
    project: str = "."
    pretrained: str = ""
    batch_size: int = 1
    device: str = ""

    @classmethod
    def parse(cls, arguments: Mapping[str, Any]) -> ModelArgs:
        """Return the arguments as lmms-eval passes them, numbers where they look like one.

        Raises:
            ParamsError: an unknown argument, a contradiction, or neither a version nor an export.
        """
        from vlp_models.params.schema import suggestion

        names = tuple(cls.__dataclass_fields__)
        # lmms-eval passes empty values for options that were not set.
        values = {name: value for name, value in arguments.items() if value not in (None, "")}
        for name in values:
            if name not in names:
                raise ParamsError(f"--model_args: unknown argument `{name}`{suggestion(name, names)}")
        size = str(values.pop("batch_size", 1))
        if not size.isdecimal() or not int(size):
            raise ParamsError(f"--batch_size {size}: must be a whole number, 1 or more")
        args = cls(batch_size=int(size), **{name: str(value) for name, value in values.items()})
        # Exactly one of the two must be there.
        if bool(args.pretrained) == bool(args.version or args.model):
            raise ParamsError(
                "--model_args: name either a registered version (version=vlp-captioning@champion) or an export "
                "(pretrained=FOLDER)"
            )
        return args

    @property
    def request(self) -> str:
        """The version as the registry commands name it.

        Raises:
            ParamsError: `version` is a number or alias, without `model`.
        """
        if not self.model:
            if self.version.isdecimal() or self.version in ALIASES:
                raise ParamsError(
                    f"--model_args: version={self.version}: name its model, too, such as model=vlp-captioning"
                )
            return self.version
        if not self.version:
            return self.model
        return f"{self.model}{'/' if self.version.isdecimal() else '@'}{self.version}"


def open_predictor(args: ModelArgs, device: str) -> tuple[Predictor, str]:
    """Load the version or export that the arguments name; return it with its name.

    Raises:
        DataError: there is no such version or export.
        CheckpointError: its files are damaged, or its task is not served.
        ParamsError: its task is not supported.
        MissingToolError: a package that it needs is not in lmms-eval's environment.
    """
    from vlp_models.serving.bundle import read_bundle_info

    try:
        bundle, name = _find_bundle(args)
        task = read_bundle_info(bundle).task or ""
        if task not in ANSWERS:
            raise ParamsError(
                f"{name}: models of the task {task} are not supported in lmms-eval; supported: {', '.join(ANSWERS)}"
            )
        from vlp_models.serving.predictor import Predictor

        return Predictor(bundle, device), name
    except ModuleNotFoundError as error:
        raise MissingToolError(
            f"{error.name} is not installed in lmms-eval's environment: {INSTALL}; an export (pretrained=FOLDER) needs "
            "no mlflow"
        ) from None


def _find_bundle(args: ModelArgs) -> tuple[Path, str]:
    if args.pretrained:
        if not EXPORTS:
            raise MissingToolError("pretrained=FOLDER needs vlp_models/contrib/export, which is not installed")
        return import_target(EXPORTS["find"])(args.pretrained), args.pretrained
    from vlp_models.params import TrackingParams, load_params
    from vlp_models.registry.client import model_name
    from vlp_models.registry.serving_cache import open_served_bundle
    from vlp_models.tasks import TASKS

    root = Path(args.project).expanduser()
    if "://" in args.project:
        # An address rather than a folder: no params.yaml, so the other settings are MLflow's defaults.
        root, os.environ["MLFLOW_TRACKING_URI"] = Path.cwd(), args.project
        tracking = TrackingParams(
            uri=args.project, artifacts="", experiment=DEFAULT_EXPERIMENT, model_prefix="vlp", metric={}
        )
    elif not (root / "params.yaml").is_file():
        raise DataError(f"{root.resolve()}: no params.yaml; name the project's folder: --model_args project=FOLDER,...")
    else:
        tracking = load_params(root / "params.yaml").tracking
    request = model_name(tracking, args.request) if args.request in TASKS else args.request
    return open_served_bundle(tracking, root.resolve(), request)


@dataclass(frozen=True, kw_only=True)
class Question:
    """One request. name: for messages. text: the prompt without its instructions."""

    name: str
    images: Sequence[Any]
    text: str


def read_question(arguments: Sequence[Any], documents: Mapping[str, Any]) -> Question:
    """Return what a request of lmms-eval asks.

    Args:
        arguments: prompt, generation settings, function from the document to its images, document's number, task,
            split.
        documents: task -> split -> documents.

    Raises:
        DataError: the request has another form.
    """
    if len(arguments) != 6:
        raise DataError(f"a request with {len(arguments)} arguments; {MODEL_ID} answers generate_until tasks of images")
    prompt, _, images_of, number, task, split = arguments
    document = documents[task][split][number]
    images: Callable[[Any], Any] = images_of
    return Question(name=f"{task} document {number}", images=images(document) or [], text=find_text(prompt, document))


def find_text(prompt: str, document: Any) -> str:
    """Return the question of a prompt: the document's own, without the instructions that the task wraps it in.

    A document without a `question` that the prompt contains is asked by the whole prompt.
    """
    question = document.get("question") if isinstance(document, Mapping) else None
    # Tasks wrap the question in instructions; letter case may differ in the prompt.
    if isinstance(question, str) and question.strip() and question.strip().lower() in prompt.lower():
        return question.strip()
    return " ".join(IMAGE_TAG.sub(" ", prompt).split())


def answer(predictor: Predictor, questions: Sequence[Question]) -> list[str]:
    """Return one answer per question; a captioning model does not read the text.

    Raises:
        DataError: an image cannot be opened, or a question has more or fewer images than the model takes.
    """
    expected, groups = predictor.request.images, []
    for question in questions:
        if len(question.images) != expected:
            raise DataError(
                f"{question.name} has {len(question.images)} images; the {predictor.task} model takes {expected}"
            )
        # A model of one image takes the image itself, a model of several a list.
        images = question.images[0] if expected == 1 else question.images
        try:
            groups += predictor.open([images], [question.text])
        except VLPError as error:
            raise DataError(f"{question.name}: {error}") from None
    texts = [question.text for question in questions]
    return [str(prediction[ANSWERS[predictor.task]]) for prediction in predictor.predict_opened(groups, texts)]


def answer_all(
    predictor: Predictor, requests: Sequence[Sequence[Any]], documents: Mapping[str, Any], batch_size: int
) -> Iterator[list[str]]:
    """Yield the answers of one batch after the other, in the order of the requests; see `read_question`, `answer`."""
    for start in range(0, len(requests), batch_size):
        batch = requests[start : start + batch_size]
        yield answer(predictor, [read_question(arguments, documents) for arguments in batch])
