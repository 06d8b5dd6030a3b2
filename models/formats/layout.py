"""How a weight lies in a file and how it lies in our model, written as one line such as `(n h) d -> d n h`.

Left is the file's side, right is ours. Letters are axes; those in brackets are stored as one axis, the first outermost.
A line is read in both directions, and for a part of the model's weight it says which part of the file to read.
"""

import functools
import math
from collections.abc import Callable, Mapping

import numpy as np

from models.config import DecoderConfig

Axes = tuple[tuple[str, ...], ...]  # of an array: the letters of each
Sizes = Mapping[str, int]  # of each letter
Index = tuple[slice, ...]
Read = Callable[[Index], np.ndarray]  # the part of a stored tensor at an index


def axis_sizes(config: DecoderConfig) -> Sizes:
    """What each letter stands for in a model of this shape."""
    return {
        "v": config.vocab,
        "d": config.width,
        "f": config.ffn,
        "n": config.q_heads,
        "m": config.kv_heads,
        "h": config.head_dim,
        # RoPE turns pairs: h is (p i) with halves apart, and (i p) where the two of a pair are neighbours.
        "i": config.head_dim // 2,
        "p": 2,
    }


def stored_shape(layout: str, sizes: Sizes) -> tuple[int, ...]:
    """The shape on the file's side."""
    return _shape(_parse(layout)[0], sizes)


def to_stored(layout: str, sizes: Sizes, weight: np.ndarray) -> np.ndarray:
    """Our weight as the file has it."""
    stored, ours = _parse(layout)
    return _rearrange(weight, ours, stored, sizes)


def read_part(layout: str, sizes: Sizes, read: Read, index: Index) -> np.ndarray:
    """The part at `index` of our weight; reads no more of the file than it must, up to whole heads.

    Args:
      layout: of the weight.
      sizes: of its axes.
      read: gives the part of the stored tensor at an index of its own axes.
      index: of our weight, a slice of step 1 for each axis.
    """
    stored, ours = _parse(layout)
    shape = _shape(ours, sizes)
    wanted = dict(zip(ours, (slice(*part.indices(size)) for part, size in zip(index, shape, strict=True)), strict=True))
    # Of a stored axis, the outermost letter can be cut before it is read, if it is an axis of its own in our weight.
    cuts = [wanted.get((letters[0],), slice(0, sizes[letters[0]])) for letters in stored]
    inner = [math.prod(sizes[letter] for letter in letters[1:]) for letters in stored]
    part = read(tuple(slice(cut.start * n, cut.stop * n) for cut, n in zip(cuts, inner, strict=True)))
    cut_letters = {letters[0]: cut.stop - cut.start for letters, cut in zip(stored, cuts, strict=True)}
    part = _rearrange(part, stored, ours, {**sizes, **cut_letters})
    first = {letters[0] for letters in stored}
    return part[tuple(slice(None) if set(axis) <= first and len(axis) == 1 else wanted[axis] for axis in ours)]


def _rearrange(array: np.ndarray, source: Axes, target: Axes, sizes: Sizes) -> np.ndarray:
    letters = [letter for axis in source for letter in axis]
    order = [letters.index(letter) for axis in target for letter in axis]
    split = array.reshape([sizes[letter] for letter in letters])
    return split.transpose(order).reshape(_shape(target, sizes))


def _shape(axes: Axes, sizes: Sizes) -> tuple[int, ...]:
    return tuple(math.prod(sizes[letter] for letter in axis) for axis in axes)


@functools.cache
def _parse(layout: str) -> tuple[Axes, Axes]:
    stored, ours = (_parse_side(side) for side in layout.split("->"))
    return stored, ours


def _parse_side(side: str) -> Axes:
    axes: list[tuple[str, ...]] = []
    group: list[str] | None = None
    for letter in side.replace(" ", ""):
        if letter == "(":
            group = []
        elif letter == ")":
            axes.append(tuple(group or ()))
            group = None
        elif group is None:
            axes.append((letter,))
        else:
            group.append(letter)
    return tuple(axes)
