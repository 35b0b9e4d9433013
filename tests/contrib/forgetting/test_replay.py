"""When a training first used an image: the replay equals the batches of a real loader."""

from __future__ import annotations

import io
import random
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from vlp_models.common.io import write_json
from vlp_models.contrib.forgetting.replay import FirstExposure, TrainingRun, Updates, find_first_exposure
from vlp_models.data.shards import streaming
from vlp_models.data.shards.dataset import ShardDataset
from vlp_models.data.shards.loader import ResumableLoader
from vlp_models.data.shards.write import ImageRecord, ShardWriter
from vlp_models.params import StreamParams, load_params, to_plain
from vlp_models.training.data import LoaderFactory, Windows

ROOT = Path(__file__).parents[3]
IMAGES = 13


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Thirteen images of two datasets with one to three captions each, and a pair of every two."""
    directory = tmp_path_factory.mktemp("shards")
    for split in ("train", "val", "test"):
        writer = ShardWriter(directory, split, images_per_shard=4)
        for number in range(IMAGES if split == "train" else 2):
            name = image(number) if split == "train" else f"{split}/{number}"
            captions = [{"caption_id": f"{name}#{i}", "text": f"caption {i}"} for i in range(1 + number % 3)]
            pair = {"pair_id": f"{name}+", "text": "both", "label": True, "group": "g", "image_id": name}
            pair["other_image_ids"] = [image((number + 1) % IMAGES) if split == "train" else name]
            rows = {"captions": captions, "image_pairs": [pair]}
            source = name.partition("/")[0]
            about = {"image_id": name, "source": source, "width": 9, "height": 9, "pixels_extension": "png"}
            writer.add(ImageRecord(**about, rows=rows, pixels=noise(number)))
        writer.close()
    facts = {"feature_dim": 0, "classes": [], "detector_id": "", "sources": ["a", "b"], "counts": {}}
    write_json(directory / "manifest.json", facts)
    return directory


def noise(number: int) -> bytes:
    buffer = io.BytesIO()
    Image.frombytes("RGB", (9, 9), random.Random(number).randbytes(243)).save(buffer, "PNG")
    return buffer.getvalue()


def image(number: int) -> str:
    return f"{'ab'[number % 2]}/{number}"


def as_trained(
    samples: Any, wanted: str, updates: Updates, make_order: Any = None, **order: Any
) -> FirstExposure | None:
    """Find the first exposure by iterating over a real loader's batches."""
    more = {} if make_order is None else {"make_order": make_order}
    loader = ResumableLoader(samples, collate=list, shuffle=True, **more, **order)
    windows = Windows(loader, updates.accumulate, updates.repeats)
    done = 0
    while done < updates.count:
        for batch in windows:
            if any(wanted in s.image_ids for s in batch) and done < updates.count:
                return FirstExposure(epoch=windows.epoch + 1, update=done + 1)
            done += not windows.remaining
    return None


@pytest.mark.parametrize(
    ("view", "sources", "batch_size", "updates"),
    [
        ("captions", {}, 5, Updates(count=12)),
        ("captions", {"b": 2}, 4, Updates(count=3)),  # part of an epoch, and half of the images
        ("captions", {}, 4, Updates(count=11, accumulate=3)),
        ("images", {}, 3, Updates(count=9, repeats=3)),
        ("images", {"a": 1, "b": 3}, 2, Updates(count=14, accumulate=2, repeats=2)),
        ("image_pairs", {}, 5, Updates(count=2)),
    ],
)
@pytest.mark.parametrize("seed", [1, 2])
def test_first_exposure_equals_that_of_real_batches(
    shards: Path, view: str, sources: dict[str, int], batch_size: int, updates: Updates, seed: int
) -> None:
    samples = ShardDataset(shards, "train", view, sources, regions=False, pixels=True)
    order = ResumableLoader(samples, batch_size=batch_size, collate=list, seed=seed, shuffle=True).order
    replayed = {image(n): find_first_exposure(samples, {image(n)}, order, updates) for n in range(IMAGES)}
    found = {name: as_trained(samples, name, updates, batch_size=batch_size, seed=seed) for name in replayed}
    assert replayed == found
    assert len(set(replayed.values())) > 1, "images differ in their first update"


def test_streamed_order_and_generated_captions_are_replayed(shards: Path) -> None:
    pytest.importorskip("vlp_models.contrib.streaming")
    augment = pytest.importorskip("vlp_models.contrib.augment.samples")
    base = ShardDataset(shards, "train", "captions", regions=False, pixels=True)
    base.layout = streaming("layout").of(base.image_spans, 1024)
    written = [augment.GeneratedCaption(caption_id=f"{image(n)}!", image_id=image(n), text="more") for n in (3, 3, 8)]
    samples = augment.AugmentedDataset(base, written, control=False)
    arguments: dict[str, Any] = {"batch_size": 4, "seed": 5}

    def streamed(**more: Any) -> Any:
        return streaming("order")(**more, layout=samples.layout, window=2)

    order = streamed(length=len(samples), **arguments)
    for n in range(IMAGES):
        replayed = find_first_exposure(samples, {image(n)}, order, Updates(count=20))
        assert replayed == as_trained(samples, image(n), Updates(count=20), streamed, **arguments)


def test_run_is_replayed_from_its_settings(shards: Path) -> None:
    params = load_params(ROOT / "params.yaml")
    plain = to_plain(params.pretrain["tden"])

    def replay(**changes: Any) -> FirstExposure | None:
        run = TrainingRun.from_settings("pretrain/tden", plain | changes)
        return run.find_first_exposure(shards, {image(4)}, stream=StreamParams(), regions=False)

    first = replay(batch_size=2, max_epochs=2)
    assert first is not None and first.epoch == 1 and first.update > 1
    assert replay(batch_size=2, max_steps=first.update) == first
    assert replay(batch_size=2, max_steps=first.update - 1) is None
    assert replay(sources={"b": 1}) is None, "image 4 is of a"
    assert replay(view="texts") is None


def test_grouped_order_of_several_texts_per_image_is_replayed(shards: Path) -> None:
    plain = to_plain(load_params(ROOT / "params.yaml").finetune["tden-vqa"])
    changes: dict[str, Any] = {"task": "retrieval", "options": {"scorer": "pairs"}, "sources": {"a": 2, "b": 1}}
    settings = plain | changes | {"batch_size": 4, "accumulate": 2, "max_epochs": 2, "texts_per_image": 3}
    loaders = LoaderFactory(
        shards,
        "captions",
        sources=settings["sources"],
        collate=list,  # type: ignore[arg-type]
        batch_size=4,
        num_workers=0,
        seed=settings["seed"],
        regions=False,
        pixels=True,
        texts_per_image=3,
    )
    batches = list(loaders(0, 1)[0])
    replayed = {}
    for wanted in map(image, range(IMAGES)):
        run = TrainingRun.from_settings("finetune/x", settings)
        replayed[wanted] = run.find_first_exposure(shards, {wanted}, stream=StreamParams(), regions=False)
        number = next(i for i, batch in enumerate(batches) if any(s.image_id == wanted for s in batch))
        assert replayed[wanted] == FirstExposure(epoch=1, update=number // 2 + 1)
    other = TrainingRun.from_settings("finetune/x", settings | {"texts_per_image": 1})
    assert replayed != {
        name: other.find_first_exposure(shards, {name}, stream=StreamParams(), regions=False) for name in replayed
    }
