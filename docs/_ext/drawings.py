"""The diagrams of the docs, drawn as SVG when the site is built. Colors follow the theme (docs/_static/site.css).

`draw(name)` returns the SVG text. `pipeline` and `house` are drawn from dvc.yaml and from the import layers in
pyproject.toml, so they cannot become stale; the others are laid out by hand on a grid of pixels.
"""

from __future__ import annotations

import html
import re
import tomllib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parents[2]
LINE = 17  # height of a line of text
Point = tuple[float, float]


class Drawing:
    """Boxes, arrows and notes; the size follows the content.

    A box is named by its first line or by `name`; `arrow` connects the sides of two boxes that face each other.
    kind of a box: plain, data (rounded, tinted), accent (colored), ghost (dashed).
    """

    def __init__(self, title: str) -> None:
        self.title = title
        self.boxes: dict[str, tuple[float, float, float, float]] = {}
        self._parts: list[str] = []
        self._left, self._right, self._bottom = float("inf"), 0.0, 0.0

    def box(self, x: float, y: float, w: float, text: str, *, h: float = 0, kind: str = "plain", name: str = "") -> str:
        """Draw a box with lines of text; the first line is bold if there are several."""
        lines = text.split("\n")
        h = h or LINE * len(lines) + 15
        name = name or lines[0]
        self.boxes[name] = (x, y, w, h)
        radius = min(14 if kind == "data" else 5, h / 4)
        self._parts.append(f'<rect class="d-{kind}" x="{x}" y="{y}" width="{w}" height="{h}" rx="{radius}"/>')
        top = y + h / 2 - LINE * (len(lines) - 1) / 2 + 4.5
        for number, line in enumerate(lines):
            style = "d-title" if number == 0 and len(lines) > 1 else "d-text"
            self._text(x + w / 2, top + LINE * number, line, style)
        self._grow(x, x + w, y + h)
        return name

    def group(self, x: float, y: float, w: float, h: float, title: str) -> None:
        """Draw a dashed frame around boxes, with a title in its upper left corner."""
        self._parts.insert(0, f'<rect class="d-group" x="{x}" y="{y}" width="{w}" height="{h}" rx="8"/>')
        self._text(x + 10, y + 18, title, "d-label", anchor="start")
        self._grow(x, x + w, y + h)

    def arrow(
        self,
        start: str,
        end: str,
        label: str = "",
        *,
        dashed: bool = False,
        shift: float = 0,
        via: Sequence[Point] = (),
    ) -> None:
        """Connect two boxes, straight or through the points of `via`. shift: moves both ends along the sides."""
        a, b = self._facing(start, end, shift) if not via else (self._toward(start, via[0]), self._toward(end, via[-1]))
        points = [a, *via, b]
        for x, y in via:
            self._grow(x, x, y)
        path = " ".join(f"{'M' if not n else 'L'}{x:.1f} {y:.1f}" for n, (x, y) in enumerate(points))
        self._parts.append(
            f'<path class="d-arrow{" d-dashed" if dashed else ""}" d="{path}" marker-end="url(#d-head)"/>'
        )
        if label:
            n = len(points) // 2
            (x0, y0), (x1, y1) = points[n - 1], points[n]
            horizontal = abs(x1 - x0) >= abs(y1 - y0)
            x, y = (x0 + x1) / 2, (y0 + y1) / 2
            for number, line in enumerate(label.split("\n")):
                if horizontal:
                    self._text(x, y - 7 + 14 * number, line, "d-label")
                else:
                    self._text(x + 7, y + 4 + 14 * number, line, "d-label", anchor="start")

    def note(self, x: float, y: float, text: str, *, anchor: str = "start") -> None:
        for number, line in enumerate(text.split("\n")):
            self._text(x, y + 15 * number, line, "d-label", anchor=anchor)

    def line(self, points: Sequence[Point], kind: str = "d-arrow") -> None:
        path = " ".join(f"{'M' if not n else 'L'}{x:.1f} {y:.1f}" for n, (x, y) in enumerate(points))
        self._parts.append(f'<path class="{kind}" d="{path}"/>')
        for x, y in points:
            self._grow(x, x, y)

    def svg(self) -> str:
        left = self._left - 6
        width, height = self._right + 6 - left, self._bottom + 12
        size = f"width: {width:.0f}px; min-width: min({width:.0f}px, 30rem); max-width: max(100%, 30rem)"
        head = (
            '<marker id="d-head" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" '
            'orient="auto-start-reverse"><path class="d-head" d="M0 0 L8 4 L0 8 z"/></marker>'
        )
        return (
            f'<svg class="drawing" xmlns="http://www.w3.org/2000/svg" role="img" style="{size}" '
            f'viewBox="{left:.0f} -6 {width:.0f} {height:.0f}"><title>{html.escape(self.title)}</title>'
            f"<defs>{head}</defs>{''.join(self._parts)}</svg>"
        )

    def _text(self, x: float, y: float, text: str, style: str, *, anchor: str = "middle") -> None:
        self._parts.append(
            f'<text class="{style}" x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{html.escape(text)}</text>'
        )
        wide = 6.6 * len(text)
        left = x - {"start": 0, "middle": wide / 2, "end": wide}[anchor]
        self._grow(left, left + wide, y + 5)

    def _grow(self, left: float, right: float, bottom: float) -> None:
        self._left, self._right = min(self._left, left), max(self._right, right)
        self._bottom = max(self._bottom, bottom)

    def middle(self, name: str) -> float:
        """Return the height of a box's middle."""
        return self._center(name)[1]

    def crosses(self, start: str, end: str) -> bool:
        """Return whether a straight arrow between two boxes runs through a third one."""
        (ax, ay), (bx, by) = self._facing(start, end, 0)
        points = [(ax + (bx - ax) * n / 50, ay + (by - ay) * n / 50) for n in range(51)]
        return any(
            x < px < x + w and y < py < y + h
            for name, (x, y, w, h) in self.boxes.items()
            if name not in (start, end)
            for px, py in points
        )

    def _center(self, name: str) -> Point:
        x, y, w, h = self.boxes[name]
        return x + w / 2, y + h / 2

    def _toward(self, name: str, point: Point) -> Point:
        """Return where a line from the box's side, perpendicular if possible, to `point` starts."""
        x, y, w, h = self.boxes[name]
        px, py = point
        if x <= px <= x + w:
            return px, y if py < y else y + h
        if y <= py <= y + h:
            return (x if px < x else x + w), py
        return (x if px < x else x + w), y + h / 2

    def _facing(self, start: str, end: str, shift: float) -> tuple[Point, Point]:
        ax, ay, aw, ah = self.boxes[start]
        bx, by, bw, bh = self.boxes[end]
        if ax + aw <= bx or bx + bw <= ax:  # side by side
            low, high = max(ay, by), min(ay + ah, by + bh)
            y = (low + high) / 2 + shift if low < high else 0.0
            left = ax + aw <= bx
            a = (ax + aw if left else ax, y or ay + ah / 2 + shift)
            b = (bx if left else bx + bw, y or by + bh / 2 + shift)
            return a, b
        low, high = max(ax, bx), min(ax + aw, bx + bw)
        x = (low + high) / 2 + shift
        below = ay + ah <= by
        return (x, ay + ah if below else ay), (x, by if below else by + bh)


# ---- Drawn from the project's own files --------------------------------------------------------------------------


def pipeline() -> Drawing:
    """The stages of dvc.yaml in layers, each below everything that it reads; foreach stages are one box."""
    depends = _stage_graph(yaml.safe_load((ROOT / "dvc.yaml").read_text(encoding="utf-8"))["stages"])
    level: dict[str, int] = {}

    def depth(name: str) -> int:
        if name not in level:
            level[name] = 1 + max((depth(other) for other in depends[name]), default=-1)
        return level[name]

    rows: dict[int, list[str]] = {}
    for name in depends:
        rows.setdefault(depth(name), []).append(name)
    drawing, wide, across = Drawing("The stages of the pipeline and what they read"), 128, 160
    places: dict[str, float] = {}
    for number in sorted(rows):
        # Each stage is as close as possible to the mean place of its inputs.
        names = sorted(rows[number], key=lambda n: sum(places[d] for d in depends[n]) / max(1, len(depends[n])))
        for k, name in enumerate(names):
            places[name] = 300 + (k - (len(names) - 1) / 2) * across
            kind = "accent" if name in ("pretrain", "finetune", "evaluate") else "plain"
            drawing.box(places[name] - wide / 2, number * 54, wide, name, kind=kind, name=name)
    lane = max(x + w for x, _, w, _ in drawing.boxes.values())
    for name, others in depends.items():
        for other in sorted(others):
            if any(other in depends[through] for through in others):  # what is implied is not drawn
                continue
            if drawing.crosses(other, name):
                # Around the boxes between them, on the right; each such arrow has a line of its own.
                lane += 14
                drawing.arrow(other, name, via=[(lane, drawing.middle(other)), (lane, drawing.middle(name))])
            else:
                drawing.arrow(other, name)
    return drawing


def _stage_graph(stages: dict[str, Any]) -> dict[str, set[str]]:
    """Return what each stage reads from other stages, by the paths of dependencies and outputs."""
    outs: dict[str, set[str]] = {}
    deps: dict[str, set[str]] = {}
    for name, stage in stages.items():
        if name in ("plan", "training_stats"):
            continue
        for key, item in (stage.get("foreach") or {"": {}}).items():
            body = stage.get("do", stage)
            for kind, paths in (("outs", outs), ("deps", deps)):
                entries = [*body.get(kind, []), *(body.get("metrics", []) if kind == "outs" else [])]
                texts = [entry if isinstance(entry, str) else next(iter(entry)) for entry in entries]
                paths.setdefault(name, set()).update(_fill(text, key, item) for text in texts)
    return {
        name: {
            other
            for other, other_outs in outs.items()
            if other != name
            and any(dep == out or dep.startswith(f"{out}/") for dep in deps[name] for out in other_outs)
        }
        for name in outs
    }


def _fill(text: str, key: str, item: dict[str, Any]) -> str:
    """Replace ${key} and ${item.NAME} as DVC does."""
    return re.sub(r"\$\{(key|item\.\w+)\}", lambda m: str(key if m[1] == "key" else item.get(m[1][5:], "")), text)


def house() -> Drawing:
    """The import layers of pyproject.toml: a folder imports from folders below it only."""
    config = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    contract = next(c for c in config["tool"]["importlinter"]["contracts"] if c["type"] == "layers")
    drawing = Drawing("The folders of the code; each imports from folders below it only")
    for row, layer in enumerate(["contrib", *contract["layers"]]):
        names = [name.strip().removeprefix("vlp_models.") for name in layer.split("|")]
        for column, name in enumerate(names):
            width = 150 if len(names) == 1 else 150 / len(names) - 2
            x = column * (width + 4)
            drawing.box(x, row * 32, width, name, h=26, kind=_kind_of_folder(name), name=name)
        text = "; ".join(_PURPOSE[name] for name in names)
        drawing.note(168, row * 32 + 18, text)
    return drawing


_PURPOSE = {
    "contrib": "what can be left out: vlp ingest, compare, pack, forget, demo, new, ...",
    "flows": "when, where and how often: Prefect. Never imports torch",
    "project": "the Python API of a project",
    "cli": "the commands",
    "pipeline": "DVC stages; dvc.yaml from params.yaml",
    "evaluation": "predictions to scores, the report",
    "registry": "MLflow runs and versions; the gate and the ledger",
    "serving": "bundle, predictor, search",
    "training": "loop, scheduled sampling, optimizers, exact resume",
    "tasks": "one file per downstream task",
    "models": "one folder per paper; decoding; checkpoint conversion",
    "metrics": "scores and intervals",
    "curation": "validation, near-duplicates",
    "vision": "detector, timm backbones, region features",
    "synthetic": "generators of scenes",
    "data": "formats, shards, batches, tokenizer",
    "objectives": "pretraining losses and corruption",
    "params": "the schema of params.yaml",
    "common": "paths, locks, atomic writes, progress",
    "errors": "every error a user meets",
}


def _kind_of_folder(name: str) -> str:
    return "accent" if name in ("training", "tasks", "models", "objectives") else "plain"


# ---- Laid out by hand ----------------------------------------------------------------------------------------------


def version_life() -> Drawing:
    """The life of a model version."""
    d = Drawing("The life of a model version: registered, challenger, champion, previous, rolled back, withdrawn")
    d.box(0, 60, 130, "registered\nvlp run")
    d.box(210, 60, 130, "challenger\nnewest candidate")
    d.box(440, 60, 130, "champion\nserved", kind="accent")
    d.box(440, 180, 130, "previous\none rollback away")
    d.box(210, 180, 130, "kept\nnot promoted", kind="ghost")
    d.box(660, 60, 120, "withdrawn\nvlp forget", kind="ghost")
    d.arrow("registered", "challenger")
    d.arrow("challenger", "champion", "promote")
    d.arrow("challenger", "kept", "keep, or\ninconclusive")
    d.arrow("champion", "previous", "a better one\nis promoted", shift=-35)
    d.arrow("previous", "champion", "rollback", shift=35)
    d.arrow("champion", "withdrawn")
    d.note(0, 20, "Every decision is one line of the ledger in git; MLflow's aliases follow it.")
    return d


def resume() -> Drawing:
    """What resumes where after a kill."""
    d = Drawing("What a killed run keeps, and where the next run continues")
    rows = (
        ("prepare, validate\nseconds to minutes", "no partial output", "the stage starts again"),
        ("features, shards\nhours on large data", ".work/STAGE: finished chunks", "missing chunks only"),
        ("pretrain, finetune\nhours to days", ".work/STAGE: last step-N.ckpt", "at step N, bit for bit"),
        ("evaluate\nminutes", "no partial output", "the stage starts again"),
        ("register, promote\nseconds", "ledger line, or none", "aliases follow the ledger"),
    )
    d.note(0, 10, "killed in")
    d.note(230, 10, "what is on disk")
    d.note(500, 10, "the next vlp run continues with")
    for number, (stage, on_disk, resumed) in enumerate(rows):
        y = 26 + number * 64
        a = d.box(0, y, 170, stage, kind="accent" if "pretrain" in stage else "plain")
        b = d.box(230, y, 210, on_disk, h=49, kind="data", name=f"kept{number}")
        c = d.box(500, y, 190, resumed, h=49, name=f"again{number}")
        d.arrow(a, b)
        d.arrow(b, c)
    return d


def staleness() -> Drawing:
    """What makes a stage stale."""
    d = Drawing("A stage runs again if and only if one of its three inputs changed")
    d.box(0, 0, 220, "contents of its inputs\nmd5 of files that it reads", kind="data")
    d.box(0, 70, 220, "params that it declares\nonly keys that change results", kind="data")
    d.box(0, 140, 220, "code that it loads\nfiles of the package", kind="data")
    d.box(300, 63, 150, "dvc.lock\nrecorded hashes")
    d.box(530, 20, 150, "equal\nskipped in seconds")
    d.box(530, 110, 150, "different\nstage is stale", kind="accent")
    for source in ("contents of its inputs", "params that it declares", "code that it loads"):
        d.arrow(source, "dvc.lock")
    d.arrow("dvc.lock", "equal")
    d.arrow("dvc.lock", "different")
    return d


def gate() -> Drawing:
    """The gate's decision."""
    d = Drawing("The gate: paired differences, an interval, three verdicts")
    d.box(0, 20, 150, "challenger\nscores per item", kind="data")
    d.box(0, 110, 150, "champion\nscores per item", kind="data")
    d.box(220, 55, 180, "paired tests\nover items and seeds\nat the test's error budget")
    d.arrow("challenger", "paired tests")
    d.arrow("champion", "paired tests")
    scale, zero, relevant = 150, 530, 605
    verdicts = (("promote", 0.1, 0.85), ("inconclusive", -0.1, 0.75), ("keep", -0.4, 0.3))
    for row, (name, low, high) in enumerate(verdicts):
        y = 40 + row * 55
        d.line([(zero + low * scale, y), (zero + high * scale, y)], "d-interval")
        d.line([(zero + (low + high) / 2 * scale, y - 5), (zero + (low + high) / 2 * scale, y + 5)], "d-interval")
        d.box(720, y - 16, 120, name, h=32, kind="accent" if name == "promote" else "plain")
    d.line([(zero, 14), (zero, 172)], "d-axis")
    d.line([(relevant, 14), (relevant, 172)], "d-axis")
    d.note(zero, 8, "min_gain", anchor="middle")
    d.note(relevant, 8, "relevant_gain", anchor="middle")
    d.note(440, 192, "interval of the gain, challenger minus champion")
    return d


def leakage() -> Drawing:
    """How images shared between splits are found."""
    d = Drawing("How an image in two splits is found and handled")
    d.box(0, 62, 120, "images\nof all datasets", kind="data")
    d.box(180, 0, 180, "bytes and pixels\nsha256")
    d.box(180, 62, 180, "perceptual hash\n64 bits, small distance")
    d.box(180, 124, 180, "keypoints\ncropped, framed, rotated")
    d.box(420, 93, 150, "alignment\nverifies each pair")
    d.box(640, 0, 210, "action: quarantine\nthe evaluation split keeps it", kind="accent")
    d.box(640, 124, 210, "action: count\nreported next to the scores")
    for name in ("bytes and pixels", "perceptual hash", "keypoints"):
        d.arrow("images", name)
    d.arrow("perceptual hash", "alignment")
    d.arrow("keypoints", "alignment")
    d.arrow("bytes and pixels", "action: quarantine")
    d.arrow("alignment", "action: quarantine")
    d.arrow("alignment", "action: count")
    return d


def tden() -> Drawing:
    d = Drawing("TDEN: object and sentence encoders, cross-modal encoder and decoder")
    d.box(0, 330, 170, "regions\nfeatures, boxes, classes", kind="data")
    d.box(320, 330, 170, "text\nmasked words", kind="data")
    d.box(560, 330, 190, "the same text\nas past words", kind="data")
    d.box(0, 240, 170, "object encoder\nfull attention")
    d.box(320, 240, 170, "sentence encoder\nfull attention")
    d.box(560, 240, 190, "sentence encoder\nsame weights, causal", name="causal")
    d.box(195, 240, 100, "ISM\nmatch", name="ISM")
    d.box(0, 120, 490, "cross-modal encoder\nwords and regions attend to each other", kind="accent", name="encoder")
    d.box(560, 120, 190, "cross-modal decoder\npast words, then regions", kind="accent", name="decoder")
    d.box(0, 20, 170, "MOC\nclasses of masked regions")
    d.box(320, 20, 170, "MLM\nmasked words")
    d.box(560, 20, 190, "MSG\nevery next word")
    for a, b in (
        ("regions", "object encoder"),
        ("text", "sentence encoder"),
        ("the same text", "causal"),
        ("object encoder", "ISM"),
        ("sentence encoder", "ISM"),
        ("object encoder", "encoder"),
        ("sentence encoder", "encoder"),
        ("causal", "decoder"),
        ("encoder", "MOC"),
        ("encoder", "MLM"),
        ("decoder", "MSG"),
    ):
        d.arrow(a, b)
    d.arrow("object encoder", "decoder", "regions", via=[(150, 205), (590, 205)])
    d.arrow("MSG", "the same text", "second pass:\npredicted words", dashed=True, via=[(775, 44), (775, 354)])
    return d


def unified_vlp() -> Drawing:
    d = Drawing("Unified VLP: one transformer, two attention masks")
    d.box(0, 250, 240, "regions\nfeature + box + class", kind="data")
    d.box(280, 250, 240, "text\nword + position, some masked", kind="data")
    d.box(
        0,
        140,
        520,
        "shared transformer (BERT's layers)\nthe mask alone decides between encoder and decoder",
        kind="accent",
        name="stack",
    )
    d.box(0, 40, 240, "bidirectional MLM\nevery token attends to all")
    d.box(280, 40, 240, "seq2seq MLM\nwords attend to the past")
    for a in ("regions", "text"):
        d.arrow(a, "stack")
    d.arrow("stack", "bidirectional MLM", "25%")
    d.arrow("stack", "seq2seq MLM", "75%")
    _mask(d, 590, 60, "bidirectional", causal=False)
    _mask(d, 590, 200, "seq2seq", causal=True)
    return d


def _mask(d: Drawing, x: float, y: float, title: str, *, causal: bool) -> None:
    """Draw an attention mask of 3 regions and 4 words: row attends to column."""
    d.note(x, y - 8, f"{title}: row attends to column")
    for row in range(7):
        for column in range(7):
            allowed = not causal or column < 3 or (row >= 3 and column <= row)
            d.box(
                x + 15 * column,
                y + 15 * row,
                13,
                "",
                h=13,
                kind="accent" if allowed else "ghost",
                name=f"{title}{row}{column}",
            )
    d.note(x + 115, y + 25, "regions")
    d.note(x + 115, y + 80, "words")


def xgpt() -> Drawing:
    d = Drawing("XGPT: one transformer as encoder and decoder, four generative objectives")
    d.box(0, 240, 170, "regions\nand a corrupted caption", kind="data")
    d.box(0, 130, 170, "encoder\nfull attention", kind="accent")
    d.box(250, 130, 620, "decoder\nthe encoder's weights, causal", kind="accent")
    d.box(475, 240, 170, "words so far", h=49, kind="data")
    d.arrow("regions", "encoder")
    d.arrow("words so far", "decoder")
    d.arrow("encoder", "decoder", "memory")
    for number, (name, text) in enumerate(
        (
            ("IC", "caption the image"),
            ("IMLM", "restore a fragment"),
            ("IDA", "restore hidden spans"),
            ("TIFG", "regress the regions"),
        )
    ):
        d.box(250 + 156 * number, 30, 152, f"{name}\n{text}")
        d.arrow("decoder", name)
    return d


def vlmo() -> Drawing:
    d = Drawing("VLMo: shared self-attention, one feed-forward expert per modality")
    streams = (("image only", "patches", "V-FFN"), ("text only", "words", "L-FFN"))
    for column, (title, source, expert) in enumerate(streams):
        x = column * 170
        d.box(x, 330, 130, source, h=32, kind="data", name=f"{source}{column}")
        d.box(x, 240, 130, "self-attention", h=32, kind="accent", name=f"attention{column}")
        d.box(x, 160, 130, expert, h=32, name=f"{expert}{column}")
        d.box(x, 60, 130, f"{'[I_CLS]' if not column else '[T_CLS]'}\nembedding", name=f"out{column}")
        d.arrow(f"{source}{column}", f"attention{column}")
        d.arrow(f"attention{column}", f"{expert}{column}")
        d.arrow(f"{expert}{column}", f"out{column}", "x L")
        d.note(x + 65, 386, title, anchor="middle")
    d.note(150, 40, "ITC: contrast of both embeddings", anchor="middle")
    x = 380
    d.box(x, 330, 280, "patches and words", h=32, kind="data", name="both")
    d.box(x, 270, 280, "self-attention (same weights)", h=32, kind="accent", name="shared")
    d.box(x, 210, 130, "V-FFN", h=32, name="v")
    d.box(x + 150, 210, 130, "L-FFN", h=32, name="l")
    d.box(x, 130, 280, "VL-FFN in the top layers", h=32, name="vl")
    d.box(x, 50, 130, "ITM\npair or not")
    d.box(x + 150, 50, 130, "MLM\nmasked words")
    d.arrow("both", "shared")
    d.arrow("shared", "v")
    d.arrow("shared", "l")
    d.arrow("v", "vl")
    d.arrow("l", "vl")
    d.arrow("vl", "ITM")
    d.arrow("vl", "MLM")
    d.note(x + 140, 386, "image-text pair", anchor="middle")
    return d


def soho() -> Drawing:
    d = Drawing("SOHO: CNN, visual dictionary, cross-modal transformer")
    d.box(0, 300, 150, "image\nwhole, in pixels", kind="data")
    d.box(220, 300, 150, "CNN\ngrid of features")
    d.box(440, 300, 190, "visual dictionary\nnearest code per cell", kind="accent", name="dictionary")
    d.box(0, 200, 150, "text\nword ids", kind="data")
    d.box(220, 160, 410, "cross-modal transformer", h=44, kind="accent", name="transformer")
    d.box(220, 50, 120, "MLM\nmasked words")
    d.box(365, 50, 120, "MVM\nmasked codes")
    d.box(510, 50, 120, "ITM\npair or not")
    d.arrow("image", "CNN")
    d.arrow("CNN", "dictionary")
    d.arrow("dictionary", "transformer", "code embeddings")
    d.arrow("text", "transformer", via=[(185, 224), (185, 182)])
    for name in ("MLM", "MVM", "ITM"):
        d.arrow("transformer", name)
    d.arrow("dictionary", "MVM", "codes are the labels", dashed=True, via=[(690, 324), (690, 20), (425, 20)])
    d.note(440, 372, "codes follow the features by a moving average")
    return d


DRAWINGS: dict[str, Callable[[], Drawing]] = {
    "pipeline": pipeline,
    "house": house,
    "version-life": version_life,
    "resume": resume,
    "staleness": staleness,
    "gate": gate,
    "leakage": leakage,
    "tden": tden,
    "unified-vlp": unified_vlp,
    "xgpt": xgpt,
    "vlmo": vlmo,
    "soho": soho,
}


def draw(name: str) -> str:
    """Return a drawing as SVG.

    Raises:
        KeyError: no drawing has this name.
    """
    return DRAWINGS[name]().svg()
