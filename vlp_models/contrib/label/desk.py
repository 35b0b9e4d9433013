"""The state that all browsers share: which photos are free, on a screen or skipped, their drafts, and the progress.

Everything that must survive a restart is in the listing. A photo that is on a screen is reserved for that browser for
a while, so that two people do not caption the same one; if they do, both captions are written.
"""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any, cast

from vlp_models.common.workspace import Workspace
from vlp_models.contrib.label.listing import Label, LabelError, Listing
from vlp_models.contrib.label.photos import Photos
from vlp_models.contrib.label.queue import Order, PhotoQueue
from vlp_models.contrib.label.similar import Draft, FloatArray, SimilarDrafts
from vlp_models.data.formats import source_params
from vlp_models.data.formats.base import printable
from vlp_models.data.formats.pairs import PairsParams
from vlp_models.data.formats.splits import Division, split_held_out
from vlp_models.data.tables import UNKNOWN, standard_language
from vlp_models.errors import DataError, ParamsError
from vlp_models.params import Params

RESERVED = 900.0  # seconds that a photo stays reserved for a browser that does not answer
MAX_REASONS = 3  # of photos that are left out, shown on the page
NO_DRAFT = "No draft: this photo is evaluation data ({split}), and a model's own caption would favor that model."


@dataclass(frozen=True, kw_only=True)
class Shown:
    """What the page shows of a photo. draft: None while it is being written; reason: why it is empty."""

    image: str
    split: str
    draft: Draft | None
    reason: str = ""


@dataclass
class Desk:
    """Hand out photos and write answers; safe to use from several threads.

    kind     what writes drafts: `champion`, `similar` or `none`
    notes    sentences on the state of the preparation, by topic
    changed  set whenever the background work may have something to do
    """

    photos: Photos
    listing: Listing
    queue: PhotoQueue
    kind: str = "champion"
    features: dict[str, FloatArray] = field(default_factory=dict)
    notes: dict[str, str] = field(default_factory=dict)
    changed: threading.Event = field(default_factory=threading.Event)

    def __post_init__(self) -> None:
        self._lock = threading.RLock()
        self._reserved: dict[str, tuple[str, float]] = {}  # photo -> browser, and when
        self._skipped: dict[str, None] = {}  # in the order in which they were skipped
        self._left_out: dict[str, str] = {}  # photo -> why it is not shown
        self._drafts: dict[str, Draft] = {}  # of the champion
        self._similar = SimilarDrafts()
        self.saved = 0  # labels of this session

    # ---- Requests ------------------------------------------------------------------------------------------------

    def next(self, browser: str) -> Shown | None:
        """Return the photo that this browser shows next, None if all are captioned. A reload returns the same one."""
        with self._lock:
            captions = self.listing.captions()
            reserved = [photo for photo, (other, _) in self._reserved.items() if other == browser]
            photo = next((photo for photo in reserved if photo not in captions), None) or self._choose()
            while photo is not None:
                try:
                    self.photos.jpeg(photo)
                except (LabelError, DataError) as error:
                    self._left_out[photo] = str(error)
                    photo = self._choose()
                else:
                    self.queue.cover(photo)
                    self.changed.set()
                    return self._reserve(photo, browser)
            return None

    def show(self, photo: str) -> Shown:
        """Return a photo with its draft."""
        self.require(photo)
        with self._lock:
            split = self.queue.split[photo]
            if split != "train":
                return Shown(image=photo, split=split, draft=Draft(), reason=NO_DRAFT.format(split=split))
            draft = self._find_draft(photo)
            if draft is None and self.kind != "champion":
                draft = Draft()
            return Shown(image=photo, split=split, draft=draft)

    def answer(self, *, image: str, caption: str, by: str, draft: str, origin: str) -> Label:
        """Write a caption and return the label.

        Args:
            draft, origin: what the page showed.

        Raises:
            LabelError: the photo is unknown or withdrawn, or `validate` would refuse the caption.
            DataError: the listing cannot be extended.
        """
        self.require(image)
        self.photos.check(image)
        text = self.listing.check(caption)
        state = "" if not draft else "accepted" if text == " ".join(draft.split()) else "edited"
        label = Label(
            image=image,
            caption=text,
            by=printable(" ".join(by.split())),
            at=datetime.now(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z"),
            draft=printable(f"{origin}, {state}") if state else "",
        )
        is_new = self.listing.add(label)
        with self._lock:
            self._reserved.pop(image, None)
            self._skipped.pop(image, None)
            self.saved += is_new
            self.queue.cover(image, self.features.get(image))
            self._refit()
        self.changed.set()
        return label

    def skip(self, image: str) -> None:
        """Let a photo come again after all others."""
        self.require(image)
        with self._lock:
            self._skipped.pop(image, None)
            self._skipped[image] = None
            self._reserved.pop(image, None)

    def undo(self, browser: str, label: Label) -> Shown:
        """Remove a label, and reserve its photo for this browser again.

        Raises:
            LabelError: its row is no longer in the listing.
        """
        self.require(label.image)
        if not self.listing.remove(label):
            raise LabelError(f"{label.image}: this caption is no longer in {self.listing.path.name}.")
        with self._lock:
            self._refit()
            return self._reserve(label.image, browser)

    def progress(self) -> dict[str, Any]:
        """Return counts and notes for the page."""
        with self._lock:
            return {
                "labeled": len(self._labeled()),
                "photos": len(self.queue.names),
                "skipped": len(self._skipped),
                "left_out": len(self._left_out),
                "reasons": list(self._left_out.values())[:MAX_REASONS],
                "notes": {name: note for name, note in self.notes.items() if note},
            }

    def require(self, image: str) -> None:
        """Refuse a name that is not one of the photos that were found, so that none leads out of the folder."""
        if image not in self.queue.split:
            raise LabelError("This photo is not in the dataset.")

    # ---- Background work -----------------------------------------------------------------------------------------

    def use_similar(self) -> None:
        """Draft from similar photos, since there is no champion."""
        with self._lock:
            self.kind = "similar"
            self._refit()

    def use_features(self, features: dict[str, FloatArray]) -> None:
        """Use the features of all photos: for the order, and for drafts without a champion."""
        with self._lock:
            self.features = features
            self.queue.use_features(features, [*self.listing.captions(), *self._reserved])
            self._refit()

    def undrafted(self) -> str | None:
        """Return a photo that needs a draft of the champion: one on a screen, or one of those that come next."""
        with self._lock:
            ahead = [*self._reserved, *self.queue.ahead(self._free()), self._choose()]
            drafted = {None, *self._drafts, *self.listing.captions()}
            return next((p for p in ahead if p not in drafted and self.queue.split[str(p)] == "train"), None)

    def add_draft(self, photo: str, draft: Draft) -> None:
        with self._lock:
            self._drafts[photo] = draft

    # ---- Helpers -------------------------------------------------------------------------------------------------

    def _labeled(self) -> set[str]:
        return self.queue.split.keys() & self.listing.captions().keys()

    def _free(self) -> set[str]:
        now = time.monotonic()
        self._reserved = {photo: held for photo, held in self._reserved.items() if now - held[1] < RESERVED}
        return (
            set(self.queue.names)
            - self._labeled()
            - self._reserved.keys()
            - self._left_out.keys()
            - self._skipped.keys()
        )

    def _choose(self) -> str | None:
        photo = self.queue.next(self._free(), self._labeled(), self._uncertainty)
        if photo is not None:
            return photo
        # All others are done: the photos that were skipped, the first one first.
        done = {*self._labeled(), *self._reserved, *self._left_out}
        return next((photo for photo in self._skipped if photo not in done), None)

    def _reserve(self, photo: str, browser: str) -> Shown:
        """Reserve a photo in place of the one that the browser has, and return it."""
        self._reserved = {photo: held for photo, held in self._reserved.items() if held[0] != browser}
        self._reserved[photo] = (browser, time.monotonic())
        return self.show(photo)

    def _find_draft(self, photo: str) -> Draft | None:
        """Return a photo's draft; None if it is not written yet."""
        if self.kind == "similar" and photo in self.features:
            return self._similar.draft(self.features[photo])
        return self._drafts.get(photo)

    def _uncertainty(self, photo: str) -> float | None:
        draft = self._find_draft(photo)
        return None if draft is None else draft.uncertainty

    def _refit(self) -> None:
        if self.kind == "similar":
            self._similar.fit(self.listing.captions(), self.features)


def choose_dataset(params: Params, name: str) -> tuple[str, PairsParams]:
    """Return the dataset to label, by its name or because it is the only one with a listing.

    Raises:
        ParamsError: it is not in params.yaml, or its listing is not a single file.
    """
    pairs = {key: source for key, source in params.data.items() if source.format == "pairs"}
    key = name or (next(iter(pairs)) if len(pairs) == 1 else "NAME")
    if key not in pairs:
        listed = ", ".join(pairs) or "none; `vlp use few-pairs` adds one for the folder data/raw/pairs"
        problem = "not a" if name else "name a"
        raise ParamsError(f"vlp label {key}: {problem} dataset of the format pairs; params.yaml has {listed}")
    source = cast(PairsParams, source_params(key, pairs[key]))
    if not source.pairs or "*" in source.pairs:
        raise ParamsError(
            f"params.yaml: data.{key}.pairs: {source.pairs!r} is not a single file, to which captions could be added; "
            "label in a dataset of its own"
        )
    return key, source


def open_desk(
    params: Params,
    workspace: Workspace,
    name: str,
    source: PairsParams,
    *,
    order: Order = "active",
    kind: str = "champion",
    split: str = "train",
    language: str = "",
) -> Desk:
    """Read the listing and find the photos.

    Raises:
        DataError: the folder is missing, has no photo, or its listing cannot be extended.
        ParamsError: an option does not fit the listing.
    """
    if language and standard_language(language) == UNKNOWN:
        raise ParamsError(f"vlp label --lang {language}: not a language code, such as de or pt-BR")
    path = workspace.root / source.root / source.pairs
    if not path.parent.is_dir():
        raise DataError(f"{path.parent}: no such folder; put the photos there, or set data.{name}.root")
    lock = workspace.root / ".work" / "label" / f"{name}.lock"
    listing = Listing(path, lock, params.validate, split=split, language=language)
    photos = Photos(path.parent, name, workspace, params.validate)
    names = photos.find()
    if not names:
        raise DataError(f"{path.parent}: no photo (JPEG, PNG, WebP, GIF or BMP) in this folder or below it")
    if not listing.names_splits and split != "train":
        raise ParamsError(
            f"vlp label --split {split}: {path} names no splits, so photos are divided by a hash of their name"
        )
    division = Division(names)

    def split_of(photo: str) -> str:
        if not listing.names_splits:
            return division.split_of(photo)
        return split_held_out(photo, source.val_fraction) if split == "train" else split

    return Desk(photos, listing, PhotoQueue(names, split_of, order), kind)
