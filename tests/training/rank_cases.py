"""The losses of the whole project on batches that two processes share, in float64: run by test_distributed_losses.py.

    python rank_cases.py RANK WORLD_SIZE FOLDER

builds every case from fixed seeds, takes this rank's rows, learns from them under DDP and sharded, and writes gradients
and parts to FOLDER. Imported, it is what a single process learns from all rows.
"""

from __future__ import annotations

import json
import sys
import warnings
import zlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "support"))

import soho_ranks
import tiny_tden as tiny
import tiny_vlmo
import torch
import torch.distributed as dist
from safetensors.torch import save_file
from tiny_unified_vlp import tiny_unified_vlp
from tiny_xgpt import tiny_xgpt
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from toy_dataset import Toy
from toy_pairs import by_pairs
from toy_tasks import double, make
from toy_tasks import learn as learn_captions
from two_pass_toys import ALL, generator, recipe_of

from vlp_models.contrib.fsdp.strategy import Sharding
from vlp_models.data.batch import Batch, Regions, Text
from vlp_models.data.shards.dataset import ShardDataset
from vlp_models.data.tokenizer import Tokenizer
from vlp_models.models.decoding.sampling import sample
from vlp_models.models.decoding.search import Hypothesis
from vlp_models.models.xgpt.model import XGPT
from vlp_models.objectives.distributed import gather_rows, previous_rows, take_rows
from vlp_models.objectives.loss import Loss, WeightedLosses
from vlp_models.objectives.masked_modeling import select_tokens
from vlp_models.objectives.moving_average import UpdateAccumulator
from vlp_models.params import ScheduledSamplingParams
from vlp_models.tasks import TASKS
from vlp_models.tasks.self_critical import SelfCriticalLoss, SelfCriticalParams, self_critical_loss
from vlp_models.training.normalization import mean_losses, normalize, total_over_ranks
from vlp_models.training.recipe import make_recipe
from vlp_models.training.scheduled_sampling import make_loss
from vlp_models.training.sharding import own_part, whole

VLMO = ("itc", "itm", "mlm", "mim")
# Self-critical training is refused: processes decode captions of different lengths.
NOT_SHARDED = ("self_critical_greedy_7", "self_critical_greedy_1", "self_critical_leave_one_out_7")


@dataclass(frozen=True)
class Case:
    """A model, its loss, and the rows of its batch: `rows(first, last)` as a loader would make a batch of them."""

    module: nn.Module
    loss: Callable[[Batch], Loss | WeightedLosses]
    rows: Callable[[int, int], Batch]
    size: int


def cases(folder: Path) -> dict[str, Callable[[], Case]]:
    """Each is built when it is called. folder: with a toy dataset (toy_dataset.make_toy)."""
    both, unified = ["bidirectional", "seq2seq"], tiny_unified_vlp
    # name -> how the model is built, its objectives, and what differs from `pretraining`'s defaults
    settings: dict[str, tuple[Callable[..., Any], Iterable[str], dict[str, Any]]] = {
        **{name: (tiny.build_tiny, [name], {}) for name in ALL},
        "all": (tiny.build_tiny, ALL, {}),
        "bert": (tiny.build_tiny, ["mlm", "moc"], {"mask_scheme": "bert", "zero_overlapping_regions": True}),
        "hardest": (tiny.build_tiny, ["ism"], {"ism_negatives": "hardest"}),
        "cross_modal": (tiny.build_tiny, ["ism", "mlm"], {"ism_source": "cross_modal"}),
        "no_words_on_rank_0": (tiny.build_tiny, ["mlm"], {"probability": 0.05, "seed": seed_without_words()}),
        "no_words": (tiny.build_tiny, ["mlm", "msg"], {"probability": 0.0}),
        "single": (tiny.build_tiny, ALL, {"size": 1}),
        "single_cross_modal": (tiny.build_tiny, ["ism", "msg"], {"size": 1, "ism_source": "cross_modal"}),
        **{f"two_pass_{scheme}": (tiny.build_tiny, ALL, {"scheme": scheme}) for scheme in "abc"},
        "two_pass_single": (tiny.build_tiny, ALL, {"scheme": "b", "size": 1}),
        **{f"xgpt_{name}": (tiny_xgpt, [name], {}) for name in XGPT.objectives},
        "xgpt_two_pass": (tiny_xgpt, XGPT.objectives, {"scheme": "a"}),
        "xgpt_single": (tiny_xgpt, XGPT.objectives, {"size": 1}),
        **{f"unified_vlp_{name}": (unified, [name], {}) for name in both},
        "unified_vlp_both": (unified, both, {"mask_scheme": "mask"}),
        "unified_vlp_drawn": (unified, both, {"mix": "sample"}),
        "unified_vlp_drawn_single": (unified, both, {"mix": "sample", "size": 1}),
        "unified_vlp_pretext": (unified, [*both, "moc"], {"mix": "sample", "region_classes": "pretext"}),
        **{f"unified_vlp_two_pass_{scheme}": (unified, both, {"scheme": scheme}) for scheme in "abc"},
    }
    every: dict[str, Callable[[], Case]] = {}
    for name, (build, objectives, config) in settings.items():
        every[name] = partial(pretraining, build, objectives, **config)
    for task in (task for task in ("captioning", "vqa", "nlvr", "vcr", "retrieval") if task in TASKS):
        for size in (7, 1):
            every[f"{task}_{size}"] = lambda task=task, size=size: fine_tuning(folder, task, size)
    every["retrieval_hardest"] = lambda: fine_tuning(folder, "retrieval", 7, options={"negatives": "hardest"})
    for size in (7, 3):
        every[f"retrieval_by_pairs_{size}"] = lambda size=size: pairs(folder, size)
    every["smoothed"] = lambda: fine_tuning(folder, "captioning", 7, options={"label_smoothing": 0.1})
    for baseline, size in (("greedy", 7), ("greedy", 1), ("leave_one_out", 7)):
        every[f"self_critical_{baseline}_{size}"] = lambda b=baseline, s=size: reward(folder, b, s)
    for name in (*VLMO, "all", "single", "both"):
        every[f"vlmo_{name}"] = lambda name=name: of_vlmo(name)
    return every


def pretraining(
    build: Callable[..., Any],
    objectives: Iterable[str],
    *,
    size: int = 7,
    mix: str = "sum",
    scheme: str = "none",
    probability: float = 0.4,
    seed: int = 3,
    **config: Any,
) -> Case:
    model, batch = build(**config), shared_batch(size)
    recipe = recipe_of(dict.fromkeys(objectives, 1.0), mask_probability=probability, mix=mix)
    loss = make_loss(model, recipe, ScheduledSamplingParams(scheme=scheme), name="x")  # type: ignore[arg-type]
    return Case(model, lambda b: loss(b, update=0, generator=generator(seed)), lambda i, j: rows(batch, i, j), size)


def of_vlmo(name: str) -> Case:
    """An objective, all of them, all of a single pair, or both contrasts."""
    size = 1 if name == "single" else 7
    objectives = {"both": ("itc",)}.get(name, (name,) if name in VLMO else VLMO)
    model = tiny_vlmo.build_tiny(contrast="both" if name == "both" else "unimodal")
    batch = tiny_vlmo.random_batch(size, image_ids="abbcdae")

    def loss(rows: Batch) -> WeightedLosses:
        losses = tiny_vlmo.losses(model, rows, objectives, seed=3)
        return WeightedLosses(losses=losses, weights=dict.fromkeys(losses, 1.0))

    def rows_of(first: int, last: int) -> Batch:
        return tiny_vlmo.trimmed(batch, torch.arange(first, last)) if first < last else batch.empty()

    return Case(model, loss, rows_of, size)


def toy_in(folder: Path) -> Toy:
    return Toy(folder / "shards", Tokenizer.load(folder / "tokenizer"))


def fine_tuning(folder: Path, task: str, size: int, **info: Any) -> Case:
    toy = toy_in(folder)
    model = make(toy, task, **info).double()
    dataset = ShardDataset(toy.shards, "train", model.view)
    return Case(
        model,
        lambda b: model.loss(b, generator=generator(3)),
        lambda i, j: collated(model.collate, dataset, i, j),
        size,
    )


def pairs(folder: Path, size: int) -> Case:
    """A caption's own image among two of its process's: one process alone takes each share by itself, with its draws.
    Of three rows the first process has one, and nothing to report it from."""
    toy = toy_in(folder)
    model = by_pairs(toy, pair_negatives=2).double()
    dataset = ShardDataset(toy.shards, "train", model.view)

    def rows_of(first: int, last: int) -> Batch:
        return collated(model.collate, dataset, first, last)

    def loss(batch: Batch) -> Loss:
        if dist.is_initialized():
            return model.loss(batch, generator=generator(3))
        shares = [rows_of(*share(size, rank, 2)) for rank in range(2)]
        first, second = (model._match(each, generator(3)) for each in shares)
        sums = {name: first.parts[name].sum + second.parts[name].sum for name in first.parts}
        return Loss.of(first.sum + second.sum, first.count + second.count, **sums)

    return Case(model, loss, rows_of, size)


def reward(folder: Path, baseline: str, size: int) -> Case:
    toy = toy_in(folder)
    model = make(toy, "captioning")
    learn_captions(model, toy, 12)  # or nothing it reports earns anything
    model.double()
    dataset = ShardDataset(toy.shards, "train", "images")
    params = SelfCriticalParams(samples=3, baseline=baseline)  # type: ignore[arg-type]
    made = self_critical_loss(model, params, toy.shards, {}, folder)
    loss = GivenSamples(made.captioning, made.reward, params)
    return Case(
        model,
        lambda b: loss(b, update=0, generator=generator(3)),
        lambda i, j: collated(model.collate, dataset, i, j),
        size,
    )


class GivenSamples(SelfCriticalLoss):
    """Samples with a seed from the image id, so that an image has the same samples in any process."""

    def _sample(self, batch: Batch, generator: torch.Generator) -> tuple[list[list[Hypothesis]], list[Hypothesis]]:
        drawn = []
        for i, image_id in enumerate(batch.image_ids):
            own = torch.Generator().manual_seed(zlib.crc32(image_id.encode()))
            image = rows(batch, i, i + 1).image
            count = self.params.samples + 1
            drawn += sample(self.captioning.model, image, num_samples=count, generator=own, **self._decoder_args)
        return [group[1:] for group in drawn], [group[0] for group in drawn]


def shared_batch(size: int) -> Batch:
    """Return pairs: two in different processes show one image, and so do two in the same process."""
    batch = tiny.random_batch(size)
    names = ["a", "b", "b", "c", "d", "a", "e"][:size]
    return replace(batch, image_ids=tuple(names))


def rows(batch: Batch, first: int, last: int) -> Batch:
    """Without the padding that these rows do not need; a batch of none keeps a row's width."""
    some = slice(first, last) if first < last else slice(0, 1)
    image, text = batch.image, batch.text
    assert isinstance(image, Regions)
    regions, tokens = int(image.mask_BR[some].sum(1).max()), int(text.mask_BT[some].sum(1).max())
    cut = replace(
        batch,
        sample_ids=batch.sample_ids[some],
        image_ids=batch.image_ids[some],
        image=Regions(**{name: x[some, :regions] for name, x in vars(image).items() if x is not None}),
        text=Text(ids_BT=text.ids_BT[some, :tokens], mask_BT=text.mask_BT[some, :tokens]),
    )
    return cut if first < last else cut.empty()


def collated(collate: Callable[[list[Any]], Batch], dataset: ShardDataset, first: int, last: int) -> Batch:
    batch = double(collate([dataset[i] for i in range(first, max(first + 1, last))]))
    return batch if first < last else batch.empty()


def seed_without_words() -> int:
    """A seed that masks words of the second process's rows only."""
    mask_BT = shared_batch(7).text.mask_BT
    for seed in range(1000):
        words_BT = select_tokens(mask_BT, 0.05, generator(seed))
        if not words_BT[:3].any() and words_BT[3:].any():
            return seed
    raise AssertionError("no such seed")


def share(size: int, rank: int, world_size: int) -> tuple[int, int]:
    return size * rank // world_size, size * (rank + 1) // world_size


class Learner(nn.Module):
    """What DDP wraps: the loss inside the forward pass, as in the training loop."""

    def __init__(self, case: Case) -> None:
        super().__init__()
        self.module, self.loss = case.module, case.loss

    def forward(self, batch: Batch) -> tuple[Tensor, dict[str, Tensor]]:
        loss = self.loss(batch)
        loss = WeightedLosses.of(loss) if isinstance(loss, Loss) else loss
        found = total_over_ranks(loss)
        world_size = dist.get_world_size() if dist.is_initialized() else 1
        return normalize(loss, found.counts) * world_size, mean_losses([found])


def learn(case: Case, rank: int = 0, world_size: int = 1, *, sharded: bool = False) -> tuple[dict[str, Tensor], Any]:
    """Gradients of the whole batch, and the parts, as this process reads them."""
    learner: nn.Module = Learner(case)
    case.module.train()
    sharding = None
    if sharded:
        sharding = Sharding(learner, init_device_mesh("cpu", (world_size,)), ())
    elif world_size > 1:
        learner = nn.parallel.DistributedDataParallel(learner, find_unused_parameters=True)
    total, parts = learner(case.rows(*share(case.size, rank, world_size)))
    total.backward()
    if sharding is not None:
        sharding.average_replicated(case.module.parameters())
    gradients = {
        name: whole(torch.zeros_like(parameter) if parameter.grad is None else parameter.grad)
        for name, parameter in case.module.named_parameters()
    }
    if sharding is not None:
        sharding.undo()
    return gradients, {name: float(value) for name, value in parts.items()}


class MovingAverage(UpdateAccumulator):
    """average = 0.75 * average + 0.25 * (the sum over all micro-batches and processes of an update)."""

    average: Tensor

    def __init__(self, start: Tensor) -> None:
        super().__init__()
        self.register_buffer("average", start)

    def zero_total(self) -> Tensor:
        return torch.zeros_like(self.average)

    def apply_update(self, total: Tensor) -> None:
        self.average.lerp_(total, 0.25)


def gathered(rank: int) -> dict[str, Tensor]:
    """Return this rank's rows (three, then one), all rows as gathered, and the gradient of a function of all rows."""
    own = torch.arange(6.0, dtype=torch.float64).view(3, 2) if rank == 0 else torch.tensor([[7.0, 8.0]]).double()
    own.requires_grad_()
    rows_G2 = gather_rows(own)
    (rows_G2**2 * (rank + 1)).sum().backward()
    assert own.grad is not None
    taken_from = own.detach().clone().requires_grad_()
    taken = take_rows(taken_from, torch.tensor([3, 0, 3] if rank == 0 else [1]))
    (taken * (rank + 1)).sum().backward()
    assert taken_from.grad is not None
    average = MovingAverage(torch.tensor([1.0, 2.0], dtype=torch.float64))
    for values in own.detach():  # a micro-batch a row; the second process has one
        average.add(values)
    average.update()
    average.eval()
    average.add(own.detach()[0])
    average.update()
    return {
        "rows": rows_G2.detach(),
        "gradient": own.grad,
        "previous": previous_rows(own[:, :, None]).detach(),
        "taken": taken.detach(),
        "taken_gradient": taken_from.grad,
        "average": average.average,
        "drawn": drawn_objectives(rank),
    }


def drawn_objectives(rank: int) -> Tensor:
    """Which of two objectives each of this process's rows learns; the first process has three of seven."""
    recipe = make_recipe(recipe_of({"mlm": 1.0, "msg": 1.0}, mix="sample"), supported=ALL)
    masks = recipe.assign(0, 3 if rank == 0 else 4, generator(1), torch.device("cpu"))
    assert masks["mlm"] is not None
    return masks["mlm"]


def check_sharding_is_undone(world_size: int) -> None:
    """A model that was sharded is itself again: modules, keys, weights, and what it computes."""
    model = tiny.build_tiny()
    described = [(type(module), sorted(vars(module))) for module in model.modules()]
    before = {name: weight.clone() for name, weight in model.state_dict().items()}
    sharding = Sharding(model, init_device_mesh("cpu", (world_size,)), ("fuse",))
    assert sum(own_part(p).numel() for p in model.parameters()) < 0.6 * sum(w.numel() for w in before.values())
    batch = shared_batch(2)
    sharded = model.fuse(batch.image, batch.text).pooled_BP
    sharding.undo()
    assert [(type(module), sorted(vars(module))) for module in model.modules()] == described
    after = model.state_dict()
    assert list(after) == list(before) and all(torch.equal(after[name], weight) for name, weight in before.items())
    assert torch.equal(model.fuse(batch.image, batch.text).pooled_BP, sharded)


def main(rank: int, world_size: int, folder: Path) -> None:
    every = {name: make_case() for name, make_case in cases(folder).items()}
    again = {name: make_case() for name, make_case in cases(folder).items()}
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder / 'rendezvous'}",
        rank=rank,
        world_size=world_size,
        timeout=timedelta(seconds=60),
    )
    save_file(gathered(rank), folder / f"gathered-{rank}.safetensors")
    for update in soho_ranks.UPDATES:
        found = {name: tensor.contiguous() for name, tensor in soho_ranks.learn(update, rank, world_size).items()}
        save_file(found, folder / f"soho-{update}-{rank}.safetensors")
    check_sharding_is_undone(world_size)
    parts: dict[str, dict[str, float]] = {}
    for name, case in every.items():
        gradients, parts[name] = learn(case, rank, world_size)
        save_file(gradients, folder / f"{name}-{rank}.safetensors")
        if name in NOT_SHARDED:
            continue
        gradients, parts[f"sharded_{name}"] = learn(again[name], rank, world_size, sharded=True)
        save_file(gradients, folder / f"sharded_{name}-{rank}.safetensors")
    (folder / f"parts-{rank}.json").write_text(json.dumps(parts))
    dist.destroy_process_group()


if __name__ == "__main__":
    warnings.filterwarnings("ignore", message="FSDP2-wrapped module")
    main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]))
