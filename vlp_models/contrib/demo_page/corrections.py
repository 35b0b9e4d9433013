"""Corrections of captions: each becomes a submission in the inbox of new data, with where it comes from.

inbox/correction-TIME-RANDOM/photo.jpg   the photo as it was uploaded
inbox/correction-TIME-RANDOM/pairs.csv   image, caption, labeled_by, labeled_at, label_draft (version and caption)

`vlp ingest` decides what becomes of it, as for all submissions.
"""

from __future__ import annotations

import csv
import secrets
import shutil
from collections.abc import Collection
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from vlp_models.common.io import output_directory
from vlp_models.contrib.demo_page.photos import open_photo
from vlp_models.curation.validation.rules import broken_rule, caption_rules
from vlp_models.data.formats.base import RecordError, get_sentence, printable
from vlp_models.data.formats.pairs import LABELED, NEEDED
from vlp_models.data.images import FORMATS
from vlp_models.errors import DataError
from vlp_models.params import ValidateParams

PREFIX = "correction-"
MAX_WAITING = 1000  # corrections in the inbox; more are refused, so that visitors cannot fill the disk
MAX_CAPTION, MAX_NAME = 1000, 80  # characters
VISITOR = "a visitor of the demo page"


@dataclass(frozen=True, kw_only=True)
class Corrections:
    """Where corrections go. evaluation: examples of the page that are in val or test, and must not be trained on."""

    inbox: Path
    rules: ValidateParams
    evaluation: Collection[Path] = ()

    def save(self, photo: Path, *, caption: str, by: str, version: str, draft: str) -> str:
        """Write a submission and return its name.

        Args:
            version, draft: what wrote the caption that the page showed, and that caption.

        Raises:
            DataError: the caption is the one that was shown, or `validate` would refuse it; the photo is evaluation
                data or cannot be read; or too many corrections are waiting.
        """
        if photo in self.evaluation:
            raise DataError("this photo is evaluation data, on which no model may be trained; upload one of yours")
        if len(caption) > MAX_CAPTION or len(by) > MAX_NAME:
            raise DataError(f"a caption has at most {MAX_CAPTION:,} characters, a name {MAX_NAME}")
        try:
            text = get_sentence({"caption": caption}, "caption")
        except RecordError as error:
            raise DataError(str(error)) from None
        if text == " ".join(draft.split()):
            raise DataError("this is the caption that the page shows; change it first")
        if broken := broken_rule(text, caption_rules(self.rules)):
            raise DataError(broken[1])
        open_photo(photo)  # checks it
        if self.inbox.is_dir() and sum(1 for _ in self.inbox.glob(f"{PREFIX}*")) >= MAX_WAITING:
            raise DataError(f"{MAX_WAITING:,} corrections are waiting; `vlp ingest` reads them")
        now = datetime.now(UTC)
        name = f"{PREFIX}{now:%Y%m%dT%H%M%S}-{secrets.token_hex(4)}"
        provenance = (printable(" ".join(by.split())) or VISITOR, f"{now:%Y-%m-%dT%H:%M:%SZ}")
        # The folder appears in the inbox at once, complete.
        with output_directory(self.inbox / name) as folder:
            suffix = photo.suffix.lower()
            file = folder / f"photo{suffix if suffix in FORMATS else '.jpg'}"
            shutil.copyfile(photo, file)
            with (folder / "pairs.csv").open("w", encoding="utf-8", newline="") as listing:
                writer = csv.writer(listing)
                writer.writerow([*NEEDED, *LABELED])
                writer.writerow([file.name, text, *provenance, printable(f"{version}: {draft}")])
        return name
