"""Blocks that move from one memory into the prefix cache of another: which, where to, and nothing else."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from paxkv.init_cache import init_kv_cache
from paxkv.kv_format import scheme
from paxkv.memory import Ask, content
from paxkv.outcomes import Outcome
from paxkv.paged import Paged
from paxkv.prefix_cache import PrefixCache
from paxkv.transfer import check_transfers, find_blocks, pack, take_blocks, unpack
from paxkv.windows import Group

BLOCK, BLOCKS, WIDTH = 4, 9, 24
MEMORY = Paged(rows=2, max_len=WIDTH, block_size=BLOCK, num_blocks=BLOCKS, cache=PrefixCache())
PROMPT = jnp.arange(WIDTH, dtype=jnp.int32) % 7
OTHER = PROMPT + 1


@jax.jit
def stored(tokens, count, stays):
    """A memory in which somebody has computed `count` tokens in row 0, and has left or not."""
    state, _, _ = MEMORY.admit(MEMORY.init(), Ask(count, count, count, content(tokens)))
    zero = jnp.int32(0)
    state, _ = MEMORY.append(state, jnp.stack([count, zero]), WIDTH)
    state = MEMORY.publish(state, tokens, jnp.stack([zero, count, count]), WIDTH)
    return jax.lax.cond(stays, lambda s: s, lambda s: MEMORY.release(s, jnp.array([True, False])), state)


@jax.jit
def find(state, tokens, count):
    return find_blocks(MEMORY, state, content(tokens), count)


@jax.jit
def take(state, tokens, offered):
    return take_blocks(MEMORY, state, content(tokens), offered)


@functools.cache
def holding(tokens, count, stays=False):
    return stored({"prompt": PROMPT, "other": OTHER}[tokens], jnp.int32(count), jnp.bool(stays))


def found(state, count, tokens=PROMPT):
    ids, number = find(state, tokens, jnp.int32(count))
    ids = np.asarray(ids).tolist()
    assert ids[int(number) :] == [BLOCKS] * (len(ids) - int(number))
    return ids[: int(number)]


def test_the_source_finds_the_full_blocks_of_a_prompt_and_those_of_no_other():
    state = holding("prompt", 18)
    ids = found(state, 18)
    assert len(set(ids)) == 4
    assert [found(state, count) for count in (0, 3, 4, 11, 12, 24)] == [[], [], ids[:1], ids[:2], ids[:3], ids]
    assert found(state, 18, OTHER) == []


def test_what_is_there_stays_and_the_rest_gets_a_place_and_is_found_from_then_on():
    before = holding("prompt", 9)  # two full blocks
    there = found(before, 18)
    assert len(there) == 2
    after, taken = take(before, PROMPT, jnp.int32(4))
    places = np.asarray(taken.blocks).tolist()
    assert (int(taken.outcome), int(taken.there), int(taken.moved)) == (Outcome.OK, 2, 2)
    assert places[:2] == [BLOCKS] * 2
    assert places[4:] == [BLOCKS] * (len(places) - 4)
    assert len({*places[2:4], *there}) == 4
    assert found(after, WIDTH) == [*there, *places[2:4]]
    # Nobody holds them: they are as free as what a request leaves behind.
    assert not np.asarray(after.seqs.active).any()
    assert int(after.pool.num_free) == int(before.pool.num_free) == BLOCKS
    again, taken = take(after, PROMPT, jnp.int32(4))
    assert (int(taken.there), int(taken.moved)) == (4, 0)
    assert np.asarray(taken.blocks).tolist() == [BLOCKS] * len(places)
    assert found(again, WIDTH) == [*there, *places[2:4]]


REFUSED = [(4, Outcome.LATER), (6, Outcome.NEVER)]


@pytest.mark.parametrize(("offered", "outcome"), REFUSED)
def test_what_has_no_room_is_refused_and_changes_nothing(offered, outcome):
    before = holding("other", 22, True)  # three blocks are left; a sequence of six and one token is too long
    after, taken = take(before, PROMPT, jnp.int32(offered))
    assert (int(taken.outcome), int(taken.there), int(taken.moved)) == (outcome, 0, 0)
    assert set(np.asarray(taken.blocks).tolist()) == {BLOCKS}
    assert jax.tree.all(jax.tree.map(np.array_equal, before, after))
    after, taken = take(before, PROMPT, jnp.int32(2))  # that much fits
    assert (int(taken.outcome), int(taken.moved)) == (Outcome.OK, 2)
    assert len(found(after, WIDTH)) == 2
    assert len(found(after, 22, OTHER)) == 5


def filled(kv_format, blocks, seed):
    cache = init_kv_cache(2, blocks * BLOCK, 1, 4, scheme(kv_format), block_size=BLOCK)
    rng = np.random.default_rng(seed)
    return jax.tree.map(lambda x: jnp.asarray(rng.integers(1, 100, x.shape), jnp.float32).astype(x.dtype), cache)


def test_blocks_and_their_scales_arrive_as_they_were_and_nothing_else_changes():
    source, destination = (filled("e4m3_token_head", blocks, seed) for blocks, seed in ((9, 0), (9, 1)))
    ids, places = jnp.array([3, 8, 9, 0], jnp.int32), jnp.array([9, 7, 2, 4], jnp.int32)
    parcel = jax.jit(lambda cache: pack(MEMORY, cache, ids))(source)
    after = jax.jit(lambda cache, parcel: unpack(MEMORY, cache, parcel, places))(destination, parcel)
    for layer in range(2):
        assert int(parcel.layers[layer].clipped[0]) == 0
        np.testing.assert_array_equal(after.layers[layer].clipped, destination.layers[layer].clipped)
        for which in ("k", "v"):
            for part in ("data", "scales"):
                had, has, packed = (
                    np.asarray(getattr(getattr(cache.layers[layer], which), part), np.float32).reshape(
                        -1, BLOCK, 1, 4 if part == "data" else 1
                    )
                    for cache in (source, after, parcel)
                )
                expected = (
                    np.asarray(getattr(getattr(destination.layers[layer], which), part), np.float32)
                    .reshape(has.shape)
                    .copy()
                )
                np.testing.assert_array_equal(packed, [had[3], had[8], 0 * had[0], had[0]])
                expected[[7, 2, 4]] = packed[1:]
                np.testing.assert_array_equal(has, expected)
    with pytest.raises(ValueError, match="parcel: expected keys and values of the cache's format"):
        unpack(MEMORY, filled("f32", 9, 0), parcel, places)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"cache": None}, "memory.cache: expected a PrefixCache"),
        ({"groups": (Group(BLOCK, window=9),)}, "memory.groups: expected none where blocks are to move"),
        ({"groups": (Group(BLOCK), Group(BLOCK, window=9))}, "memory.groups: expected none where blocks are to move"),
    ],
)
def test_a_memory_that_cannot_name_its_blocks_is_refused(changes, message):
    knobs = {"rows": 2, "max_len": WIDTH, "block_size": BLOCK, "num_blocks": BLOCKS, "cache": PrefixCache()}
    check_transfers(Paged(**knobs))
    with pytest.raises(ValueError, match=message):
        check_transfers(Paged(**knobs | changes))
