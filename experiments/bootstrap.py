"""How sure a mean over few seeds is: percentile bootstrap, the same for the same numbers."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np


class Interval(NamedTuple):
    """A mean and where it would lie if the seeds were drawn again."""

    mean: float
    low: float
    high: float


def mean_interval(
    values: Sequence[float], *, confidence: float = 0.95, resamples: int = 10_000, seed: int = 0
) -> Interval:
    """The mean over seeds, with the middle share of the means of so many draws with replacement.

    Args:
      values: one a seed, at least two.
      confidence: that share, between 0 and 1.
      resamples: draws.
      seed: of the draws.

    Raises:
      ValueError: there are fewer than two values, one is no finite number, or an argument is out of range.
    """
    sample = np.asarray(values, np.float64)
    if sample.ndim != 1 or len(sample) < 2 or not np.isfinite(sample).all():
        raise ValueError(f"values: expected at least two finite numbers, one a seed, got {values!r}")
    if not 0 < confidence < 1:
        raise ValueError(f"confidence: expected a number between 0 and 1, got {confidence}")
    if resamples < 1:
        raise ValueError(f"resamples: expected at least 1, got {resamples}")
    drawn = np.random.default_rng(seed).integers(len(sample), size=(resamples, len(sample)))
    low, high = np.quantile(sample[drawn].mean(axis=1), [(1 - confidence) / 2, (1 + confidence) / 2])
    return Interval(float(sample.mean()), float(low), float(high))


def difference_interval(
    ours: Sequence[float],
    theirs: Sequence[float],
    *,
    confidence: float = 0.95,
    resamples: int = 10_000,
    seed: int = 0,
) -> Interval:
    """The mean of `ours - theirs`, seed by seed: what both have from a seed is not counted as doubt.

    Args:
      ours: one a seed.
      theirs: of the same seeds in the same order.
      confidence: as for `mean_interval`; likewise the others.
      resamples: draws.
      seed: of the draws.

    Raises:
      ValueError: the two are not equally many, or as for `mean_interval`.
    """
    if len(ours) != len(theirs):
        raise ValueError(f"theirs: expected {len(ours)} values, one for each of ours, got {len(theirs)}")
    differences = [one - other for one, other in zip(ours, theirs, strict=True)]
    return mean_interval(differences, confidence=confidence, resamples=resamples, seed=seed)
