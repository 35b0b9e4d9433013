"""Ranking 5,000 captions against 1,000 images, both ways, from their embeddings: `python benchmarks/retrieval.py`.

Aim: under 0.5 s on two cores, Flickr30k's test size at the public code's 1,024 dimensions. Writes
benchmarks/results/retrieval-cpu.json. tests/metrics/test_retrieval_ranks.py holds the same functions against a slow
reference.
"""

from __future__ import annotations

import json
import os
import time

import numpy as np
from kept import keep

from vlp_models.metrics.retrieval import best_places, rank, score_ranks

IMAGES, CAPTIONS_EACH, DIMENSIONS, REPEATS = 1000, 5, 1024, 5


def main() -> None:
    rng = np.random.default_rng(0)
    images = rng.standard_normal((IMAGES, DIMENSIONS)).astype(np.float32)
    owners = np.repeat(np.arange(IMAGES), CAPTIONS_EACH)
    texts = images[owners] + 20 * rng.standard_normal((len(owners), DIMENSIONS)).astype(np.float32)
    images /= np.linalg.norm(images, axis=1, keepdims=True)
    texts /= np.linalg.norm(texts, axis=1, keepdims=True)
    names = [str(i) for i in range(IMAGES)]
    of = [names[owner] for owner in owners]

    seconds = []
    for _ in range(REPEATS):
        start = time.perf_counter()
        found = rank(names, images, of, texts)
        best_places(found.similarity_TI, 5)
        best_places(found.similarity_TI.T, 5)
        scores = score_ranks(found.text_ranks_T, of, IMAGES)
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
    keep("retrieval-cpu", result)


if __name__ == "__main__":
    main()
