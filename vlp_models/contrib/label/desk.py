"""The state that all browsers share: which photos are free, on a screen or skipped, their drafts, and the progress.

Everything that must survive a restart is in the listing. A photo that is on a screen is reserved for that browser for
a while, so that two people do not caption the same one; if they do, both captions are written.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from typing import Any

from vlp_models.contrib.label.drafts import ChampionDrafts, Draft, SimilarDrafts
from vlp_models.contrib.label.features import FloatArray
from vlp_models.contrib.label.listing import Label, LabelError, Listing
from vlp_models.contrib.label.photos import Photos
from vlp_models.contrib.label.queue import PhotoQueue
from vlp_models.data.formats.base import printable
from vlp_models.errors import DataError

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
    names: list[str]
    kind: str = "champion"
    champion: ChampionDrafts | None = None
    similar: SimilarDrafts = field(default_factory=SimilarDrafts)
    features: dict[str, FloatArray] = field(default_factory=dict)
    notes: dict[str, str] = field(default_factory=dict)
    changed: threading.Event = field(default_factory=threading.Event)

    def __post_init__(self) -> None:
        self._lock = threading.RLock()
        self._all = set(self.names)
        self._reserved: dict[str, tuple[str, float]] = {}  # photo -> browser, and when
        self._skipped: dict[str, None] = {}  # in the order in which they were skipped
        self._left_out: dict[str, str] = {}  # photo -> why it is not shown
        self._drafts: dict[str, Draft] = {}
        self._answered: Counter[str] = Counter()  # labels of this session by what became of the draft
        self._is_preparing = self.kind == "champion"

    # ---- Requests ------------------------------------------------------------------------------------------------

    def next(self, browser: str) -> Shown | None:
        """Return the photo that this browser shows next, None if all are captioned. A reload returns the same one."""
        with self._lock:
            captions = self.listing.captions()
            reserved = next((photo for photo, (other, _) in self._reserved.items() if other == browser), None)
            while True:
                photo = reserved if reserved and reserved not in captions else self._choose(captions)
                reserved = None
                if photo is None:
                    return None
                try:
                    self.photos.jpeg(photo)
                    break
                except (LabelError, DataError) as error:
                    self._left_out[photo] = str(error)
                    self._reserved.pop(photo, None)
            self._release(browser)
            self._reserved[photo] = (browser, time.monotonic())
            self.queue.cover(photo)
            self.changed.set()
            return self.show(photo)

    def show(self, photo: str) -> Shown:
        """Return a photo with its draft."""
        with self._lock:
            split = self._split(photo)
            if split != "train":
                return Shown(image=photo, split=split, draft=Draft(), reason=NO_DRAFT.format(split=split))
            draft = self._drafts.get(photo) or self._similar_draft(photo)
            if draft is None and self.kind != "none" and (self._is_preparing or self.champion):
                return Shown(image=photo, split=split, draft=None)
            return Shown(image=photo, split=split, draft=draft or Draft())

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
            self._answered[state or "written"] += is_new
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
            self._release(browser)
            self._reserved[label.image] = (browser, time.monotonic())
            self._refit()
            return self.show(label.image)

    def progress(self) -> dict[str, Any]:
        """Return counts and notes for the page."""
        with self._lock:
            labeled = len(self._all & self.listing.captions().keys())
            reasons = list(self._left_out.values())
            return {
                "labeled": labeled,
                "photos": len(self._all),
                "skipped": len(self._skipped),
                "left_out": len(reasons),
                "reasons": reasons[:MAX_REASONS],
                "answered": dict(self._answered),
                "notes": {name: note for name, note in self.notes.items() if note},
            }

    def photo(self, image: str) -> bytes:
        """Return a photo as JPEG. Raises what `Photos.jpeg` does, and a LabelError for an unknown one."""
        self.require(image)
        return self.photos.jpeg(image)

    # ---- Background work -----------------------------------------------------------------------------------------

    def set_champion(self, champion: ChampionDrafts | None) -> None:
        with self._lock:
            self.champion, self._is_preparing = champion, False
            self._refit()

    def set_features(self, features: dict[str, FloatArray]) -> None:
        """Use the features of all photos: for the order, and for drafts without a champion."""
        with self._lock:
            self.features = features
            covered = {**self.listing.captions(), **dict.fromkeys(self._reserved)}
            self.queue.use_features(features, covered)
            self._refit()

    def undrafted(self) -> str | None:
        """Return a photo that needs a draft of the champion: one on a screen, or one of those that come next."""
        if self.champion is None:
            return None
        with self._lock:
            captions = self.listing.captions()
            ahead = [*self._reserved, *self.queue.ahead(self._free(captions))]
            if not self.queue.is_active and (photo := self._choose(captions)):
                ahead.append(photo)
            undrafted = (p for p in ahead if p not in self._drafts and p not in captions and self._split(p) == "train")
            return next(undrafted, None)

    def set_draft(self, photo: str, draft: Draft) -> None:
        with self._lock:
            self._drafts[photo] = draft

    # ---- Helpers -------------------------------------------------------------------------------------------------

    def require(self, image: str) -> str:
        # A name is looked up among the photos that were found, so none leads out of the folder.
        if image not in self._all:
            raise LabelError("This photo is not in the dataset.")
        return image

    def _split(self, photo: str) -> str:
        return self.queue.split[photo]

    def _free(self, captions: Any) -> set[str]:
        now = time.monotonic()
        self._reserved = {photo: held for photo, held in self._reserved.items() if now - held[1] < RESERVED}
        return self._all - captions.keys() - self._reserved.keys() - self._left_out.keys() - self._skipped.keys()

    def _choose(self, captions: Any) -> str | None:
        free = self._free(captions)
        labeled = self._all & captions.keys()
        photo = self.queue.next(free, labeled, self._uncertainty)
        if photo is None:
            # All others are done: the photos that were skipped, the first one first.
            waiting = (p for p in self._skipped if p not in captions and p not in self._reserved)
            photo = next((p for p in waiting if p not in self._left_out), None)
        return photo

    def _release(self, browser: str) -> None:
        self._reserved = {photo: held for photo, held in self._reserved.items() if held[0] != browser}

    def _similar_draft(self, photo: str) -> Draft | None:
        """Return a draft without the champion, None if the champion's is still to come."""
        is_similar = self.kind == "similar" or (self.kind == "champion" and not self.champion)
        if not is_similar or self._is_preparing or photo not in self.features:
            return None
        return self.similar.draft(self.features[photo])

    def _uncertainty(self, photo: str) -> float | None:
        draft = self._drafts.get(photo) or self._similar_draft(photo)
        return None if draft is None else draft.uncertainty

    def _refit(self) -> None:
        if self.features and not self.champion:
            self.similar.fit(self.listing.captions(), self.features)


def as_json(shown: Shown | None) -> dict[str, Any] | None:
    """Return what the page gets of a photo."""
    return None if shown is None else asdict(shown)
