"""One stream of random numbers per purpose, so that changing one thing leaves every other draw as it was."""

from typing import Literal, get_args

import numpy as np

StreamName = Literal["arrivals", "lengths", "tokens", "predictions"]
_STREAMS = get_args(StreamName)  # a stream is known by its place here: append, never reorder


def stream(seed: int, name: StreamName, *key: int) -> np.random.Generator:
    """The generator of one purpose under one seed.

    Args:
        seed: Seed of the experiment, >= 0.
        name: What the numbers are for.
        key: Sub-stream, such as a request's index: each has numbers of its own.

    Raises:
        ValueError: If the seed or a key is negative or the name is unknown.
    """
    if name not in _STREAMS:
        raise ValueError(f"name must be one of {', '.join(_STREAMS)}, got {name!r}")
    if seed < 0 or any(part < 0 for part in key):
        raise ValueError(f"seed and key must not be negative, got seed {seed}, key {key}")
    return np.random.default_rng(np.random.SeedSequence(seed, spawn_key=(_STREAMS.index(name), *key)))
