"""`VLP`: load an exported model in one line and use it, with only the packages of the extra `serve`.

from vlp_models import VLP
model = VLP.from_pretrained("path/to/export")       # or a repository of the Hugging Face Hub: "owner/name"
model.caption("photo.jpg")
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, cast

from vlp_models.contrib.export.layout import CARD, CONFIG, PATTERNS, check_library
from vlp_models.errors import DataError, MissingToolError, VLPError, first_line, network_reason
from vlp_models.serving.bundle import CONTENT, read_bundle_info, read_content
from vlp_models.serving.images import open_image
from vlp_models.serving.predictor import ImageModel, Predictor

if TYPE_CHECKING:
    from vlp_models.data.sample import Sample
    from vlp_models.tasks.retrieval import Retrieval

T = TypeVar("T")

INSTALL = 'pip install "vlp-flows[serve]"'
# `owner/name`: letters, digits, `_`, `.` and `-`, both parts starting with a letter or digit.
REPOSITORY = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")


class VLP:
    """An exported model. An image is a path, a PIL image or a uint8 array [H, W, 3] or [H, W].

    Attributes:
        directory: the export's folder.
        task: captioning, vqa, ...; a method that the task does not support raises a `DataError`.
    """

    def __init__(self, directory: Path | str, device: str = "cpu") -> None:
        """Load an export from a folder; see `from_pretrained`."""
        self.directory = Path(directory)
        check_library(self.directory, str(directory))
        task = read_bundle_info(self.directory).task or ""
        # Retrieval ranks collections and has no prediction for one image, so it is not a `Predictor`.
        model_class = ImageModel if task == "retrieval" else Predictor
        try:
            self._model = model_class(self.directory, device)
        except ModuleNotFoundError as error:
            raise MissingToolError(
                f"{directory}: the model needs {error.name}, which is not installed; {INSTALL}"
            ) from None
        self.task: str = self._model.task

    @classmethod
    def from_pretrained(
        cls,
        source: str | Path,
        *,
        device: str = "cpu",
        revision: str | None = None,
        cache_dir: str | Path | None = None,
        token: str | bool | None = None,
        local_files_only: bool = False,
    ) -> VLP:
        """Load an export.

        Args:
            source: its folder, or its repository on the Hugging Face Hub, `owner/name`.
            revision: of the repository: a branch, a tag or a commit.
            cache_dir, token, local_files_only: as in `huggingface_hub.snapshot_download`.

        Raises:
            DataError: no such folder or repository, or no network.
            CheckpointError: not a model of vlp-flows, or a file has changed or is damaged.
            MissingToolError: `source` is a repository and huggingface_hub is not installed.
        """
        options = {"cache_dir": cache_dir, "token": token, "local_files_only": local_files_only}
        return cls(find_export(source, revision, options), device)

    def caption(self, image: Any) -> str:
        """Describe an image in a sentence."""
        self._require("caption", "captioning")
        return str(self.predict(image)["caption"])

    def answer(self, image: Any, question: str) -> str:
        """Answer a question about an image; `predict` also returns the five most probable answers."""
        self._require("answer", "vqa")
        return str(self.predict(image, question)["answer"])

    def judge(self, image: Any, statement: str) -> bool:
        """Return whether a statement about an image is true; NLVR2: about a list of two images, the left one first."""
        self._require("judge", "nlvr", "nlvr2")
        return bool(self.predict(image, statement)["prediction"])

    def search(self, query: str, images: Sequence[Any], top: int = 5) -> list[tuple[int, float]]:
        """Return the positions of the images that fit the query best, with their scores, best first.

        Scores are comparable within one search only.
        """
        self._require("search", "retrieval")
        from vlp_models.serving.search import ImageSearch

        if not len(images):
            return []
        model = cast("Retrieval", self._model.task_model)

        def read(rows: Sequence[int]) -> list[Sample]:
            # One photo at a time: thousands would not fit into memory.
            return [self._model.make_samples([[open_image(images[row])]], first=row)[0] for row in rows]

        return ImageSearch(model, len(images), read, self._model.device).find(query, top)

    def predict(self, image: Any, text: str = "") -> dict[str, Any]:
        """Return the record that the registered version serves for this image (docs/reference/checkpoints.md).

        Args:
            image: for a task with several images, a list of that many.
            text: the question, statement or hypothesis, if the task takes one.
        """
        if not isinstance(self._model, Predictor):
            self._require("predict")
        predictor = cast(Predictor, self._model)
        if predictor.request.text and not text:
            raise DataError(f"a model of the task {self.task} needs a {predictor.request.text}: `{self._usage}`")
        if text and not predictor.request.text:
            raise DataError(f"a model of the task {self.task} takes no text: `{self._usage}`")
        return predictor.predict([image], [text])[0]

    def push_to_hub(
        self,
        repo_id: str,
        *,
        private: bool | None = None,
        token: str | None = None,
        revision: str | None = None,
        commit_message: str = "Upload a vlp-flows model",
    ) -> str:
        """Upload the export to a repository of the Hugging Face Hub, which is created if needed; return its address.

        Only the export's own files are uploaded, whatever else is in the folder.

        Raises:
            DataError: the Hub refuses it, or no network.
            MissingToolError: huggingface_hub is not installed.
        """
        hub = _import_hub()

        def upload() -> str:
            api = hub.HfApi(token=token)
            api.create_repo(repo_id, private=private, exist_ok=True)
            api.upload_folder(
                repo_id=repo_id,
                folder_path=self.directory,
                # The names of content.json, so that notes or other files in the folder stay private.
                allow_patterns=[*sorted(read_content(self.directory)["files"]), CONTENT, CARD],
                commit_message=commit_message,
                revision=revision,
            )
            return f"{api.endpoint}/{repo_id}"

        return _ask_hub(upload, repo_id)

    def _require(self, method: str, *tasks: str) -> None:
        if self.task not in tasks:
            raise DataError(f"{self.directory}: a model of the task {self.task} cannot `{method}`; use `{self._usage}`")

    @property
    def _usage(self) -> str:
        return self._model.task_model.example


def find_export(source: str | Path, revision: str | None = None, options: Mapping[str, Any] | None = None) -> Path:
    """Return the folder of an export, downloaded if it is a repository; see `VLP.from_pretrained`.

    Args:
        options: of `huggingface_hub.snapshot_download`.
    """
    # A folder of this name comes before a repository of this name.
    if Path(source).is_dir():
        check_library(Path(source), str(source))
        return Path(source)
    if not isinstance(source, str) or not REPOSITORY.fullmatch(source):
        raise DataError(f"{source}: no such folder; a repository of the Hugging Face Hub is named owner/name")
    hub = _import_hub()

    def download(commit: str | None, patterns: Sequence[str]) -> Path:
        return Path(hub.snapshot_download(source, revision=commit, allow_patterns=list(patterns), **(options or {})))

    # First config.json alone, which shows whether the repository is an export.
    folder = _ask_hub(lambda: download(revision, [CONFIG]), source)
    check_library(folder, source)
    # The folder's name is the commit, so that all files are of one.
    return _ask_hub(lambda: download(folder.name, PATTERNS), source)


def _import_hub() -> Any:
    try:
        import huggingface_hub
    except ModuleNotFoundError:
        raise MissingToolError(f"huggingface_hub, which reads repositories, is not installed; {INSTALL}") from None
    return huggingface_hub


def _ask_hub(request: Callable[[], T], repo_id: str) -> T:
    """Run a request to the Hub; a failure becomes a `DataError` of one sentence."""
    from huggingface_hub import errors

    try:
        return request()
    except VLPError:
        raise
    except errors.HFValidationError as error:
        raise DataError(f"{repo_id}: not a valid repository name ({first_line(error)})") from None
    except (errors.GatedRepoError, errors.RepositoryNotFoundError):
        raise DataError(
            f"{repo_id}: no such repository on the Hugging Face Hub, or no access to it; a private one needs `token=`, "
            "or `hf auth login`"
        ) from None
    except errors.RevisionNotFoundError:
        raise DataError(f"{repo_id}: the repository has no such revision") from None
    except errors.LocalEntryNotFoundError as error:
        reason = network_reason(error)
        raise DataError(
            f"{repo_id}: not in the cache of this machine, and the Hugging Face Hub cannot be reached"
            f"{f' ({reason})' if reason else ''}; download it where there is a network, and give its folder"
        ) from None
    except Exception as error:  # a library for HTTP raises its own errors
        raise DataError(f"{repo_id}: the Hugging Face Hub cannot be reached or refuses: {first_line(error)}") from None
