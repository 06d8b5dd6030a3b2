"""Sums and maxima of rates times counts, against Python's own integers."""

import random

import jax
import jax.numpy as jnp
import numpy as np

from paxkv.durations import TICK_PARTS, charge, longer, rounded_up, total

LIMIT = 2**31 * TICK_PARTS


def parts(duration):
    """Of each step, as one Python integer."""
    assert np.all((np.asarray(duration.parts) >= 0) & (np.asarray(duration.parts) < TICK_PARTS))
    pairs = zip(np.ravel(duration.ticks).tolist(), np.ravel(duration.parts).tolist(), strict=True)
    return [ticks * TICK_PARTS + rest for ticks, rest in pairs]


def drawn(rng):
    """A constant and three rates of any magnitude, each with counts of any magnitude that int32 ticks can say."""
    constant = rng.randrange(10 ** rng.randint(1, 16))
    rates = [rng.randrange(10 ** rng.randint(1, 16)) for _ in range(3)]
    most = [min(2**31 - 1, (LIMIT - 1 - constant) // 3 // max(rate, 1)) for rate in rates]
    counts = [[min(rng.randrange(2 ** rng.randint(1, 31)), top) for _ in range(40)] + [0, top] for top in most]
    return constant, rates, counts


def test_charges_are_exact_for_all_rates_and_counts_as_a_vector_and_one_by_one():
    rng = random.Random(1)
    for draw in range(60):
        constant, rates, counts = drawn(rng)
        arrays = [jnp.array(of_one, jnp.int32) for of_one in counts]
        found = charge(constant, *zip(rates, arrays, strict=True))
        exact = [constant + sum(r * n for r, n in zip(rates, step, strict=True)) for step in zip(*counts, strict=True)]
        assert parts(found) == exact
        assert rounded_up(found).tolist() == [-(-value // TICK_PARTS) for value in exact]
        if draw < 3:
            one = jax.jit(lambda counts, c=constant, r=tuple(rates): charge(c, *zip(r, counts, strict=True)))
            assert [parts(one([array[i] for array in arrays]))[0] for i in range(42)] == exact


def test_the_largest_count_times_the_largest_second_digits_does_not_wrap():
    most = jnp.int32(2**31 - 1)
    assert parts(charge(0, (99_999_999, most))) == [99_999_999 * (2**31 - 1)]
    assert parts(charge(0, (9_999, most))) == [9_999 * (2**31 - 1)]


def test_the_longer_and_the_total_are_those_of_exact_sums():
    rng = random.Random(2)
    one, other = ([rng.choice([3, 4]) * TICK_PARTS + rng.randrange(3) for _ in range(50)] for _ in range(2))
    digits = [np.array([divmod(value, TICK_PARTS) for value in values], np.int32).T for values in (one, other)]
    durations = [charge(0, (TICK_PARTS, jnp.array(ticks)), (1, jnp.array(rest))) for ticks, rest in digits]
    assert parts(longer(*durations)) == [max(pair) for pair in zip(one, other, strict=True)]
    nearly = charge(2 * TICK_PARTS - 1)
    assert parts(total(*[nearly] * 20)) == [20 * (2 * TICK_PARTS - 1)]
