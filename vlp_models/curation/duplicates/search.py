"""Pictures that are tested on, held against any number of others: which of those are copies of them.

Cheap stages propose, one verifies (alignment.py). Proposals come from the perceptual hash, of the held picture in each
of the 8 ways to lay it down, and from shared keypoints, of the held picture and its mirrored one. The held side is in
memory (about 60 kB a picture, with what finds it); the others come in batches and leave nothing behind.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from vlp_models.curation.duplicates.alignment import Agreement, by_keypoints, by_turn
from vlp_models.curation.duplicates.keypoints import BYTES
from vlp_models.curation.duplicates.near import NearHashes
from vlp_models.curation.duplicates.perceptual import grey_of, hash_of_grey
from vlp_models.curation.duplicates.prints import TURNS, Print
from vlp_models.curation.duplicates.votes import Votes

VOTES = 8  # shared keypoints, below which a proposal is not looked at
PROPOSALS = 3  # held pictures looked at for each other one, those that share most
Wanted = Callable[[int, int], bool]  # of a number within the batch and one within the held side
_MIRRORED = ("", "mirrored")
_TURNS = ("", "turned by 90 degrees", "turned by 180 degrees", "turned by 270 degrees")


@dataclass(frozen=True, kw_only=True)
class NearRules:
    """bits: of 64 perceptual bits that may differ in what is looked at; -1: hashes propose nothing."""

    bits: int
    keypoints: bool


@dataclass(frozen=True, kw_only=True)
class Match:
    """held, other: numbers within the held side and within the batch. how: for people."""

    held: int
    other: int
    how: str
    agreement: Agreement


class NearPictures:
    """The held side."""

    def __init__(self, held: Sequence[Print], rules: NearRules) -> None:
        self._held = held
        self._rules = rules
        hashes, self._turns = [], []
        for number, print_ in enumerate(held):
            for turn in range(TURNS):
                found = hash_of_grey(grey_of(print_.turned(turn)))
                if found is not None:
                    hashes.append(found)
                    self._turns.append((number, turn))
        self._hashes = NearHashes(np.array(hashes, np.uint64), rules.bits) if rules.bits >= 0 and hashes else None
        views = [view for print_ in held for view in (print_.keypoints, print_.mirror)]
        owners = np.repeat(np.arange(len(views)), [len(view) for view in views])
        self._votes = (
            Votes(_stack(view.descriptors_KB for view in views), owners) if rules.keypoints and len(owners) else None
        )

    def matches(self, others: Sequence[Print], wanted: Wanted = lambda other, held: True) -> list[Match]:
        """The held pictures that each of `others` is a copy of; itself as well, if it is held.

        Args:
            wanted: which pairs are looked at, by their numbers.
        """
        found: dict[tuple[int, int], Match] = {}
        for other, held, turn in self._by_hash(others):
            if (other, held) in found or not wanted(other, held):
                continue
            if agreement := by_turn(self._held[held], turn, others[other]):
                how = " and ".join(filter(None, (_MIRRORED[turn // 4], _TURNS[turn % 4]))) or "hardly changed"
                found[other, held] = Match(held=held, other=other, how=how, agreement=agreement)
        for other, view in self._by_votes(others):
            held, mirror = divmod(view, 2)
            if (other, held) in found or not wanted(other, held):
                continue
            if agreement := by_keypoints(self._held[held], bool(mirror), others[other]):
                how = "mirrored and changed" if mirror else "changed"
                found[other, held] = Match(held=held, other=other, how=how, agreement=agreement)
        return sorted(found.values(), key=lambda match: (match.other, match.held))

    def _by_hash(self, others: Sequence[Print]) -> list[tuple[int, int, int]]:
        if self._hashes is None:
            return []
        asked = [(number, print_.perceptual) for number, print_ in enumerate(others) if print_.perceptual is not None]
        pairs = self._hashes.pairs(np.array([value for _, value in asked], np.uint64))
        found = {(asked[a][0], *self._turns[h]) for theirs, ours in pairs for a, h in zip(theirs, ours, strict=True)}
        return sorted(found)

    def _by_votes(self, others: Sequence[Print]) -> list[tuple[int, int]]:
        """(other, view), the views that share most first."""
        if self._votes is None:
            return []
        owners = np.repeat(np.arange(len(others)), [len(print_.keypoints) for print_ in others])
        descriptors = _stack(print_.keypoints.descriptors_KB for print_ in others)
        counts = self._votes.count(descriptors, owners)
        others_P, views_P, votes_P = (part[counts[2] >= VOTES] for part in counts)
        order = np.lexsort((views_P, -votes_P, others_P))
        others_P, views_P = others_P[order], views_P[order]
        first = np.arange(len(order)) - np.searchsorted(others_P, others_P) < PROPOSALS
        return list(zip(others_P[first].tolist(), views_P[first].tolist(), strict=True))


def _stack(parts: Iterable[np.ndarray]) -> np.ndarray:
    return np.concatenate([np.zeros((0, BYTES), np.uint8), *parts])
