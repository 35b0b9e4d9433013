"""Checks of a family. See the package.

Shape suffixes: B images, N texts, T tokens, V vocabulary.
"""

from __future__ import annotations

import dataclasses
import tempfile
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from vlp_models.contrib.plugin_kit.conformance.checks import Problem, Result, run_check, shorten_names
from vlp_models.contrib.plugin_kit.conformance.scenes import SampleScenes
from vlp_models.contrib.plugin_kit.conformance.trial import (
    MASK_PROBABILITY,
    Trial,
    build_trial,
    check_task_updates,
    compare,
    generator,
    objective_loss,
    pretraining_batch,
    small_config,
    supported_tasks,
    train,
)
from vlp_models.data.batch import Batch, Regions, Text
from vlp_models.data.boxes import has_area
from vlp_models.data.inputs import MultiCaptionCollator
from vlp_models.models import known_objectives, own_objectives
from vlp_models.models.checkpoint import (
    build_from_config,
    load_checkpoint_weights,
    part_of,
    read_config,
    read_weights,
    write_checkpoint,
)
from vlp_models.models.protocols import (
    Embeds,
    Fuses,
    Generates,
    LocatesStates,
    PredictsMaskedWords,
    Pretrains,
    ScoresPairs,
)
from vlp_models.tasks.base import implements

STEPS = 6  # words that are decoded


def try_family(
    family: str, config: Mapping[str, Any] | None, scenes: SampleScenes, *, ranks: bool = False
) -> Iterator[Result]:
    """Run the checks of a family, and yield each result as it is known.

    Args:
        config: changes of the config that it is tried with.
        ranks: also compare the gradients of two processes, which takes about ten seconds more.
    """
    trials: list[Trial] = []

    def build() -> str:
        trials.append(build_trial(family, small_config(family, config), scenes))
        return describe(trials[0])

    result = run_check("builds", build)
    yield result
    if result.problem:
        return
    # `build` has appended exactly one.
    (trial,) = trials
    model = trial.model
    objectives = known_objectives(model, scenes.facts)
    # Training comes first: it collects the parameters that any gradient reaches.
    checks: dict[str, Callable[[], str | None]] = {
        f"objective {name}": partial(check_objective, trial, name) for name in objectives
    }
    if isinstance(model, PredictsMaskedWords):
        checks["scheduled sampling"] = partial(check_scheduled_sampling, trial)
    checks |= {f"task {task}": partial(check_task_updates, trial, task) for task in supported_tasks(model)}
    all_trained = True
    for name, check in checks.items():
        result = run_check(name, check)
        all_trained = all_trained and not result.problem
        yield result
    # After a failed training a missing gradient would be a consequence, not a finding.
    if all_trained and trial.reached:
        yield run_check("gradients", lambda: check_gradients(trial))
    yield run_check("batch of one", lambda: check_rows(trial))
    if trial.inputs.text:
        yield run_check("padding", lambda: check_padding(trial))
    if implements(model, LocatesStates):
        yield run_check("located states", lambda: check_located(trial))
    if trial.view == "captions":
        yield run_check("texts per image", lambda: check_shared_images(trial))
    if implements(model, Generates):
        yield run_check("decoding", lambda: check_decoding(trial))
    yield run_check("save and load", lambda: check_saved(trial))
    if ranks and objectives:
        from vlp_models.contrib.plugin_kit.conformance.ranks import check_ranks

        yield run_check("two processes", lambda: check_ranks(trial))


def describe(trial: Trial) -> str:
    """Return the model's size, what it reads, and what it supports."""
    weights = sum(p.numel() for p in trial.model.parameters())
    objectives = list(own_objectives(trial.model))
    abilities = {
        "objectives": objectives,
        "shared objectives": [n for n in known_objectives(trial.model, trial.scenes.facts) if n not in objectives],
        "tasks": supported_tasks(trial.model),
    }
    listed = [f"{kind}: {', '.join(names)}" for kind, names in abilities.items() if names]
    return "; ".join([f"{weights:,} weights", f"reads {trial.inputs.kind}", *listed])


def check_objective(trial: Trial, name: str) -> str:
    """Train on one objective, of the model's own or shared; one text of the batch is empty, [CLS] [SEP]."""
    reader = trial.reader()
    samples = trial.scenes.samples(trial.view, reader, seeded=True)
    samples[0] = dataclasses.replace(samples[0], text="")
    batch = reader.collate(samples)
    if name in own_objectives(trial.model):
        if "pretraining_losses" not in dir(trial.model):
            raise Problem(f"{type(trial.model).__name__} has `objectives`, but no `pretraining_losses`")
        returned = cast(Pretrains, trial.model.eval()).pretraining_losses(
            batch, objectives={name: None}, generator=generator(), mask_probability=MASK_PROBABILITY
        )
        if list(returned) != [name]:
            raise Problem(f"pretraining_losses returns {list(returned)} for the objective {name}")
    loss = objective_loss(trial, [name])
    reached, values = train(trial.model, lambda update: loss(batch, update=update, generator=generator(update)))
    trial.reached |= reached
    return f"loss {values[0]:.3f}, {values[1]:.3f}"


def check_scheduled_sampling(trial: Trial) -> None:
    """Train on all objectives in two passes; the second pass reads predicted words."""
    batch = pretraining_batch(trial)
    loss = objective_loss(trial, list(cast(Pretrains, trial.model).objectives), "a")
    train(trial.model, lambda update: loss(batch, update=update, generator=generator(update)))


def check_gradients(trial: Trial) -> None:
    """Check that each parameter was trained by an objective or a task."""
    names = [n for n, p in trial.model.named_parameters() if p.requires_grad and n not in trial.reached]
    if names:
        raise Problem(
            f"no gradient reaches {shorten_names(names)} from any objective or task: use it, remove it, or set its "
            "requires_grad to False"
        )


# ---- Outputs of a batch -------------------------------------------------------------------------------------------


@torch.no_grad()
def outputs(model: nn.Module, batch: Batch) -> dict[str, list[Tensor]]:
    """Return what the model computes of each text, or of each image of an image-only model, by the method's name."""
    model = model.eval()
    image, text = batch.image, batch.text
    rows_by_method: dict[str, list[Tensor]] = {}
    if text is None or image is None:
        if text is None and implements(model, Embeds):
            rows_by_method["embed_image"] = list(cast(Embeds, model).embed_image(image))
        if image is None and implements(model, Embeds):
            rows_by_method["embed_text"] = list(cast(Embeds, model).embed_text(text))
        return rows_by_method
    # Which image each text is about: by default text i is about image i.
    owners = list(range(len(text))) if text.owner_N is None else text.owner_N.tolist()
    lengths = text.mask_BT.sum(1).tolist()
    if implements(model, Fuses):
        fused = cast(Fuses, model).fuse(image, text)
        rows_by_method["fuse (pooled_BP)"] = list(fused.pooled_BP)
        if fused.decoder_BP is not None:
            rows_by_method["fuse (decoder_BP)"] = list(fused.decoder_BP)
    if implements(model, LocatesStates):
        located = cast(LocatesStates, model).locate(image, text)
        rows = list(zip(located.states_NRD, located.boxes_NR4, located.mask_NR, strict=True))
        rows_by_method["locate (states_NRD)"] = [states[mask] for states, _, mask in rows]
        rows_by_method["locate (boxes_NR4)"] = [boxes[mask] for _, boxes, mask in rows]
    if implements(model, Embeds):
        images = cast(Embeds, model).embed_image(image)
        # One row per text, so that batches with and without shared images compare row by row.
        rows_by_method["embed_image"] = [images[owner] for owner in owners]
        rows_by_method["embed_text"] = list(cast(Embeds, model).embed_text(text))
    if implements(model, ScoresPairs):
        state = cast(ScoresPairs, model).encode_image(image)
        # Without owners: the indices that `score` gets replace them.
        alone = dataclasses.replace(text, owner_N=None)
        rows_by_method["score"] = list(cast(ScoresPairs, model).score(state, alone, torch.tensor(owners)))
    if implements(model, Generates):
        logits = cast(Generates, model).generation_logits(image, text)
        # Logits at padding positions are arbitrary: keep the real tokens only.
        rows_by_method["generation_logits"] = [row[:length] for row, length in zip(logits, lengths, strict=True)]
    return rows_by_method


def check_rows(trial: Trial) -> None:
    """Check that a sample alone gives what it gives in a batch of three, the middle one with an empty text."""
    # Rows of different images and lengths, so that padding and neighbors would show.
    reader = trial.reader()
    samples = trial.scenes.samples(trial.view, reader)[::5][:3]
    samples[1] = dataclasses.replace(samples[1], text="")
    together = outputs(trial.model, reader.collate(samples))
    alone = [outputs(trial.model, reader.collate([sample])) for sample in samples]
    compare(
        {name: [rows[name][0] for rows in alone] for name in together},
        together,
        "alone and in a batch of three: it depends on other rows or on their padding",
    )


def check_padding(trial: Trial) -> None:
    """Check that four more padding tokens, and three padding regions, change nothing."""
    reader = trial.reader()
    batch = reader.collate(trial.scenes.samples(trial.view, reader)[::5][:3])
    text = batch.text
    # Padded ids, a mask of False, and -1 for tokens of no word.
    wider_text = dataclasses.replace(
        text,
        ids_BT=pad(text.ids_BT, (0, 4), value=trial.scenes.tokenizer.pad_id),
        mask_BT=pad(text.mask_BT, (0, 4)),
        word_BT=None if text.word_BT is None else pad(text.word_BT, (0, 4), value=-1),
    )
    wider = dataclasses.replace(batch, text=wider_text)
    if isinstance(batch.image, Regions):  # (B, R, ...) -> (B, R + 3, ...), with zeros
        more = {
            name: torch.cat([x, x.new_zeros(len(x), 3, *x.shape[2:])], 1)
            for name, x in vars(batch.image).items()
            if x is not None
        }
        wider = dataclasses.replace(wider, image=type(batch.image)(**more))
    compare(outputs(trial.model, wider), outputs(trial.model, batch), "with more padding: a mask is missing")


def check_shared_images(trial: Trial) -> None:
    """Check that texts that share an image (`Text.owner_N`) give what they give with a copy of it each."""
    reader = trial.reader()
    samples = trial.scenes.samples(trial.view, reader)[:5]
    shared, copied = reader.collate(samples, share_images=True), reader.collate(samples)
    expected = outputs(trial.model, copied)
    compare(outputs(trial.model, shared), expected, "if texts share an image: read Text.owner_N, by text.owners()")
    if getattr(trial.model, "several_texts", False) and isinstance(trial.model, Pretrains):
        images = trial.scenes.samples("images", reader, seeded=True)
        batch = MultiCaptionCollator(reader=reader, count=2)(images)
        loss = objective_loss(trial, list(trial.model.objectives))(batch, update=0, generator=generator())
        if not bool(loss.mean.isfinite()):
            raise Problem("the pretraining loss is not finite with two captions per image")


@torch.no_grad()
def check_located(trial: Trial) -> str:
    """Check the boxes of the located states, of augmented images as well."""
    model, reader = cast(LocatesStates, trial.model.eval()), trial.reader()
    count = 0
    # Seeded samples are augmented as in training: boxes must follow the crop.
    for seeded in (False, True):
        batch = reader.collate(trial.scenes.samples(trial.view, reader, seeded=seeded)[:6])
        located = model.locate(batch.image, batch.text)
        if located.states_NRD.shape != (*located.boxes_NR4.shape[:2], model.located_dim):
            raise Problem(f"locate: states of {[*located.states_NRD.shape]}, but located_dim is {model.located_dim}")
        boxes_M4 = located.boxes_NR4[located.mask_NR]
        if not bool(((boxes_M4 >= 0) & (boxes_M4 <= 1)).all() and has_area(boxes_M4).all()):
            raise Problem("locate: a box leaves the image or has no area: return fractions of it, x1, y1, x2, y2")
        if bool(located.boxes_NR4[~located.mask_NR].any()):
            raise Problem("locate: a masked state has a box; set it to zero")
        count += len(boxes_M4)
    if not count:
        raise Problem("locate: every state is masked")
    return f"{count} of 12 images"


@torch.no_grad()
def check_decoding(trial: Trial) -> None:
    """Check that decoding word by word, with reordered hypotheses, gives the logits of teacher forcing."""
    model, reader = cast(Generates, trial.model.eval()), trial.reader()
    image = reader.collate(trial.scenes.samples("images", reader)[:3]).image
    order = torch.tensor([2, 0, 0, 1])  # as a beam search does: hypotheses move, double and end
    state = model.start(image, max_len=STEPS)
    token_N = torch.full((len(image),), trial.scenes.tokenizer.cls_id)
    # Decode greedily, and reorder the hypotheses midway; then read the whole texts at once.
    ids_NT, stepped = token_N[:, None], []
    for step in range(STEPS):
        logits_NV, state = model.step(token_N, state)
        stepped.append(logits_NV)
        token_N = logits_NV.argmax(-1)
        if step == 2:
            # The state, the words so far and the recorded logits all follow the same reordering.
            state, ids_NT, token_N = model.reorder(state, order), ids_NT[order], token_N[order]
            # (N, V) logits of each earlier step, in the new order of hypotheses.
            stepped = [logits[order] for logits in stepped]
        ids_NT = torch.cat([ids_NT, token_N[:, None]], 1)
    text = Text(ids_BT=ids_NT[:, :STEPS], mask_BT=torch.ones_like(ids_NT[:, :STEPS], dtype=torch.bool))
    # (N, T, V): position t predicts word t + 1, as the step with word t did.
    forced_NTV = model.generation_logits(image.select(order), text)
    for step, logits_NV in enumerate(stepped):
        decoded, forced = {"step": list(logits_NV)}, {"step": list(forced_NTV[:, step])}
        compare(decoded, forced, f"from generation_logits at word {step + 1}: decoding is not what was trained")


def check_saved(trial: Trial) -> None:
    """Check that a saved model loads and computes the same."""
    reader = trial.reader()
    batch = reader.collate(trial.scenes.samples(trial.view, reader)[:3])
    expected = outputs(trial.model, batch)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder)
        write_checkpoint(path, nn.ModuleDict({"model": trial.model}), trial.info(), trial.scenes.tokenizer)
        loaded = build_from_config(read_config(path), trial.scenes.tokenizer, path)
        load_checkpoint_weights(loaded, part_of(read_weights(path), "model"), path)
    compare(outputs(loaded, batch), expected, "after saving and loading: keep all state in parameters and buffers")
