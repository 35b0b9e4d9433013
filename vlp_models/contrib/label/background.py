"""What happens while people label: the champion is loaded, features are computed, drafts and the learning curve made.

The page is usable from the start: without a draft, and with photos in the order of their names.
"""

from __future__ import annotations

import threading
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from vlp_models.common.workspace import Workspace
from vlp_models.contrib.label.desk import Desk
from vlp_models.contrib.label.gain import VersionScores, describe_gain
from vlp_models.contrib.label.similar import Draft, FeatureCache, FloatArray, open_similarity
from vlp_models.errors import VLPError
from vlp_models.params import Params

if TYPE_CHECKING:
    from vlp_models.contrib.label.versions import ChampionDrafts

CURVE_EVERY = 0.25  # growth of the labels after which the learning curve is computed again


class Background(threading.Thread):
    """The thread that does it; it ends with the process.

    Args:
        folder: for the cache of features.
    """

    def __init__(self, desk: Desk, params: Params, workspace: Workspace, folder: Path):
        super().__init__(name="vlp-label", daemon=True)
        self._desk, self._params, self._workspace, self._folder = desk, params, workspace, folder
        self._champion: ChampionDrafts | None = None

    def run(self) -> None:
        """Prepare, then wait for answers. A failure leaves the page usable, and is shown on it."""
        # This imports torch; the page is there before.
        from vlp_models.contrib.label.versions import read_version_scores

        notes = self._desk.notes
        versions: VersionScores | None = None
        curve_labels = -1  # number of labels of the last learning curve
        try:
            self._load_champion()
            self._compute_features()
            with suppress(VLPError):  # without the registry, the curve is that of the labels
                versions = read_version_scores(self._params, self._workspace.root)
            while True:
                self._draft_ahead()
                labels = self._desk.progress()["labeled"]
                if labels != curve_labels and labels >= curve_labels * (1 + CURVE_EVERY):
                    curve_labels = labels
                    notes["gain"] = describe_gain(versions, self._desk.listing.captions(), self._desk.features)
                self._desk.changed.wait()
                self._desk.changed.clear()
        except Exception as error:  # a library's: the thread must not end silently
            notes["failed"] = f"No more drafts: {type(error).__name__}: {error}"

    def _load_champion(self) -> None:
        from vlp_models.contrib.label.versions import open_champion

        desk, reason = self._desk, ""
        if desk.kind == "none":
            desk.notes["drafts"] = "Drafts are off."
            return
        if desk.kind == "champion":
            desk.notes["drafts"] = "Loading the champion."
            try:
                self._champion = open_champion(self._params, self._workspace.root)
                desk.notes["drafts"] = f"Drafts: {self._champion.title}."
                return
            except VLPError as error:
                reason = f" ({error})"
        desk.use_similar()
        desk.notes["drafts"] = f"Drafts: the caption of the most similar labeled photo{reason}."

    def _compute_features(self) -> None:
        """Compute the features of all photos, the labeled ones first; drafts of the champion come in between."""
        desk = self._desk
        extractor, by = open_similarity(self._params, self._workspace)
        cache = FeatureCache(self._folder / "features.npz", extractor, by)
        features: dict[str, FloatArray] = {}
        captions = desk.listing.captions()
        names = sorted(desk.queue.names, key=lambda photo: photo not in captions)
        for number, photo in enumerate(names, start=1):
            with suppress(VLPError, OSError):  # the page leaves the photo out, with the reason, when its turn comes
                features[photo] = cache.get(photo, desk.photos.folder / photo, desk.photos.open)
            if number % 10 == 0:
                desk.notes["order"] = (
                    f"Comparing photos by {by}: {number:,} of {len(names):,}. Until then they come in the order of "
                    "their names."
                )
            self._draft_ahead()
        cache.save()
        desk.use_features(features)
        orders = {
            "active": f"Order: photos unlike the labeled ones first, compared by {by}.",
            "random": "Order: random.",
            "file": "Order: by name.",
        }
        desk.notes["order"] = orders[desk.queue.order]

    def _draft_ahead(self) -> None:
        while self._champion is not None and (photo := self._desk.undrafted()) is not None:
            draft = Draft()
            with suppress(VLPError):  # a photo that cannot be read is left out when its turn comes
                draft = self._champion.draft(self._desk.photos.open(photo))
            self._desk.add_draft(photo, draft)
