"""Reserved memory in scenarios with known values. Every operation is also compared with the oracle."""

import dataclasses

import jax
import jaxtyping
import numpy as np
import pytest

from paxkv.outcomes import MemoryFaultError, Outcome, raise_on_fault
from paxkv.reserved import Reserved
from tests.paxkv.oracles.lockstep import Lockstep, ask, ints

OPT_13B_SLOTS = 15_728
# The blocks of the empty arena have 16, 8, 4, 2 and 1 slots.
SMALL = Reserved(rows=4, max_len=24, num_slots=31, policy="oracle")


def admit_until_full(memory: Reserved, asked):
    admit = jax.jit(memory.admit)
    state, outcomes = memory.init(), []
    for one in asked:
        state, _, outcome = admit(state, one)
        outcomes.append(Outcome(int(outcome)))
    return state, outcomes


def test_seven_requests_of_2048_fit_the_kv_memory_of_opt_13b():
    memory = Reserved(rows=9, max_len=2048, num_slots=OPT_13B_SLOTS, policy="max")
    state, outcomes = admit_until_full(memory, [ask(100, final=300)] * 9)
    assert outcomes == [Outcome.OK] * 7 + [Outcome.LATER] * 2
    assert sorted(np.asarray(state.starts)[:7].tolist()) == list(range(0, 14_336, 2048))
    used = memory.usage(state, ints([300] * 9))
    assert int(used.external) == OPT_13B_SLOTS - 14_336


@pytest.mark.parametrize(
    ("policy", "known", "prompt", "final", "slots"),
    [
        pytest.param("max", 5, 5, 8, 2048, id="max reserves the longest sequence"),
        pytest.param("pow2", 100, 100, 125, 100 + 32, id="pow2 rounds 25 of output up to 32"),
        pytest.param("pow2", 110, 100, 125, 100 + 32, id="also after a preemption"),
        pytest.param("pow2", 3, 3, 7, 3 + 4, id="a power of two stays"),
        pytest.param("pow2", 3, 3, 3, 3, id="no output needs no room"),
        pytest.param("pow2", 1500, 1500, 2048, 2048, id="never more than the longest sequence"),
        pytest.param("oracle", 3, 3, 9, 9, id="oracle reserves what will be there"),
    ],
)
def test_a_request_reserves_by_the_policy(policy, known, prompt, final, slots):
    memory = Reserved(rows=1, max_len=2048, num_slots=4096, policy=policy)
    assert int(memory.reservation(ask(known, prompt, final))) == slots


def test_what_does_not_fit_the_empty_arena_is_refused():
    pair = Lockstep(SMALL)
    assert pair.admit(16) == (0, Outcome.OK)
    assert pair.admit(17)[1] == Outcome.NEVER
    assert pair.admit(25)[1] == Outcome.NEVER
    assert pair.admit(9)[1] == Outcome.LATER
    assert pair.admit(8) == (1, Outcome.OK)


def test_free_slots_that_are_not_together_do_not_help():
    pair = Lockstep(SMALL)
    for start in (16, 0, 8):  # the smallest block that holds 8 first, then halves of the next
        row, _ = pair.admit(8)
        assert int(pair.state.starts[row]) == start
    pair.release([True, True, False, False])
    assert pair.admit(16)[1] == Outcome.LATER  # 16 slots are free, in two places
    pair.release([False, False, True, False])
    assert pair.admit(16) == (0, Outcome.OK)  # two buddies are one block again
    assert int(pair.state.starts[0]) == 0


def test_growth_within_the_reservation_needs_nothing_and_past_it_is_a_fault():
    pair = Lockstep(SMALL)
    pair.admit(5, final=9)
    assert np.asarray(SMALL.demand(pair.state, ints([9, 0, 0, 0]))).tolist() == [0] * 4
    assert pair.append([9, 0, 0, 0]) == Outcome.OK
    assert pair.append([1, 0, 0, 0]) == Outcome.OUT_OF_RANGE  # the buddy block has 16 slots, but 9 were reserved
    assert pair.oracle.length(0) == 9
    with pytest.raises(MemoryFaultError, match="OUT_OF_RANGE, first at row 0"):
        raise_on_fault(pair.state.seqs.faults)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_slots": 0}, "num_slots must be at least 1, got 0"),
        ({"min_block": 3}, "min_block must be a power of two, got 3"),
        ({"min_block": 16}, "num_slots must be a multiple of min_block = 16, got 31; take 16 slots"),
        ({"num_slots": 2**30}, "slots_of_the_padded_arena must be below 2"),
    ],
)
def test_impossible_sizes_are_refused_by_name(change, message):
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(SMALL, **change)


def test_an_unknown_policy_is_refused_by_name(monkeypatch):
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)  # which checks the annotation before we can
    with pytest.raises(ValueError, match="policy must be one of max, pow2, oracle, got 'pow3'"):
        dataclasses.replace(SMALL, policy="pow3")
