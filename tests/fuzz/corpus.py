"""Makes tests/fuzz/corpus: of each target a sound input and those known to be hostile.

python tests/fuzz/corpus.py     (inputs whose names begin with `found-`, which fuzzing has left, stay)
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[2]))

from targets import TARGETS
from watch import workplace

CORPUS = Path(__file__).parent / "corpus"
LARGEST = 16_384  # bytes; what is larger is made at each run


def main() -> None:
    with workplace() as folder:
        for target in TARGETS.values():
            place = folder / "targets" / target.name
            place.mkdir(parents=True)
            known = {"sound": target.prepare(place)[1], **target.hostile}
            kept = CORPUS / target.name
            kept.mkdir(parents=True, exist_ok=True)
            for old in kept.iterdir():
                if not old.name.startswith("found-"):
                    old.unlink()
            for name, data in known.items():
                if len(data) <= LARGEST:
                    (kept / name).write_bytes(data)


if __name__ == "__main__":
    main()
