"""Serving to the end and what the tables say of it, with a model that only counts and needs no attention."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments.serving import _allocate, serve
from experiments.workloads import Provenance, Workload
from paxkv.cost_model import StepCost
from paxkv.engine import Engine
from paxkv.kv_format import scheme
from paxkv.model_shapes import KVShape
from paxkv.outcomes import MemoryFaultError
from paxkv.paged import Paged
from paxkv.requests import make_requests

VOCAB, SHAPE = 50, KVShape(layers=1, kv_heads=1, head_dim=2, element_bytes=4)
STEP_MS = 1_800_000  # half an hour, so that twelve steps are more than the modelled clock can count
PAGED = Paged(rows=2, max_len=12, block_size=4, num_blocks=4)


def count_up(params, tokens, positions, select, cache, attend):
    """The token after n is n + 1, by a lead of one."""
    last = tokens.at[select].get(mode="fill", fill_value=0)
    return jax.nn.one_hot(last + 1, VOCAB), cache


def run(output_len, seen=lambda ended: None, memory=PAGED):
    workload = Workload(
        Provenance(source="synthetic", rows_read=4, lengths="", arrivals=""),
        arrival_ms=np.array([0.0, 0.0, 0.25, 10_000_000.0]),
        prompt_len=np.array([3, 12, 2, 1], np.int32),
        output_len=np.array(output_len, np.int32),
    )
    prompts = np.zeros((4, 12), np.int32)
    prompts[[0, 2, 3], [2, 1, 0]] = [10, 20, 30]
    requests = make_requests(prompts, workload.prompt_len, workload.output_len, workload.arrival_ms, seed=0)
    engine = Engine(memory, count_up, 2, StepCost(STEP_MS * 1_000_000, 0, 0, 0))
    return serve(engine, None, requests, workload, SHAPE, 4, seen)


def test_the_tables_say_what_was_served_and_when():
    seen = []
    served = run([4, 9, 0, 2], seen.append)
    # Two tokens a step: request 0 reads its prompt in two steps, then counts on. Request 3 finds an idle server.
    assert served.requests.to_dict(as_series=False) == {
        "request": [0, 1, 2, 3],
        "arrival_ms": [0, 0, 0.25, 1e7],
        "prompt_len": [3, 12, 2, 1],
        "output_len": [4, 9, 0, 2],
        "generated": [4, 0, 0, 2],
        "reason": ["length", "refused_too_long", "no_output", "length"],
        "admitted_ms": [0, None, None, 1e7],
        "first_token_ms": [2 * STEP_MS, None, None, 1e7 + STEP_MS],
        "ended_ms": [5 * STEP_MS, STEP_MS, STEP_MS, 1e7 + 2 * STEP_MS],
        "preemptions": [0, 0, 0, 0],
        "tokens": [[11, 12, 13, 14], [], [], [31, 32]],
        "token_ms": [[n * STEP_MS for n in (2, 3, 4, 5)], [], [], [1e7 + STEP_MS, 1e7 + 2 * STEP_MS]],
        "margins": [[1] * 4, [], [], [1] * 2],
    }
    steps = served.steps
    assert steps["step"].to_list() == list(range(8))
    assert steps["clock_ms"].to_list() == [*(n * STEP_MS for n in range(6)), 1e7, 1e7 + STEP_MS]
    assert steps["duration_ms"].to_list() == [*([STEP_MS] * 5), 1e7 - 5 * STEP_MS, STEP_MS, STEP_MS]
    assert steps["new_tokens"].to_list() == [2, 1, 1, 1, 1, 0, 1, 1]
    assert steps["refused"].sum() == 2
    assert (steps["wall_ms"] > 0).all()
    assert seen == [2, 2]
    assert served.pool["step"].to_list() == [4, 8]
    assert served.pool["owners"].to_list() == [[0, 0, -1, -1], [-1] * 4]


def test_a_fault_of_the_memory_stops_the_run():
    class Careless(Paged):
        def demand(self, state, new_lengths):
            return jnp.zeros_like(new_lengths)

        def admit(self, state, ask):
            return super().admit(state, ask._replace(known_tokens=jnp.int32(0), final_tokens=jnp.int32(1)))

    with pytest.raises(MemoryFaultError, match="OUT_OF_BLOCKS"):
        run([4, 9, 0, 2], memory=Careless(rows=2, max_len=12, block_size=1, num_blocks=4))


def test_a_run_that_outlasts_the_modelled_clock_stops():
    with pytest.raises(ValueError, match="the modelled clock passed 21475 s"):
        run([9, 9, 9, 9])


def test_keys_and_values_that_no_device_can_hold_are_refused_in_words():
    with pytest.raises(ValueError, match="no room for keys and values of 2147483647 slots"):
        _allocate(
            KVShape(layers=8, kv_heads=8, head_dim=128, element_bytes=4),
            Paged(rows=1, max_len=1, block_size=1, num_blocks=2**31 - 1),
            scheme("f32"),
        )
