"""What happens while people label: the champion is loaded, features are computed, drafts and the learning curve made.

The page is usable from the start: without a draft, and with photos in the order of their names.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from vlp_models.common.progress import clock
from vlp_models.common.workspace import Workspace
from vlp_models.contrib.label.desk import Desk
from vlp_models.contrib.label.drafts import Draft, open_drafts
from vlp_models.contrib.label.features import FeatureCache, FloatArray, extract, open_similarity
from vlp_models.contrib.label.gain import VersionScores, describe_gain, read_version_scores
from vlp_models.errors import VLPError
from vlp_models.params import Params

SAVED_EVERY = 60.0  # seconds between two writes of the features that are known
CURVE_EVERY = 0.25  # growth of the labels after which the learning curve is computed again


class Background(threading.Thread):
    """The thread that does it; it ends with the process.

    Args:
        folder: for the cache of features.
        report: called with each line of progress that is new.
    """

    def __init__(self, desk: Desk, params: Params, workspace: Workspace, folder: Path, report: Callable[[str], None]):
        super().__init__(name="vlp-label", daemon=True)
        self._desk, self._params, self._workspace = desk, params, workspace
        self._folder, self._report = folder, report
        self._versions: VersionScores | None = None
        self._curve_labels = -1  # number of labels of the last learning curve

    def run(self) -> None:
        """Prepare, then wait for answers. A failure leaves the page usable, and is shown on it."""
        try:
            self._load_champion()
            self._compute_features()
            while True:
                self._desk.changed.wait()
                self._desk.changed.clear()
                self._draft_ahead()
                self._estimate_gain()
        except Exception as error:  # a library's: the thread must not end silently
            self._note("failed", f"No more drafts: {type(error).__name__}: {error}")

    def _load_champion(self) -> None:
        desk = self._desk
        if desk.kind == "champion":
            self._note("drafts", "Loading the champion.")
        champion, reason = open_drafts(self._params, self._workspace, desk.kind)
        desk.set_champion(champion)
        if champion is not None:
            self._note("drafts", f"Drafts: {champion.title}.")
        elif desk.kind == "none":
            self._note("drafts", "Drafts are off.")
        else:
            why = f" ({reason})" if reason else ""
            self._note("drafts", f"Drafts: the caption of the most similar labeled photo{why}.")

    def _compute_features(self) -> None:
        """Compute the features of all photos, the labeled ones first; drafts of the champion come in between."""
        desk, start = self._desk, time.monotonic()
        extractor, by = open_similarity(self._params, self._workspace)
        cache = FeatureCache(self._folder / "features.npz", f"{by} {extractor.detector_id}")
        features: dict[str, FloatArray] = {}
        captions = desk.listing.captions()
        names = sorted(desk.names, key=lambda photo: photo not in captions)
        computed, saved = 0, start
        for number, photo in enumerate(names, start=1):
            file = desk.photos.folder / photo
            try:
                vector_F = cache.get(photo, file)
                if vector_F is None:
                    vector_F = extract(extractor, desk.photos.open(photo))
                    cache.set(photo, file, vector_F)
                    computed += 1
                features[photo] = vector_F
            except (VLPError, OSError):  # the page leaves the photo out, with the reason, when its turn comes
                continue
            if time.monotonic() - saved > SAVED_EVERY:
                cache.save()
                saved = time.monotonic()
            if computed and number % 10 == 0:
                seconds = (time.monotonic() - start) / computed * (len(names) - number)
                desk.notes["order"] = (
                    f"Comparing photos by {by}: {number:,} of {len(names):,}, about {clock(seconds)} left. Until then "
                    "they come in the order of their names."
                )
            self._draft_ahead()
        if computed:
            cache.save()
        desk.set_features(features)
        if desk.queue.is_active:
            self._note("order", f"Order: photos unlike the labeled ones first, compared by {by}.")
        else:
            self._note("order", {"random": "Order: random.", "file": "Order: by name."}.get(desk.queue.order, ""))
        desk.changed.set()

    def _draft_ahead(self) -> None:
        desk = self._desk
        while desk.champion is not None and (photo := desk.undrafted()) is not None:
            try:
                draft = desk.champion.draft(desk.photos.open(photo))
            except VLPError:  # a photo that cannot be read is left out when its turn comes
                draft = Draft()
            desk.set_draft(photo, draft)

    def _estimate_gain(self) -> None:
        """Compute the learning curve if the labels have grown enough since the last time."""
        captions = self._desk.listing.captions()
        labels = sum(photo in captions for photo in self._desk.names)
        if self._curve_labels < 0:
            with suppress(VLPError):  # without the registry, the curve is that of the labels
                self._versions = read_version_scores(self._params, self._workspace.root)
        elif labels == self._curve_labels or labels < self._curve_labels * (1 + CURVE_EVERY):
            return
        self._curve_labels = labels
        self._note("gain", describe_gain(self._versions, captions, self._desk.features))

    def _note(self, topic: str, text: str) -> None:
        if text and text != self._desk.notes.get(topic):
            self._report(text)
        self._desk.notes[topic] = text
