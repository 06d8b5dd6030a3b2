"""What a step does and what is told of it, worked out by hand, and how many are steady."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest

from paxkv.contiguous import VAttention
from paxkv.paged import Paged
from paxkv.prefix_cache import PrefixCache
from paxkv.requests import make_requests
from paxkv.reserved import Reserved
from paxkv.scheduler_state import Plan, init_scheduler
from paxkv.steps import record_step, step_work
from paxkv.swap_state import Moves
from paxkv.windows import Group
from tests.paxkv.oracles.lockstep import ints

ROWS = jnp.array([True, True])


def moves(count):
    return Moves(ints([0] * 9), ints([0] * 9), jnp.int32(count))


def test_blocks_that_go_out_and_those_that_come_back_are_counted_apart_and_paid_for_together():
    memory = Reserved(rows=2, max_len=16, num_slots=32, policy="max")
    requests = make_requests(None, np.array([7, 7]), np.array([4, 4]), np.zeros(2), seed=0)
    state = init_scheduler(memory, requests)
    seqs = dataclasses.replace(state.memory.seqs, active=ROWS, lengths=ints([7, 7]))
    state = dataclasses.replace(state, memory=dataclasses.replace(state.memory, seqs=seqs), row_request=ints([0, 1]))
    none = jnp.int32(0)
    plan = Plan(
        new_tokens=ints([3, 0]),
        starts=ints([4, 7]),
        samples=jnp.array([True, False]),
        admitted=none,
        refused=none,
        preempted=none,
        recompute_tokens=none,
        hit_tokens=none,
        closed=jnp.bool(False),
        moves_out=moves(5),
        moves_in=moves(2),
    )
    work = step_work(memory, state, state, plan)
    # Tokens 5 to 7 see as many keys each; the row that waits reads nothing.
    assert [int(n) for n in work] == [3, 1, 7, 5 + 6 + 7, 0, 5 + 2]
    record = record_step(memory, requests, state, state, plan, work, state, none)
    assert (int(record.swapped_out_blocks), int(record.swapped_in_blocks)) == (5, 2)


@pytest.mark.parametrize(
    "knobs", [{"cache": PrefixCache()}, {"forks": True}, {"groups": (Group(4), Group(4, window=4)), "max_chunk": 4}]
)
def test_no_step_is_steady_in_which_blocks_may_be_published_copied_or_given_back(knobs):
    memory = Paged(rows=2, max_len=16, block_size=4, num_blocks=40, **knobs)
    assert int(memory.steady_steps(memory.init(), ROWS, jnp.int32(3))) == 0


@pytest.mark.parametrize(("lookahead", "at_once", "steady"), [(3, 2, 0), (3, 0, 2), (1, 2, 2), (0, 2, 3)])
def test_steps_are_steady_until_the_background_maps_for_the_next_token_or_further_ahead(lookahead, at_once, steady):
    memory = VAttention(2, 40, 20, 8, 2, buffers=2, lookahead_steps=lookahead, background_groups=at_once)
    state = memory.init()
    seqs = dataclasses.replace(state.seqs, active=jnp.array([True, False]), lengths=ints([5, 0]))
    state = dataclasses.replace(state, seqs=seqs, mapped=ints([2, 0]))  # room for 8 tokens
    assert int(memory.steady_steps(state, ROWS, jnp.int32(9))) == steady
