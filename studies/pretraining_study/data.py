"""The data of a study: the web's pairs, and the small clean target.

Regions are symbols through a noisy projection, in place of a detector: each object's shape, color, size, texture and
place, noise on each, times a fixed random matrix. For models that read pixels (`Setting.side`) the scenes are drawn
instead (pictures.py). Nothing is read, so a study needs no pipeline.

Shape suffixes: I images, R regions, F feature dimension, C classes, N texts, T tokens, Q questions, A answers.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from pretraining_study.judging import Judgments, Question, ask
from pretraining_study.pictures import Pictures, draw
from pretraining_study.setting import Setting
from vlp_models.data.answers import build_answer_vocabulary, soft_scores
from vlp_models.data.tokenizer import Tokenizer
from vlp_models.synthetic.scenes.captions import alt_text, write_captions
from vlp_models.synthetic.scenes.language import parse
from vlp_models.synthetic.scenes.questions import Balance, annotate, choose
from vlp_models.synthetic.scenes.scene import (
    CATEGORIES,
    COLORS,
    MAX_OBJECTS,
    SHAPES,
    SIZES,
    TEXTURES,
    Scene,
    SceneObject,
    sample_scene,
)

SIDE = 64  # pixels on which the scenes' hidden parts are counted where nothing is drawn
SYMBOLS = (*SHAPES, *COLORS, *SIZES, *TEXTURES)
PIXEL_FAMILIES = ("vlmo", "soho")
_STREAMS = {"entailment": 6, "nlvr2": 7, "vcr": 8}  # of chance
_PARTS = {"web": 0, "train": 1, "val": 2, "test": 3, "language": 4}
_LANGUAGE = 400  # scenes whose captions and questions give the vocabularies; not trained on
_SHARPNESS = 6.0  # of the class probabilities; at this the true class of a clean region has 0.9


@dataclass(frozen=True, kw_only=True)
class Images:
    """features_IRF, boxes_IR4, class_probs_IRC float32 (photos: float16); mask_IR bool. Zero after the last object."""

    features_IRF: Tensor
    boxes_IR4: Tensor
    class_probs_IRC: Tensor
    mask_IR: Tensor

    def __len__(self) -> int:
        return len(self.mask_IR)


@dataclass(frozen=True, kw_only=True)
class Texts:
    """Sentences about images. ids_NT int64, padded; owner_N int64: the image each belongs to."""

    words: tuple[str, ...]
    ids_NT: Tensor
    mask_NT: Tensor
    owner_N: Tensor

    def __len__(self) -> int:
        return len(self.words)


@dataclass(frozen=True, kw_only=True)
class Split:
    """Images with captions and questions. scenes: empty for photos. answers: ten a question; scores_QA: soft labels.
    judged: of the tasks with one right label, by task."""

    scenes: tuple[Scene, ...]
    images: Images | Pictures
    captions: Texts
    questions: Texts
    answers: tuple[tuple[str, ...], ...]
    scores_QA: Tensor
    judged: Mapping[str, Judgments] = field(default_factory=dict)

    @property
    def references(self) -> list[list[str]]:
        """The captions of each image."""
        captions: list[list[str]] = [[] for _ in range(len(self.images))]
        for owner, text in zip(self.captions.owner_N.tolist(), self.captions.words, strict=True):
            captions[owner].append(text)
        return captions

    @cached_property
    def true_NI(self) -> np.ndarray:
        """Return bool: the images that each caption is true for. Its own image always counts, of photos no other."""
        if not self.scenes:
            return np.arange(len(self.images)) == self.captions.owner_N.numpy()[:, None]
        claims = [parse(text) or [] for text in self.captions.words]
        found = np.array([[bool(c) and all(x.is_true_of(scene) for x in c) for scene in self.scenes] for c in claims])
        found[np.arange(len(claims)), self.captions.owner_N.numpy()] = True
        return found


class Data:
    """What a study's arms learn from and are measured on. Everything follows from the setting."""

    def __init__(self, setting: Setting) -> None:
        self.setting = setting
        self._drawn = bool(setting.side)
        self._projection = self._rng("web", 0, 9).normal(
            scale=1 / np.sqrt(len(SYMBOLS)), size=(len(SYMBOLS) + 4, setting.feature_dim)
        )
        speech = [self._scene("language", number) for number in range(_LANGUAGE)]
        self.web_scenes = [self._scene("web", number) for number in range(setting.web)]
        self._alt_texts = [self._alt_text(number, scene) for number, scene in enumerate(self.web_scenes)]
        captions = [text for scene in speech for text in self._captions_of("language", scene)]
        asked = list(self._asked("language", speech))
        judged = {
            segment: None
            for task in self._judging
            for question in self._questions(task, "language", speech)
            for segments, _ in question.rows
            for segment in segments
        }
        language = [*self._alt_texts, *captions, *(question for _, question, _ in asked), *judged]
        self.tokenizer = Tokenizer.train(language, size=1000, min_frequency=1, lowercase=True)
        self.answers = build_answer_vocabulary([answers for _, _, answers in asked], 3)
        self._answer_index = {answer: number for number, answer in enumerate(self.answers)}

    @property
    def tasks(self) -> tuple[str, ...]:
        return self.setting.tasks

    @property
    def _judging(self) -> list[str]:
        return [task for task in self.tasks if task in _STREAMS]

    def small(self) -> Data:
        """The same kind of data with few images, for measurements of memory."""
        return Data(dataclasses.replace(self.setting, web=4 * self.setting.batch, train=8, val=1, test=1))

    def for_family(self, family: str) -> Data:
        """Return the data as the family reads them: of drawn scenes a region model reads the objects' regions."""
        return self if not self._drawn or family in PIXEL_FAMILIES else self._as_regions

    @cached_property
    def _as_regions(self) -> Data:
        other = copy.copy(self)
        for name in ("web", "val", "test"):
            other.__dict__.pop(name, None)
        other._drawn = False
        return other

    @cached_property
    def web(self) -> tuple[Images | Pictures, Texts]:
        return self._images("web", self.web_scenes), self.texts(self._alt_texts, range(len(self._alt_texts)))

    @cached_property
    def val(self) -> Split:
        return self._split("val", range(self.setting.val))

    @cached_property
    def test(self) -> Split:
        return self._split("test", range(self.setting.test))

    def train(self, seed: int) -> Split:
        """The target images of one seed; no two seeds share any."""
        return self._split("train", range(self.setting.train * (seed - 1), self.setting.train * seed))

    @property
    def classes(self) -> int:
        return len(CATEGORIES) + 1

    def _rng(self, part: str, number: int, stream: int) -> np.random.Generator:
        return np.random.default_rng([self.setting.scene_seed, _PARTS[part], number, stream])

    def _scene(self, part: str, number: int) -> Scene:
        side = self.setting.side or SIDE
        return sample_scene(self._rng(part, number, 0), image_id=f"{part}{number}", split=part, side=side)

    def _captions_of(self, part: str, scene: Scene) -> list[str]:
        return write_captions(scene, self._rng(part, _number(part, scene), 1), misspelled=0.0)

    def _alt_text(self, number: int, scene: Scene) -> str:
        side = self.setting.side or SIDE
        other = sample_scene(self._rng("web", number, 3), image_id="", split="web", side=side)
        return alt_text(scene, other, self._rng("web", number, 1), self.setting.noise).text

    def _asked(self, part: str, scenes: Sequence[Scene]) -> Iterator[tuple[int, str, tuple[str, ...]]]:
        """(image, question, answers)"""
        balance = Balance()
        for image, scene in enumerate(scenes):
            rng = self._rng(part, _number(part, scene), 2)
            for question in choose(scene, self.setting.questions, balance, rng):
                yield image, question.text, tuple(str(a["answer"]) for a in annotate(question, rng))

    def _questions(self, task: str, part: str, scenes: Sequence[Scene]) -> list[Question]:
        return ask(task, scenes, lambda scene: self._rng(part, _number(part, scene), _STREAMS[task]))

    def _judged(self, task: str, part: str, scenes: Sequence[Scene]) -> Judgments:
        questions = self._questions(task, part, scenes)
        rows = [row for question in questions for row in question.rows]
        encoded = self.tokenizer.encode_segments([segments for segments, _ in rows], self.setting.max_text_len)
        texts = Texts(
            words=tuple(" ".join(segments) for segments, _ in rows),
            ids_NT=encoded.ids_BT,
            mask_NT=encoded.mask_BT,
            owner_N=torch.tensor([image for _, image in rows], dtype=torch.int64),
        )
        labels = torch.tensor([question.label for question in questions], dtype=torch.int64)
        return Judgments(texts=texts, labels_Q=labels)

    def _split(self, part: str, numbers: range) -> Split:
        scenes = tuple(self._scene(part, number) for number in numbers)
        captions = [self._captions_of(part, scene) for scene in scenes]
        asked = list(self._asked(part, scenes))
        scores_QA = torch.zeros(len(asked), len(self.answers))
        for row, (_, _, answers) in enumerate(asked):
            for answer, score in soft_scores(answers, self._answer_index).items():
                scores_QA[row, answer] = score
        return Split(
            scenes=scenes,
            images=self._images(part, scenes),
            captions=self.texts(
                [text for texts in captions for text in texts], [i for i, texts in enumerate(captions) for _ in texts]
            ),
            questions=self.texts([text for _, text, _ in asked], [image for image, _, _ in asked]),
            answers=tuple(answers for _, _, answers in asked),
            scores_QA=scores_QA,
            judged={task: self._judged(task, part, scenes) for task in self._judging},
        )

    def texts(self, texts: Sequence[str], owners: Sequence[int]) -> Texts:
        encoded = self.tokenizer.encode_batch(texts, self.setting.max_text_len)
        return Texts(
            words=tuple(texts), ids_NT=encoded.ids_BT, mask_NT=encoded.mask_BT, owner_N=torch.tensor(list(owners))
        )

    def _images(self, part: str, scenes: Sequence[Scene]) -> Images | Pictures:
        if self._drawn:
            return draw(scenes, [self._rng(part, _number(part, scene), 5) for scene in scenes])
        count, regions = len(scenes), MAX_OBJECTS
        features = np.zeros((count, regions, self.setting.feature_dim), dtype=np.float32)
        boxes = np.zeros((count, regions, 4), dtype=np.float32)
        class_probs = np.zeros((count, regions, self.classes), dtype=np.float32)
        mask = np.zeros((count, regions), dtype=bool)
        for i, scene in enumerate(scenes):
            n = len(scene.objects)
            boxes[i, :n] = np.array([item.box for item in scene.objects], dtype=np.float32) / scene.side
            clean = np.array([symbols(item) for item in scene.objects])
            rng = self._rng(part, _number(part, scene), 4)
            noisy = clean + rng.normal(scale=self.setting.feature_noise, size=clean.shape)
            places = np.column_stack([boxes[i, :n, 2:] - boxes[i, :n, :2], boxes[i, :n, :2]])
            features[i, :n] = np.column_stack([noisy, places]) @ self._projection
            class_probs[i, :n] = _class_probs(noisy)
            mask[i, :n] = True
        return Images(
            features_IRF=torch.from_numpy(features),
            boxes_IR4=torch.from_numpy(boxes),
            class_probs_IRC=torch.from_numpy(class_probs),
            mask_IR=torch.from_numpy(mask),
        )


def take(texts: Texts, rows: Tensor) -> Texts:
    """Some of the texts, no wider than the longest of them."""
    mask_NT = texts.mask_NT[rows]
    width = int(mask_NT.sum(1).max())
    return dataclasses.replace(
        texts,
        words=tuple(texts.words[i] for i in rows.tolist()),
        ids_NT=texts.ids_NT[rows, :width],
        mask_NT=mask_NT[:, :width],
        owner_N=texts.owner_N[rows],
    )


def _number(part: str, scene: Scene) -> int:
    return int(scene.image_id.removeprefix(part))


def symbols(item: SceneObject) -> list[float]:
    """Which of `SYMBOLS` it has: 0 or 1."""
    own = (item.shape, item.color, item.size, item.texture)
    return [float(symbol in own) for symbol in SYMBOLS]


def _class_probs(symbols_RS: np.ndarray) -> np.ndarray:
    """[R, C]: a detector's softmax over color and shape, as sure as the noise allows; column 0 is background."""
    places = [(SYMBOLS.index(shape), SYMBOLS.index(color)) for color, shape in map(str.split, CATEGORIES)]
    scores = np.column_stack([symbols_RS[:, shape] + symbols_RS[:, color] for shape, color in places])
    scores = np.column_stack([np.zeros(len(scores)), scores]) * _SHARPNESS
    exponents = np.exp(scores - scores.max(1, keepdims=True))
    return exponents / exponents.sum(1, keepdims=True)
