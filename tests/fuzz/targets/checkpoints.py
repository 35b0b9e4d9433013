"""Checkpoints, bundles and detectors: what is loaded to train from, or to serve."""

from __future__ import annotations

import json
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

from targets.base import DEEP, Prepared, Target, in_place

TOY = "vlp_models.contrib.plugin_kit.scaffolds.family.model:Toy"


def make_bundle(folder: Path) -> Path:
    """A served model of pixels, tiny, untrained: what the registry holds of one."""
    import torch

    from vlp_models.data.tokenizer import Tokenizer
    from vlp_models.models import FAMILIES, DataFacts, build_model
    from vlp_models.models.checkpoint import CheckpointInfo, write_checkpoint
    from vlp_models.params import to_plain
    from vlp_models.tasks import task_class

    FAMILIES["toy"] = TOY
    tokenizer = Tokenizer.train(["it is red", "it is blue"], 30, 1, True)
    torch.manual_seed(0)
    config = {"side": 8, "patch": 4, "hidden": 16, "heads": 2}
    model = build_model("toy", config, DataFacts(vocab_size=tokenizer.vocab_size, mask_id=tokenizer.mask_id))
    facts: dict[str, Any] = {"model_config": to_plain(model.config), "task": "nlvr", "max_text_len": 8}
    info = CheckpointInfo(family="toy", name="toy", **facts)
    bundle = folder / "bundle"
    (bundle / "checkpoint").mkdir(parents=True)
    task_model = task_class("nlvr")(model, tokenizer, info)
    write_checkpoint(bundle / "checkpoint", task_model, info, tokenizer)
    return bundle


def _checkpoint(name: str) -> Callable[[Path], Prepared]:
    """Without checksums, which would reject everything at once: an attacker would forge them as well."""

    def prepare(folder: Path) -> Prepared:
        import torch
        from model_checks import load_model

        from vlp_models.common.checksums import SUMS
        from vlp_models.serving.bundle import write_content
        from vlp_models.serving.predictor import Predictor

        bundle = make_bundle(folder)
        with torch.device("meta"):  # loads modules for two seconds, once: that is no hang
            torch.nn.Linear(1, 1)
        if name != SUMS:
            (bundle / "checkpoint" / SUMS).unlink()

        def read() -> None:
            load_model(bundle / "checkpoint")
            write_content(bundle, [])
            Predictor(bundle)

        return in_place(bundle / "checkpoint" / name, read)

    return prepare


def _labels(folder: Path) -> Prepared:
    from vlp_models.models.checkpoint import read_labels

    (folder / "labels.json").write_text(json.dumps(["red", "blue"]))
    return in_place(folder / "labels.json", lambda: read_labels(folder))


def _bundle_content(folder: Path) -> Prepared:
    from vlp_models.serving.bundle import CONTENT, hash_bundle, write_content
    from vlp_models.serving.predictor import Predictor

    bundle = make_bundle(folder)
    write_content(bundle, [])

    def read() -> None:
        hash_bundle(bundle)
        Predictor(bundle)

    return in_place(bundle / CONTENT, read)


def _bundle_features(folder: Path) -> Prepared:
    from vlp_models.serving.bundle import read_features_config

    made = {"source": "detector", "min_score": 0.2, "max_regions": 16, "content": "roi"}
    (folder / "features.json").write_text(json.dumps(made))
    return in_place(folder / "features.json", lambda: read_features_config(folder))


def _bundle_search(name: str) -> Callable[[Path], Prepared]:
    """What a captioner's search reads: its settings, and the photos and captions that it looks up."""

    def prepare(folder: Path) -> Prepared:
        import numpy as np

        from vlp_models.data.tokenizer import Tokenizer
        from vlp_models.params import EvaluateParams
        from vlp_models.tasks.caption_search import CaptionIndex, CaptionSearch

        tokenizer = Tokenizer.train(["a red dog"], 30, 1, True)
        search = CaptionSearch(tokenizer, feature_dim=2)
        search.settings = EvaluateParams(consensus_samples=2, consensus_neighbors=1)
        features = np.array([[1, 0], [0, 1]], np.float16)
        search.index = CaptionIndex(features, [("a dog",), ("a red dog",)], ["s/1", "s/2"], tokenizer)
        search.save(folder / "search")

        def read() -> None:
            found = CaptionSearch(tokenizer, feature_dim=2)
            found.load(folder / "search")
            if found.index is not None:
                found.index.choose("", np.ones(2, np.float32), [["a"], ["dog"]], 1)

        return in_place(folder / "search" / name, read)

    return prepare


def _detector(name: str) -> Callable[[Path], Prepared]:
    def prepare(folder: Path) -> Prepared:
        import torch

        from vlp_models.contrib.detector.checkpoint import load_detector, save_detector
        from vlp_models.contrib.detector.faster_rcnn import DetectorConfig, build_detector

        torch.manual_seed(0)
        config = DetectorConfig(feature_dim=4, channels=(2, 2, 2), anchors=(16.0,), roi_size=2)
        save_detector(folder, build_detector(config, 3), config, ["__background__", "a", "b"], {})
        return in_place(folder / name, lambda: load_detector(folder))

    return prepare


def _torch_weights(folder: Path) -> Prepared:
    """Another program's weights, as they are taken over into a model."""
    import torch

    from vlp_models.common.state_dicts import load_external_state_dict, read_state_dict

    torch.manual_seed(0)
    model, path = torch.nn.Linear(3, 2), folder / "weights.pth"
    torch.save(model.state_dict(), path)
    return in_place(path, lambda: load_external_state_dict(model, read_state_dict(path), path, "the model"))


TARGETS = (
    Target("checkpoint-config", "json", _checkpoint("config.json"), {"deep": DEEP}, share=0.6),
    Target(
        "checkpoint-weights",
        "safetensors",
        _checkpoint("model.safetensors"),
        {"endless": (2**62).to_bytes(8, "little") + b"{}"},  # the length of its header
    ),
    Target("checkpoint-vocab", "text", _checkpoint("vocab.txt")),
    Target("checkpoint-tokenizer", "json", _checkpoint("tokenizer.json")),
    Target(
        "checkpoint-sums",
        "text",
        _checkpoint("SHA256SUMS"),
        {
            "path": b"0" * 64 + b"  ../../../outside/secret.txt\n",
        },
    ),
    Target("checkpoint-labels", "json", _labels),
    Target("bundle-content", "json", _bundle_content),
    Target("bundle-features", "json", _bundle_features),
    Target("bundle-search", "json", _bundle_search("search.json")),
    Target("bundle-memory", "json", _bundle_search("index.json")),
    Target("bundle-memory-frequencies", "safetensors", _bundle_search("index-frequencies.safetensors")),
    Target("bundle-memory-features", "safetensors", _bundle_search("index.safetensors")),
    Target("detector-config", "json", _detector("config.json")),
    Target("detector-weights", "safetensors", _detector("detector.safetensors")),
    Target(
        "torch-weights",
        "bytes",
        _torch_weights,
        {
            "empty": b"",
            "dot": b".",
            "text": b"hello",
            "plain": pickle.dumps({"a": 1}),
            "code": b"cos\nsystem\n(S'true'\ntR.",
        },
    ),
)
