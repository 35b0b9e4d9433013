"""Keys and values of params.yaml that have a new name. A file with old ones gets one error that lists them all."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from vlp_models.common.packages import is_source
from vlp_models.errors import ParamsError

# Old dotted key -> new one. `*` is any name; `pretrain.*` and `finetune.*` also apply to `defaults`.
RENAMED = {
    "generate.*.world": "generate.*.generator",  # plain-ok
    "generate.*.misspelt": "generate.*.misspelled",
    "generate.*.lost_words": "generate.*.dropped_words",
    "generate.*.pair_lessons": "generate.*.simple_pair_sentences",
    "data.*.outside": "data.*.allow_external_images",
    "data.*.truth": "data.*.scene_graphs",
    "data.*.held_out": "data.*.val_fraction",
    "validate.near_duplicates.bits": "validate.near_duplicates.max_hash_distance",
    "models.*.words": "models.*.text_init",
    "models.*.eyes": "models.*.vision_warmup",  # plain-ok
    "models.*.weights": "models.*.init",  # or image_init, by the value: see `_new_key`
    "models.*.config.twins_are_negatives": "models.*.config.same_image_negatives",
    "trainer.parallel": "trainer.parallel_finetune",
    "trainer.stream.first_wait": "trainer.stream.retry_seconds",
    "trainer.stream.patience": "trainer.stream.timeout_seconds",
    "pretrain.*.passes": "pretrain.*.scheduled_sampling",
    "pretrain.*.optimizer.floor": "pretrain.*.optimizer.min_lr",
    "pretrain.*.snapshots.better": "pretrain.*.snapshots.mode",
    "finetune.*.design": "finetune.*.variant",
    "finetune.*.optimizer.floor": "finetune.*.optimizer.min_lr",
    "finetune.*.snapshots.better": "finetune.*.snapshots.mode",
    "finetune.*.config.twins_are_negatives": "finetune.*.config.same_image_negatives",
    "finetune.*.options.twins_are_negatives": "finetune.*.options.same_image_negatives",
    "finetune.*.options.learn": "finetune.*.options.loss",
    "finetune.*.options.drawn": "finetune.*.options.pair_negatives",
    "augment.*.draws": "augment.*.samples",
    "evaluate.blank_control": "evaluate.blind_baseline",
    "evaluate.consensus": "evaluate.consensus_samples",
    "evaluate.consensus_neighbours": "evaluate.consensus_neighbors",  # plain-ok
    "incoming": "ingest",
    "incoming.drop": "ingest.inbox",
    "incoming.radius": "ingest.max_hash_distance",
    "drift.against": "drift.run",
    "promotion.choose_on": "promotion.select_on",
    "promotion.allowed_unvalidated": "promotion.allow_unvalidated",
    "promotion.tasks.*.seed_deviation": "promotion.tasks.*.seed_std",
}
# New dotted key -> old value -> new value.
RENAMED_VALUES = {
    "validate.near_duplicates.action": {"set_aside": "quarantine"},
    "pretrain.*.scheduled_sampling.scheme": {"single": "none"},
    "pretrain.*.recipe.mix": {"draw": "sample", "turns": "alternate"},
    "pretrain.*.snapshots.mode": {"lower": "min", "higher": "max"},
    "finetune.*.snapshots.mode": {"lower": "min", "higher": "max"},
    "finetune.*.options.loss": {"contrast": "contrastive"},
    "finetune.*.options.targets": {"every": "all"},
    "finetune.*.options.self_critical.baseline": {"mean_of_others": "leave_one_out"},
}
REMOVED = {"features.batch_size"}  # had no effect


def check_renamed(raw: Mapping[str, Any], file: str) -> None:
    """Raise one ParamsError that lists every old key and value with its new name."""
    lines = []
    for path, value in _walk(raw, ()):
        old, new = ".".join(path), _new_key(path, value)
        values = _lookup(RENAMED_VALUES, tuple(new.split("."))) or {}
        if isinstance(value, str) and value in values:
            lines.append(f"`{old}: {value}` was renamed to `{new}: {values[value]}`")
        elif _lookup(RENAMED, path):
            lines.append(f"`{old}` was renamed to `{new}`")
        elif old in REMOVED:
            lines.append(f"`{old}` was removed; delete it (it had no effect)")
    if len(lines) == 1:
        raise ParamsError(f"{file}: {lines[0]}")
    if lines:
        raise ParamsError("\n  ".join([f"{file}: {len(lines)} keys or values were renamed or removed:", *lines]))


def _walk(node: Any, path: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], Any]]:
    if isinstance(node, Mapping):
        for key, value in node.items():
            yield (*path, str(key)), value
            yield from _walk(value, (*path, str(key)))


def _new_key(path: tuple[str, ...], value: Any) -> str:
    """Return the dotted key after renaming it and the sections that contain it."""
    for length in range(len(path), 0, -1):
        if new := _lookup(RENAMED, path[:length]):
            if new == "models.*.init" and is_source(str(value)):
                new = "models.*.image_init"
            # A `*` stands for the second part of the path; in promotion.tasks, for the third one.
            names = iter(path[2:3] if path[0] == "promotion" else path[1:2])
            renamed = [next(names) if part == "*" else part for part in new.split(".")]
            if path[0] == "defaults":  # `pretrain.*.x` was matched by `defaults.pretrain.x`
                renamed = ["defaults", renamed[0], *renamed[2:]]
            return ".".join([*renamed, *path[length:]])
    return ".".join(path)


def _lookup(table: Mapping[str, Any], path: tuple[str, ...]) -> Any:
    """Return the entry whose pattern matches the whole path, or None."""
    if path[0] == "defaults":
        path = (*path[1:2], "*", *path[2:])
    for pattern, entry in table.items():
        parts = pattern.split(".")
        if len(parts) == len(path) and all(p in ("*", key) for p, key in zip(parts, path, strict=True)):
            return entry
    return None
