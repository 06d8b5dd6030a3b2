"""Times inside of jit, exact and in integers of 32 bits: the same bits one by one, as a vector, on any machine.

A rate, what one unit of work takes, is a Python int of 1e-8 ticks. int32 holds only twenty ticks of these, so that
nothing is multiplied as such: rate and count are split into digits of base 10,000, as on paper.
"""

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Int32

TICK_PARTS = 10**8
"""Parts of a tick in which rates are given; with ticks of 10 microseconds a part is a tenth of a picosecond."""
_BASE = 10**4


class Duration(NamedTuple):
    """At least 0: `ticks + parts / TICK_PARTS`."""

    ticks: Int32[Array, "*steps"]
    parts: Int32[Array, "*steps"]  # 0 to TICK_PARTS - 1


def charge(constant: int, *rates: tuple[int, Int32[Array, "*steps"]]) -> Duration:
    """A constant, and a rate for each of a count, added up without rounding.

    Exact for all counts of 0 to 2**31 - 1, up to 19 of them, whose sum is less than 2**31 ticks.

    Args:
      constant: in parts of a tick.
      rates: parts of a tick, each with the count that it is paid for.
    """
    whole, rest = divmod(constant, TICK_PARTS)
    ticks, high, low = jnp.int32(whole), jnp.int32(rest // _BASE), jnp.int32(rest % _BASE)
    for rate, count in rates:
        whole, rest = divmod(rate, TICK_PARTS)
        first, second = divmod(rest, _BASE)
        tens, ones = count // _BASE, count % _BASE
        ticks += whole * count + first * tens
        high += first * ones
        if second:
            high += second * tens % _BASE + second * ones // _BASE
            ticks += second * tens // _BASE
            low += second * ones % _BASE
    high += low // _BASE
    return Duration(ticks + high // _BASE, high % _BASE * _BASE + low % _BASE)


def longer(one: Duration, other: Duration) -> Duration:
    """The longer of two, elementwise."""
    wins = (one.ticks > other.ticks) | ((one.ticks == other.ticks) & (one.parts > other.parts))
    return Duration(jnp.where(wins, one.ticks, other.ticks), jnp.where(wins, one.parts, other.parts))


def total(*durations: Duration) -> Duration:
    """One after another; up to 20 of them."""
    ticks = sum((duration.ticks for duration in durations), start=jnp.int32(0))
    parts = sum((duration.parts for duration in durations), start=jnp.int32(0))
    return Duration(ticks + parts // TICK_PARTS, parts % TICK_PARTS)


def rounded_up(duration: Duration) -> Int32[Array, "*steps"]:
    """In whole ticks."""
    return duration.ticks + (duration.parts + (TICK_PARTS - 1)) // TICK_PARTS
