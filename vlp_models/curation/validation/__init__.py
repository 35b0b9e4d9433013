"""What a valid row is, and what checks it."""

from __future__ import annotations

from vlp_models.common.plugins import Table

# `page` -> `module:function` that writes reports/validation.html
VALIDATION_PAGES = Table("validation_pages", {})
# what finds captions to quarantine -> `module:function` that returns caption id -> reason; and the files that it reads
FLAGS, FLAG_FILES = Table("flags", {}), Table("flag_files", {})
