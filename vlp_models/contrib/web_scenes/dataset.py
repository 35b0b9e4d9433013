"""Scenes with one alt text each, as on the web, in COCO's format and as pairs.csv; alt_texts.jsonl records the noise.

An alt text is an annotator's sentence with four kinds of noise, each with its own rate: it may describe another scene,
nouns may be replaced by their hypernym (`square` -> `shape`), words may be dropped, and boilerplate of a shop or an
agency may be added. So what a model can learn from such texts is known. The images are those of the generator
`objects` with the same seed.
"""

from __future__ import annotations

import csv
import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path

from vlp_models.common.progress import progress_bar
from vlp_models.errors import ParamsError
from vlp_models.params import GeneratorParams
from vlp_models.synthetic.scenes.captions import write_captions
from vlp_models.synthetic.scenes.dataset import FILE_OPTIONS, ImageJob, Picture, draw_scenes, make_jobs, write_coco
from vlp_models.synthetic.scenes.scene import SHAPES, Scene, sample_scene

ALT_TEXT_STREAM, OTHER_SCENE_STREAM = 8, 9  # of an image's random numbers
# Text around the sentence `{}`. No phrase is a prefix or suffix of an annotator's sentence.
BOILERPLATE = (
    "stock photo of {}",
    "royalty free picture: {}",
    "{} buy now",
    "{} free shipping",
    "click to enlarge {}",
    "{} hd wallpaper download",
    "photo gallery - {}",
    "{} (page 1 of 3)",
)
_MIN_WORDS = 2  # that remain when words are dropped
_PLURALS = {shape + "s" for shape in SHAPES} | {"discs"}
NOUNS = frozenset({*SHAPES, "disc", *_PLURALS})  # the words that have a hypernym


@dataclass(frozen=True, kw_only=True)
class AltText:
    """One alt text.

    text        the noisy text
    clean       the sentence before the noise, true of the scene that it describes
    mismatched  it describes another scene than the image's
    """

    text: str
    clean: str
    mismatched: bool


def _alt_text(scene: Scene, job: ImageJob, params: GeneratorParams) -> AltText:
    """Return one alt text for `scene`.

    A mismatched one describes an extra scene without an image, so an image's alt text never depends on the number of
    images.
    """
    other = sample_scene(job.rng(OTHER_SCENE_STREAM), image_id="", split=job.split, side=job.side)
    rng = job.rng(ALT_TEXT_STREAM)
    mismatched = bool(rng.random() < params.mismatched)
    described = other if mismatched else scene
    # Without misspellings: the four kinds of noise are all that differs from the clean text.
    texts = write_captions(described, rng, misspelled=0.0)
    clean = texts[rng.integers(len(texts))]
    # First hypernyms, then dropped words, then boilerplate, whose words stay as they are.
    words = [_replace_noun(word) if rng.random() < params.hypernyms else word for word in clean.split()]
    stays = rng.random(len(words)) >= params.dropped_words
    # At least two words remain.
    if stays.sum() >= min(_MIN_WORDS, len(words)):
        words = [word for word, word_stays in zip(words, stays, strict=True) if word_stays]
    text = " ".join(words)
    if rng.random() < params.boilerplate:
        text = BOILERPLATE[rng.integers(len(BOILERPLATE))].format(text)
    return AltText(text=text, clean=clean, mismatched=mismatched)


def _replace_noun(word: str) -> str:
    """Return `shapes,` for `squares,`; a word that names no shape is returned unchanged."""
    bare = word.rstrip(".,")
    if bare.lower() not in NOUNS:
        return word
    # Punctuation after the noun stays.
    return ("shapes" if bare.lower() in _PLURALS else "shape") + word[len(bare) :]


def write(params: GeneratorParams, directory: Path) -> dict[str, int]:
    """Write the dataset into `directory`; return the number of items of each kind.

    Raises:
        ParamsError: a number in params.yaml is out of range, or an option is for `objects` only.
    """
    extras = [f"`{key}`" for key in (*FILE_OPTIONS, "simple_pair_sentences") if getattr(params, key)]
    if extras:
        raise ParamsError(
            f"params.yaml: the generator `web` writes alt texts only; drop {', '.join(extras)}, or use `objects`"
        )
    jobs = make_jobs(params, directory)
    pictures, alt_texts = [], []
    with progress_bar("drawing scenes", len(jobs), "images") as bar:
        for job, scene in zip(jobs, draw_scenes(jobs), strict=True):
            alt_texts.append(_alt_text(scene, job, params))
            pictures.append(Picture(job=job, scene=scene, captions=[alt_texts[-1].text]))
            bar.advance()
    with (directory / "pairs.csv").open("w", encoding="utf-8", newline="") as file:
        rows = csv.writer(file, lineterminator="\n")
        rows.writerow(["image", "caption", "split"])
        for job, alt in zip(jobs, alt_texts, strict=True):
            rows.writerow([f"images/{job.path.name}", alt.text, job.split])
    lines = [
        json.dumps({"image_id": str(job.image_id), **dataclasses.asdict(alt)}) + "\n"
        for job, alt in zip(jobs, alt_texts, strict=True)
    ]
    (directory / "alt_texts.jsonl").write_text("".join(lines), encoding="utf-8")
    return {**write_coco(pictures, params, directory), "questions": 0}
