"""fuzz_run.py's child: libFuzzer changes inputs towards lines of vlp_models that were not reached before.

One process for all targets: an input's first byte names the target. Counts and findings are written as they come, since
libFuzzer ends the process by itself.
"""

from __future__ import annotations

import sys
from pathlib import Path

import atheris

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[2]))

READERS = [f"vlp_models.{name}" for name in ("data", "params", "serving", "state_dicts", "contrib.imported_features")]
with atheris.instrument_imports(include=READERS):
    import vlp_models.common.state_dicts
    import vlp_models.contrib.imported_features.npz
    import vlp_models.contrib.imported_features.tsv
    import vlp_models.data.formats.base
    import vlp_models.data.formats.coco
    import vlp_models.data.formats.pairs
    import vlp_models.data.images
    import vlp_models.data.shards.archive
    import vlp_models.data.shards.dataset
    import vlp_models.params
    import vlp_models.serving.images  # noqa: F401

from fuzz_run import Fuzzer, limit_memory, seeds_of, write_answer  # noqa: E402
from targets import TARGETS  # noqa: E402
from watch import workplace  # noqa: E402


def main() -> None:
    answer, count, seed, names = Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4:]
    targets = [TARGETS[name] for name in names]
    with workplace() as folder:
        fuzzer = Fuzzer(folder, answer.parent)
        corpus = folder.parent / "corpus"
        corpus.mkdir()
        for number, target in enumerate(targets):
            for place, data in enumerate(seeds_of(target, fuzzer)):
                (corpus / f"{number}-{place}").write_bytes(bytes([number]) + data)
        limit_memory()

        def one(data: bytes) -> None:
            if data:
                target = targets[data[0] % len(targets)]
                found = fuzzer.attempt(target, data[1:])
                total = fuzzer.counts.total()
                if found or total % 20 == 0 or total >= count - 1:
                    write_answer(answer, fuzzer, target.name)

        # libFuzzer counts the empty input that it begins with, which is none here.
        options = [f"-runs={count + 1}", f"-seed={seed}", "-timeout=120", "-rss_limit_mb=0", "-max_len=20000"]
        options += ["-len_control=0", f"-artifact_prefix={answer.parent}/"]
        atheris.Setup([sys.argv[0], *options, str(corpus)], one)
        atheris.Fuzz()


if __name__ == "__main__":
    main()
