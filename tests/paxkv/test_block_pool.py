"""The free queue: order at both ends, refusal, and everything that must not be given back."""

import collections
import functools
import random

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from paxkv import block_pool
from paxkv.block_pool import (
    BlockPool,
    give_back,
    init_block_pool,
    is_free,
    look_at,
    mark_kept,
    may_have_content,
    retain,
    take,
)

QUICKLY = {"xla_backend_optimization_level": 0}  # compiling takes longer than all the tests run
TAKE = jax.jit(take, compiler_options=QUICKLY)
GIVE_BACK = jax.jit(give_back, static_argnames=("distinct", "kept_to_back"), compiler_options=QUICKLY)
MARK_KEPT = jax.jit(mark_kept, static_argnums=2)
RETAIN = jax.jit(retain, static_argnames="distinct", compiler_options=QUICKLY)
NUM_BLOCKS = 7
WIDTH = 9  # places in a call: more than there are blocks


def places(*ids: int, num_blocks: int = NUM_BLOCKS, width: int = WIDTH) -> jax.Array:
    """Ids at the front, the sentinel behind them."""
    return jnp.asarray(np.array([*ids, *[num_blocks] * (width - len(ids))], np.int32))


def mask(*values: bool, width: int = WIDTH) -> jax.Array:
    return jnp.asarray(np.array([*values, *[False] * (width - len(values))], bool))


def wanted(count: int, width: int = WIDTH) -> jax.Array:
    return jnp.arange(width) < count


def free_list(pool: BlockPool) -> list[int]:
    """Next to be taken first."""
    queue = np.asarray(pool.queue)[int(pool.head) : int(pool.tail)].tolist()
    return [block for block in queue if block != pool.num_blocks]


def seen(pool: BlockPool) -> tuple:
    assert int(pool.num_free) == len(free_list(pool))
    return free_list(pool), np.asarray(pool.ref_counts).tolist()


def taken(count: int) -> BlockPool:
    pool, _, ok = TAKE(init_block_pool(NUM_BLOCKS), wanted(count))
    assert bool(ok)
    return pool


def require_same(before: BlockPool, after: BlockPool) -> None:
    for old, new in zip(jax.tree.leaves(before), jax.tree.leaves(after), strict=True):
        np.testing.assert_array_equal(new, old)


def test_blocks_are_taken_in_ascending_order_and_only_where_wanted():
    places_wanted = jnp.asarray([True, False, True, False, False, True, False, False, False])
    pool, ids, ok = TAKE(init_block_pool(NUM_BLOCKS), places_wanted)
    assert bool(ok)
    assert np.asarray(ids).tolist() == [0, 7, 1, 7, 7, 2, 7, 7, 7]
    assert seen(pool) == ([3, 4, 5, 6], [1, 1, 1, 0, 0, 0, 0])


def test_the_last_block_can_be_taken():
    pool, ids, ok = TAKE(taken(6), wanted(1))
    assert (bool(ok), int(ids[0]), int(pool.num_free)) == (True, 6, 0)


def test_taking_one_block_too_many_takes_none():
    before = taken(5)
    pool, ids, ok = TAKE(before, wanted(3))
    assert not bool(ok)
    assert np.asarray(ids).tolist() == [NUM_BLOCKS] * WIDTH
    require_same(before, pool)


# ---- the front, the back, and leaving from the middle --------------------------------------------------------------


def test_the_last_block_given_back_is_the_first_taken_again():
    pool, ok = GIVE_BACK(taken(5), places(1, 4, 0))
    assert bool(ok)
    assert free_list(pool) == [0, 4, 1, 5, 6]
    _, ids, _ = TAKE(pool, wanted(4))
    assert np.asarray(ids)[:4].tolist() == [0, 4, 1, 5]


def test_blocks_that_join_the_back_are_taken_last_and_the_one_listed_last_before_the_others():
    pool, ok = GIVE_BACK(taken(5), places(1, 4, 0), mask(True, True, True))
    assert bool(ok)
    assert free_list(pool) == [5, 6, 0, 4, 1]
    _, ids, _ = TAKE(pool, wanted(4))
    assert np.asarray(ids)[:4].tolist() == [5, 6, 0, 4]


def test_one_call_can_join_both_ends():
    pool, ok = GIVE_BACK(taken(6), places(3, 1, 4, 0, 2), mask(True, False, True, False, False))
    assert bool(ok)
    assert free_list(pool) == [2, 0, 1, 6, 4, 3]


def test_a_free_block_that_is_wanted_again_leaves_the_queue_wherever_it_stands():
    pool, _ = GIVE_BACK(taken(5), places(0, 1, 2), mask(True, True))
    assert free_list(pool) == [2, 5, 6, 1, 0]
    pool = RETAIN(pool, places(6, 0))
    assert seen(pool) == ([2, 5, 1], [1, 0, 0, 1, 1, 0, 1])
    pool, ids, ok = TAKE(pool, wanted(3))  # over both holes
    assert (bool(ok), np.asarray(ids)[:3].tolist()) == (True, [2, 5, 1])
    assert not bool(TAKE(pool, wanted(1))[2])


def test_the_front_looks_past_more_holes_than_a_call_takes_blocks():
    pool = RETAIN(init_block_pool(NUM_BLOCKS), places(0, 1, 2, 3, 5))
    one = jnp.ones(1, jnp.bool)
    pool, ids, ok = TAKE(pool, one)
    assert (bool(ok), int(ids[0]), free_list(pool)) == (True, 4, [6])
    pool, ids, ok = TAKE(pool, one)
    assert (bool(ok), int(ids[0]), free_list(pool)) == (True, 6, [])


# ---- references ----------------------------------------------------------------------------------------------------


def test_a_block_is_freed_with_its_last_reference():
    pool = RETAIN(RETAIN(taken(3), places(1)), places(1))
    for left in (2, 1):
        pool, ok = GIVE_BACK(pool, places(1))
        assert bool(ok)
        assert (int(pool.ref_counts[1]), free_list(pool)) == (left, [3, 4, 5, 6])
    pool, ok = GIVE_BACK(pool, places(1))
    assert bool(ok)
    assert (int(pool.ref_counts[1]), free_list(pool)) == (0, [1, 3, 4, 5, 6])


def test_a_block_that_is_listed_several_times_has_as_many_references_more_or_less():
    pool = RETAIN(taken(2), places(0, 4, 0, 4, 0))
    assert seen(pool) == ([2, 3, 5, 6], [4, 1, 0, 0, 2, 0, 0])
    pool, ok = GIVE_BACK(pool, places(0, 1, 4, 0))
    assert bool(ok)
    assert seen(pool) == ([1, 2, 3, 5, 6], [2, 0, 0, 0, 1, 0, 0])


def test_a_block_joins_where_it_was_listed_last():
    pool = RETAIN(taken(4), places(0))
    pool, ok = GIVE_BACK(pool, places(0, 1, 2, 0, 3), mask(False, False, False, True, False))
    assert bool(ok)
    assert free_list(pool) == [3, 2, 1, 4, 5, 6, 0]


def test_blocks_that_are_known_to_be_distinct_are_treated_alike():
    pool = RETAIN(taken(4), places(0, 5), distinct=True)
    require_same(RETAIN(taken(4), places(0, 5)), pool)
    back = places(0, 3, 5), mask(False, True, True)
    given, ok = GIVE_BACK(pool, *back, distinct=True)
    assert bool(ok)
    require_same(GIVE_BACK(pool, *back)[0], given)


def test_sentinels_are_places_with_nothing_to_retain_or_give_back():
    apart = jnp.asarray(np.array([7, 2, 7, 7, 0, 7, 7, 7, 7], np.int32))
    pool = RETAIN(taken(3), apart)
    assert seen(pool) == ([3, 4, 5, 6], [2, 1, 2, 0, 0, 0, 0])
    require_same(pool, RETAIN(pool, places()))
    pool, ok = GIVE_BACK(GIVE_BACK(pool, apart)[0], apart)
    assert bool(ok)
    assert free_list(pool) == [0, 2, 3, 4, 5, 6]


# ---- blocks worth keeping ------------------------------------------------------------------------------------------


def test_blocks_worth_keeping_join_the_back_where_asked_to_and_the_others_the_front():
    pool = MARK_KEPT(taken(5), places(1, 4, NUM_BLOCKS), True)
    pool, ok = GIVE_BACK(pool, places(0, 1, 2, 4), kept_to_back=True)
    assert bool(ok)
    assert free_list(pool) == [2, 0, 5, 6, 4, 1]
    plain, _ = GIVE_BACK(MARK_KEPT(taken(5), places(1, 4), True), places(0, 1, 2, 4))
    assert free_list(plain) == [4, 2, 1, 0, 5, 6]


def test_a_block_stays_worth_keeping_until_it_is_taken_or_said_not_to_be():
    kept = jax.jit(lambda pool: look_at(pool, jnp.arange(NUM_BLOCKS, dtype=jnp.int32)).kept)
    pool = MARK_KEPT(taken(5), places(1, 2, 4), True)
    pool = MARK_KEPT(pool, places(2), False)
    pool, _ = GIVE_BACK(pool, places(1, 2, 4), kept_to_back=True)
    pool = RETAIN(pool, places(1))  # found in the queue, and given back again
    assert np.asarray(kept(pool)).tolist() == [0, 1, 0, 0, 1, 0, 0]
    pool, _ = GIVE_BACK(pool, places(1), kept_to_back=True)
    assert free_list(pool) == [2, 5, 6, 4, 1]
    pool, ids, _ = TAKE(pool, wanted(4))
    assert np.asarray(ids)[:4].tolist() == [2, 5, 6, 4]
    assert np.asarray(kept(pool)).tolist() == [0, 1, 0, 0, 0, 0, 0]


# ---- refusal -------------------------------------------------------------------------------------------------------


WRONG = [
    pytest.param([0, 1, 5], id="a block that is free"),
    pytest.param([0, -1], id="a negative id"),
    pytest.param([0, NUM_BLOCKS + 1], id="an id beyond the sentinel"),
    pytest.param([0, -NUM_BLOCKS], id="an id that would wrap round to the first block"),
    pytest.param([0, 2**31 - 1], id="the largest id"),
]
TOO_OFTEN = [
    pytest.param([2, 2], id="the same block twice"),
    pytest.param([1, 2, 0, 1], id="a block too often among others"),
    pytest.param([0, 1, 0, 2, 0], id="a shared block too often"),
]


@pytest.mark.parametrize(
    ("ids", "distinct"),
    [
        *(pytest.param(*case.values, False, id=case.id) for case in WRONG + TOO_OFTEN),
        *(pytest.param(*case.values, True, id=f"{case.id}, all distinct") for case in WRONG),
    ],
)
def test_a_wrong_id_refuses_the_whole_call(ids, distinct):
    before = RETAIN(taken(3), places(0))
    pool, ok = GIVE_BACK(before, places(*ids), mask(True, False, True), distinct=distinct)
    assert not bool(ok)
    require_same(before, pool)
    pool, ok = GIVE_BACK(pool, places(0, 1, 2, 0))  # and the pool still works
    assert bool(ok)
    assert free_list(pool) == [0, 2, 1, 3, 4, 5, 6]


def test_giving_back_twice_is_refused_the_second_time():
    pool, ok = GIVE_BACK(taken(3), places(1))
    assert bool(ok)
    again, ok = GIVE_BACK(pool, places(1))
    assert not bool(ok)
    assert seen(again) == seen(pool)


def test_a_block_that_is_not_of_the_pool_is_not_free():
    asked = jnp.asarray(np.array([0, 6, 7, 8, -1, -7], np.int32))
    assert np.asarray(is_free(taken(1), asked)).tolist() == [False, True, False, False, False, False]


def test_a_held_block_is_not_free_though_its_old_place_is_taken_by_another():
    pool, _ = GIVE_BACK(taken(2), places(1))  # now stands where block 1 stood, and block 0 before it
    pool, _, _ = TAKE(pool, wanted(1))
    pool, _ = GIVE_BACK(pool, places(0))
    assert np.asarray(is_free(pool, jnp.arange(3, dtype=jnp.int32))).tolist() == [True, False, True]
    place = np.asarray(look_at(pool, jnp.asarray([0], jnp.int32))[0])
    assert int(pool.queue[place[0]]) == 0


# ---- ranking -------------------------------------------------------------------------------------------------------


def ranks(**of: int) -> jax.Array:
    rank = np.zeros(NUM_BLOCKS, np.int32)
    for name, value in of.items():
        rank[int(name[1:])] = value
    return jnp.asarray(rank)


def test_blocks_of_lower_rank_are_taken_first_and_equal_ones_in_the_order_of_the_queue():
    pool, _ = GIVE_BACK(taken(3), places(0, 2, 1))
    assert free_list(pool) == [1, 2, 0, 3, 4, 5, 6]
    pool, ids, ok = TAKE(pool, wanted(4), ranks(_1=2, _2=-1, _0=2, _3=5, _4=2, _5=-1, _6=-(2**31)))
    assert bool(ok)
    assert np.asarray(ids)[:4].tolist() == [6, 2, 5, 1]
    assert free_list(pool) == [0, 3, 4]
    pool, ids, _ = TAKE(pool, wanted(2))  # the queue has holes now, and keeps its order
    assert np.asarray(ids)[:2].tolist() == [0, 3]


def test_ranked_taking_refuses_like_any_other_and_never_gives_a_held_block():
    before = taken(5)
    pool, ids, ok = TAKE(before, wanted(3), ranks(_0=-9, _5=9))
    assert not bool(ok)
    assert np.asarray(ids).tolist() == [NUM_BLOCKS] * WIDTH
    require_same(before, pool)
    assert np.asarray(TAKE(before, wanted(2), ranks(_0=-9, _5=9))[1])[:2].tolist() == [6, 5]


# ---- against a deque and a counter ---------------------------------------------------------------------------------


class PlainPool:
    """A deque, searched from its start, and a count for each block."""

    def __init__(self, num_blocks: int):
        self.free = collections.deque(range(num_blocks))
        self.references = [0] * num_blocks
        self.joined_back: set[int] = set()

    def take(self, count: int, rank: list[int] | None) -> list[int] | None:
        if count > len(self.free):
            return None
        ids = []
        for _ in range(count):
            block = self.free[0] if rank is None else min(self.free, key=lambda b: rank[b])
            self.free.remove(block)
            self.references[block] = 1
            ids.append(block)
        return ids

    def retain(self, ids: list[int]) -> None:
        for block in ids:
            if self.references[block] == 0:
                self.free.remove(block)
            self.references[block] += 1

    def give_back(self, ids: list[int], to_back: list[bool]) -> bool:
        if any(count > self.references[block] for block, count in collections.Counter(ids).items()):
            return False
        behind = []
        for place, block in enumerate(ids):
            self.references[block] -= 1
            if self.references[block] == 0:
                self.joined_back.discard(block)
                if to_back[place]:
                    behind.append(block)
                else:
                    self.free.appendleft(block)
        self.free.extend(reversed(behind))
        self.joined_back.update(behind)
        return True


@functools.cache
def operations(num_blocks: int, width: int) -> dict:
    pool, ids, flags = init_block_pool(num_blocks), jnp.zeros(width, jnp.int32), jnp.zeros(width, jnp.bool)
    known = {
        "take": (lambda pool, wanted: take(pool, wanted), (pool, flags)),
        "take_ranked": (take, (pool, flags, jnp.zeros(num_blocks, jnp.int32))),
        "retain": (lambda pool, ids: retain(pool, ids), (pool, ids)),
        "give_back": (lambda pool, ids, to_back: give_back(pool, ids, to_back), (pool, ids, flags)),
        "may_have_content": (may_have_content, (pool, pool)),
    }
    return {name: jax.jit(f).lower(*of).compile(QUICKLY) for name, (f, of) in known.items()}


def play(num_blocks: int, width: int, seed: int, steps: int) -> None:
    rng = random.Random(seed)
    compiled = operations(num_blocks, width)
    pool, plain = init_block_pool(num_blocks), PlainPool(num_blocks)
    padded = functools.partial(places, num_blocks=num_blocks, width=width)
    for _ in range(steps):
        held = [block for block in range(num_blocks) if plain.references[block]]
        before, kind = pool, rng.choice(["take", "take", "take_ranked", "retain", "give", "give", "back", "wrong"])
        if kind.startswith("take"):
            count = rng.randint(0, min(width, num_blocks))
            rank = [rng.randint(-2, 2) for _ in range(num_blocks)] if kind == "take_ranked" else None
            taken_behind = plain.joined_back.intersection(list(plain.free)[:count])
            expected = plain.take(count, rank)
            asked = wanted(count, width), *([] if rank is None else [jnp.asarray(np.array(rank, np.int32))])
            pool, ids, ok = compiled[kind](pool, *asked)
            assert bool(ok) == (expected is not None)
            assert np.asarray(ids).tolist() == np.asarray(padded(*(expected or []))).tolist()
            if kind == "take" and expected is not None and taken_behind:
                assert bool(compiled["may_have_content"](before, pool))
        elif kind == "retain":
            ids = [rng.randrange(num_blocks) for _ in range(rng.randint(0, width))]
            plain.retain(ids)
            pool = compiled["retain"](pool, padded(*ids))
        else:
            references = [block for block in held for _ in range(plain.references[block])]
            ids = rng.sample(references, rng.randint(0, min(width - 1, len(references))))
            if kind == "wrong":
                ids.append(rng.randrange(num_blocks))
            to_back = [kind == "back" or rng.random() < 0.3 for _ in ids]
            expected = plain.give_back(ids, to_back)
            pool, ok = compiled["give_back"](pool, padded(*ids), mask(*to_back, width=width))
            assert bool(ok) == expected
            if not expected:
                assert seen(pool) == seen(before)
        assert seen(pool) == (list(plain.free), plain.references)
    assert (np.asarray(pool.marks[:, 1]) >= 0).all()


# Pools that are smaller and larger than what is asked of them in a call.
SIZES = pytest.mark.parametrize(("num_blocks", "width"), [(1, 1), (2, 5), (5, 3), (7, 7)])


@SIZES
def test_random_operations_agree_with_a_deque_and_a_count(num_blocks, width):
    play(num_blocks, width, seed=num_blocks, steps=250)


def test_random_operations_agree_when_the_queue_moves_in_small_windows(monkeypatch):
    """The queue of a large pool moves a window at a time; here a window is smaller than the pool."""
    monkeypatch.setattr(block_pool, "_WINDOW", 3)
    play(11, 7, seed=0, steps=250)  # no other test compiles a pool of this size


# ---- room on both sides --------------------------------------------------------------------------------------------


HELD = [-1, 2, 1]  # marks of a block with three references that is worth keeping


def with_queue(num_blocks: int, head: int, ids: list[int], behind: int) -> BlockPool:
    """A pool whose queue begins at `head` with these ids and holes; the other blocks are held, and rubbish is left."""
    queue = np.arange(3 * num_blocks, dtype=np.int32) % num_blocks
    queue[head : head + len(ids)] = ids
    marks = np.tile(np.array([HELD], np.int32), (num_blocks, 1))
    for place, block in enumerate(ids):
        if block < num_blocks:
            marks[block, 0] = head + place
    num_free = sum(block < num_blocks for block in ids)
    numbers = (jnp.int32(n) for n in (head, head + len(ids), head + behind, num_free))
    return BlockPool(jnp.asarray(queue), *numbers, jnp.asarray(marks))


@pytest.mark.parametrize(
    ("num_blocks", "window"), [(1, 1024), (2, 1), (3, 2), (4, 1024), (5, 2), (5, 3), (13, 4), (13, 1024)]
)
def test_moving_to_the_middle_keeps_order_and_places_and_closes_holes(num_blocks, window, monkeypatch):
    monkeypatch.setattr(block_pool, "_WINDOW", window)
    rng = random.Random(100 * num_blocks + window)
    cases, expected = [], []
    for _ in range(60):
        free = rng.sample(range(num_blocks), rng.randint(0, num_blocks))
        span = free + [num_blocks] * rng.randint(0, 2 * num_blocks)
        rng.shuffle(span)
        head = rng.choice([0, 3 * num_blocks - len(span), rng.randint(0, 3 * num_blocks - len(span))])
        behind = rng.randint(0, len(span))
        cases.append(with_queue(num_blocks, head, span, behind))
        order = [block for block in span if block != num_blocks]
        expected.append((order, sum(block != num_blocks for block in span[:behind])))
    together = jax.tree.map(lambda *leaves: jnp.stack(leaves), *cases)
    moved = jax.tree.map(np.asarray, jax.jit(jax.vmap(block_pool._recentre), compiler_options=QUICKLY)(together))
    for i, (order, in_front) in enumerate(expected):
        pool = jax.tree.map(lambda leaf, i=i: leaf[i], moved)
        assert pool.queue[num_blocks : num_blocks + len(order)].tolist() == order
        numbers = (num_blocks, num_blocks + len(order), len(order))
        assert (int(pool.head), int(pool.tail), int(pool.num_free)) == numbers
        assert int(pool.behind) == num_blocks + in_front
        for place, block in enumerate(order):
            assert pool.marks[block, 0] == num_blocks + place
        held = sorted(set(range(num_blocks)) - set(order))
        np.testing.assert_array_equal(pool.marks[held], np.tile([HELD], (len(held), 1)))


@pytest.mark.parametrize("to_back", [False, True])
@SIZES
def test_any_number_of_blocks_joins_at_one_end(num_blocks, width, to_back):
    """Far more than the array has room for: all blocks go round several times, by one and by many."""
    compiled = operations(num_blocks, width)
    pool, plain = init_block_pool(num_blocks), PlainPool(num_blocks)
    for count in [1] * (4 * num_blocks) + [min(num_blocks, width)] * 8:
        expected = plain.take(count, None)
        pool, ids, ok = compiled["take"](pool, wanted(count, width))
        assert (bool(ok), np.asarray(ids)[:count].tolist()) == (True, expected)
        plain.give_back(expected, [to_back] * count)
        pool, ok = compiled["give_back"](pool, ids, jnp.full(width, to_back))
        assert bool(ok)
        assert seen(pool) == (list(plain.free), plain.references)


def test_nothing_that_was_taken_can_have_content_before_a_block_joined_at_the_back():
    compiled = operations(NUM_BLOCKS, NUM_BLOCKS)
    pool = init_block_pool(NUM_BLOCKS)
    for _ in range(12):
        before = pool
        pool, ids, _ = compiled["take"](pool, wanted(5, NUM_BLOCKS))
        assert not bool(compiled["may_have_content"](before, pool))
        pool, _ = compiled["give_back"](pool, ids, jnp.zeros(NUM_BLOCKS, jnp.bool))
    pool, ids, _ = compiled["take"](pool, wanted(3, NUM_BLOCKS))
    pool, _ = compiled["give_back"](pool, ids, jnp.ones(NUM_BLOCKS, jnp.bool))
    before = pool
    pool, _, _ = compiled["take"](before, wanted(4, NUM_BLOCKS))
    assert not bool(compiled["may_have_content"](before, pool))
    assert not bool(compiled["may_have_content"](pool, pool))  # nothing was taken
    pool, _, _ = compiled["take"](before, wanted(5, NUM_BLOCKS))
    assert bool(compiled["may_have_content"](before, pool))
