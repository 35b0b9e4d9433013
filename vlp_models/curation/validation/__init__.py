"""What a valid row is, and what checks it."""

from __future__ import annotations

from vlp_models.common.plugins import Table

# `page` -> `module:function` that writes reports/validation.html
VALIDATION_PAGES = Table("validation_pages", {})
FLAGS = Table("flags", {})  # files, read -> `module:function`, of contrib/audit: captions to quarantine
