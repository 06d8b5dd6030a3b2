"""The yardstick of a byte-level model: an interpolated byte trigram model, fitted by counting.

Each order is smoothed towards the one below it as if `weight` more bytes, drawn from that lower order, had been
seen in every context: p_n(b | c) = (count(c b) + weight * p_{n-1}(b | c')) / (count(c) + weight), with p_0 uniform
(MacKay & Peto, "A hierarchical Dirichlet language model", 1995). The weights are chosen on a part of the training
text, so held-out text stays unseen.
"""

import dataclasses
import itertools

import numpy as np
from jaxtyping import Float, Int64

from models.text import VOCAB, Bytes

ORDER = 3
# Tried for every order.
WEIGHTS = (0.5, 2.0, 8.0, 32.0, 128.0, 512.0)
# What stands before the first byte of a text, so that every byte has two before it.
START = np.frombuffer(b"\n\n", np.uint8)


@dataclasses.dataclass(frozen=True)
class Trigram:
    """How often each run of 1, 2 and 3 bytes occurred, and how far each order leans on the one below."""

    counts: tuple[np.ndarray, ...]  # i64[VOCAB^order] for each order
    weights: tuple[float, ...]  # bytes, one for each order

    def nats(self, text: Bytes) -> Float[np.ndarray, " bytes"]:
        """Loss of every byte given the two before it, in nats."""
        return _nats([_look_up(counts, text) for counts in self.counts], self.weights)


def fit_trigram(text: Bytes) -> Trigram:
    """Chooses the weights by the loss on the last tenth of `text` under counts of the rest, then counts all."""
    cut = text.size - text.size // 10
    found = [_look_up(_count(text[:cut], order), text[cut:]) for order in range(1, ORDER + 1)]
    weights = min(itertools.product(WEIGHTS, repeat=ORDER), key=lambda w: _nats(found, w).sum())
    return Trigram(tuple(_count(text, order) for order in range(1, ORDER + 1)), weights)


def _count(text: Bytes, order: int) -> Int64[np.ndarray, " ngrams"]:
    return np.bincount(_ngrams(text, order), minlength=VOCAB**order)


def _look_up(
    counts: Int64[np.ndarray, " ngrams"], text: Bytes
) -> tuple[Int64[np.ndarray, " bytes"], Int64[np.ndarray, " bytes"]]:
    """For every byte of `text`: how often it followed its context, and how often anything did."""
    order = {VOCAB**n: n for n in range(1, ORDER + 1)}[counts.size]
    ngrams = _ngrams(text, order)
    return counts[ngrams], counts.reshape(-1, VOCAB).sum(axis=1)[ngrams // VOCAB]


def _ngrams(text: Bytes, order: int) -> Int64[np.ndarray, " bytes"]:
    """The n-gram that ends in each byte, as one number, its last byte lowest."""
    padded = np.concatenate([START, text]).astype(np.int64)
    start = START.size
    return np.sum([padded[start - back : padded.size - back] * VOCAB**back for back in range(order)], axis=0)


def _nats(
    found: list[tuple[Int64[np.ndarray, " bytes"], Int64[np.ndarray, " bytes"]]], weights: tuple[float, ...]
) -> Float[np.ndarray, " bytes"]:
    probability = np.full(found[0][0].shape, 1 / VOCAB)
    for (hits, total), weight in zip(found, weights, strict=True):
        probability = (hits + weight * probability) / (total + weight)
    return -np.log(probability)
