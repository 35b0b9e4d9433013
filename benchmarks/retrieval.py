"""Time to rank 5,000 captions against 1,000 images in both directions from their embeddings (Flickr30k's test size at
the public code's 1,024 dimensions). Target: under 0.5 s on two cores.

    python benchmarks/retrieval.py

Writes benchmarks/results/retrieval-cpu.json. tests/metrics/test_retrieval_ranks.py compares the same functions with a
slow reference.
"""

from __future__ import annotations

import json
import os
import time

import numpy as np
from common import write_result

from vlp_models.metrics.retrieval import rank, score_ranks, top_columns

IMAGES, CAPTIONS_EACH, DIMENSIONS, REPEATS = 1000, 5, 1024, 5


def main() -> None:
    rng = np.random.default_rng(0)
    images = rng.standard_normal((IMAGES, DIMENSIONS)).astype(np.float32)
    owners = np.repeat(np.arange(IMAGES), CAPTIONS_EACH)
    texts = images[owners] + 20 * rng.standard_normal((len(owners), DIMENSIONS)).astype(np.float32)
    images /= np.linalg.norm(images, axis=1, keepdims=True)
    texts /= np.linalg.norm(texts, axis=1, keepdims=True)
    names = [str(i) for i in range(IMAGES)]
    owner_ids = [names[owner] for owner in owners]

    seconds = []
    for _ in range(REPEATS):
        start = time.perf_counter()
        found = rank(names, images, owner_ids, texts)
        top_columns(found.similarity_TI, 5)
        top_columns(found.similarity_TI.T, 5)
        scores = score_ranks(found.text_ranks_T, owner_ids, IMAGES)
        seconds.append(time.perf_counter() - start)
    result = {
        "images": IMAGES,
        "captions": len(owners),
        "dimensions": DIMENSIONS,
        "threads": os.environ.get("OMP_NUM_THREADS", f"all of {os.cpu_count()}"),
        "seconds_median": round(sorted(seconds)[REPEATS // 2], 3),
        "seconds_best": round(min(seconds), 3),
        "R@1": scores[0].value,
    }
    print(json.dumps(result))
    write_result("retrieval-cpu", result)


if __name__ == "__main__":
    main()
