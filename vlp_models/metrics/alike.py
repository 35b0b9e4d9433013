"""Of several captions of one image the one that is most like the others: minimum Bayes risk.

S. Kumar, W. Byrne: "Minimum Bayes-Risk Decoding for Statistical Machine Translation" (2004). Of captions drawn from a
model, the one with the highest mean likeness to the others has the highest expected likeness to a reference, as far as
people write as the model does. The likeliest caption, which a beam looks for, is often short and general.

Likeness is CIDEr-D (metrics/cider_d.py) with every n-gram weighed alike: a model that is served has no corpus to count
them in.
"""

from __future__ import annotations

from collections.abc import Sequence

from vlp_models.metrics.cider_d import CiderD, DocumentFrequencies, Words

_ALIKE = DocumentFrequencies(images=3, words={}, counts={})  # all n-grams unseen, so of one weight, log 3


def most_alike(captions: Sequence[Words]) -> int:
    """The place of the caption with the highest mean likeness to all of them; the first of equals.

    Args:
        captions: of one image, split into words; at least one. Its likeness to itself is the same for each of four
            words or more, and less for shorter ones.
    """
    return int(CiderD(_ALIKE, lambda image: captions).score("", captions).argmax())
