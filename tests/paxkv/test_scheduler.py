"""The scheduler without any model, step by step against an oracle that goes through the requests one by one."""

import functools
import random
from collections import Counter

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from paxkv.contiguous import VAttention
from paxkv.paged import Paged
from paxkv.policy import FIRST_COME, Policy, choices
from paxkv.queue import next_arrival
from paxkv.requests import TICK_US, Reason, Status, make_requests
from paxkv.reserved import Reserved
from paxkv.scheduler import commit, schedule
from paxkv.scheduler_state import init_scheduler
from tests.paxkv import unchecked
from tests.paxkv.oracles.lockstep import ORACLES
from tests.paxkv.scheduler_oracle import PolicyOracle, Request, SchedulerOracle

REQUESTS, MAX_LEN, WIDTH, STEPS, STOP = 9, 20, 22, 192, 3
MEMORIES = {
    "paged_1": (Paged(rows=4, max_len=MAX_LEN, block_size=1, num_blocks=26), 5),
    "paged_3_watermark": (Paged(rows=5, max_len=MAX_LEN, block_size=3, num_blocks=9, watermark_blocks=1), 8),
    "paged_4_small": (Paged(rows=4, max_len=MAX_LEN, block_size=4, num_blocks=4), 4),
    "paged_3_overtake": (Paged(rows=5, max_len=MAX_LEN, block_size=3, num_blocks=9), 8),
    "paged_4_least_work": (Paged(rows=5, max_len=MAX_LEN, block_size=4, num_blocks=7), 9),
    "paged_1_priority": (Paged(rows=4, max_len=MAX_LEN, block_size=1, num_blocks=26), 5),
    "vattention": (VAttention(4, MAX_LEN, num_groups=7, page_bytes=8, token_bytes=2, buffers=2), 6),
    "vattention_straddling_eager": (
        VAttention(4, MAX_LEN, 9, page_bytes=10, token_bytes=4, buffers=2, deferred_reclaim=False, watermark_groups=1),
        7,
    ),
    "reserved_max": (Reserved(rows=4, max_len=MAX_LEN, num_slots=64, policy="max"), 6),
    "reserved_pow2": (Reserved(rows=4, max_len=MAX_LEN, num_slots=43, policy="pow2"), 5),
    "reserved_oracle": (Reserved(rows=4, max_len=MAX_LEN, num_slots=28, policy="oracle", min_block=2), 4),
}

POLICIES = {
    "paged_3_overtake": Policy(overtake=True),
    "paged_4_least_work": Policy(victim="least_work", overtake=True),
    "paged_1_priority": Policy(victim="priority"),
}

# All of these are values to one compiled program.
CHOICES = {
    "shortest": Policy(order="shortest", overtake=True, victim="least_work"),
    "priority": Policy(order="priority", victim="priority", first="prefill"),
    "deadline": Policy(order="deadline", chunked=False, overtake=True),
    "prefill": Policy(first="prefill", reserve_output=True, victim="least_work"),
    "whole": Policy(chunked=False, max_adapters=2),
    "adapters": Policy(max_adapters=1, overtake=True, first="prefill", order="shortest"),
    "reserve": Policy(reserve_output=True),
    "first_come": FIRST_COME,
}


def ticks_of(tokens, *others):
    return 3 + 2 * tokens


@functools.cache
def jitted_trace(name):
    """All steps of a trace in one call; every sampled token is looked up in a table."""
    (memory, budget), policy = MEMORIES[name], POLICIES.get(name, FIRST_COME)

    def one_step(state, _, requests, tokens, choice):
        before = state
        state, plan = schedule(memory, requests, state, budget, policy if choice is None else choice)
        total = jnp.sum(plan.new_tokens)
        ticks = jnp.where(total > 0, ticks_of(total), next_arrival(requests, state) - state.clock)
        place = state.progress.generated.at[state.row_request].get(mode="fill", fill_value=0)
        sampled = tokens.at[state.row_request, place].get(mode="fill", fill_value=0)
        after = commit(memory, requests, state, plan, sampled, state.clock + ticks)
        seen = {
            "before": (before.row_request, memory.seqs(before.memory).lengths, before.progress.generated),
            "scheduled": (state.row_request, memory.seqs(state.memory).lengths),
            "plan": plan,
            "clock": state.clock,
            "progress": after.progress,
            "faults": memory.seqs(after.memory).faults.word,
        }
        return after, seen

    @functools.partial(jax.jit, compiler_options={"xla_backend_optimization_level": 0})
    def trace(requests, tokens, choice):
        one = functools.partial(one_step, requests=requests, tokens=tokens, choice=choice)
        state, seen = jax.lax.scan(one, init_scheduler(memory, requests), length=STEPS)
        left = memory.available(state.memory), memory.held(state.memory), memory.owners(state.memory)
        return state.progress, left, seen

    return trace


def run(name, requests, choice=None):
    device_requests = make_requests(
        np.zeros((REQUESTS, WIDTH), np.int32),
        np.array([r.prompt for r in requests]),
        np.array([r.output for r in requests]),
        np.array([r.arrival for r in requests]) * (TICK_US / 1000),
        seed=0,
        stop_token=STOP,
        priorities=np.array([r.priority for r in requests]),
        predicted_lens=np.array([r.predicted for r in requests]),
        deadline_ms=np.array([r.deadline for r in requests]) * (TICK_US / 1000),
        adapters=np.array([r.adapter for r in requests]),
    )
    tokens = jnp.asarray(np.array([r.tokens for r in requests], np.int32))
    progress, left, seen = jax.tree.map(np.asarray, jitted_trace(name)(device_requests, tokens, choice))
    require_empty(MEMORIES[name][0], *left)
    happened = seen["plan"].new_tokens.sum(axis=1) + seen["plan"].refused
    return progress, [jax.tree.map(lambda a, i=i: a[i], seen) for i in range(np.flatnonzero(happened)[-1] + 3)]


def random_workload(seed):
    """Bursts and pauses; a few requests that ask for nothing or for too much; some outputs with a stop token."""
    rng = random.Random(seed)
    arrival, requests = rng.randint(0, 3), []
    for i in range(REQUESTS):
        arrival += rng.choice([0, 0, 0, 5, 20, 150])
        prompt = rng.choice([rng.randint(1, 4), rng.randint(1, 12), rng.randint(1, WIDTH)])
        output = rng.choice([0, 1, rng.randint(1, 8), rng.randint(1, 18), rng.randint(5, 30)])
        tokens = [rng.choice([5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, STOP]) for _ in range(40)]
        requests.append(Request(i, prompt, output, arrival, tokens))
    for request in requests:
        request.priority = rng.randint(1, 4)
    for request in requests:
        request.adapter = rng.randint(0, 3)
        request.predicted = max(0, request.output + rng.choice([0, 0, -3, 3, 20]))
        request.deadline = request.arrival + rng.choice([10, 50, 50, 400])
    return requests


@pytest.mark.parametrize("name", MEMORIES)
def test_every_step_is_that_of_the_sequential_oracle(name):
    (memory, budget), policy = MEMORIES[name], POLICIES.get(name, FIRST_COME)
    happened = Counter()
    for seed in range(25):
        requests = random_workload(seed)
        of = ORACLES[type(memory)](memory), requests, budget, STOP, ticks_of
        oracle = SchedulerOracle(*of) if policy == FIRST_COME else PolicyOracle(*of, policy)
        progress, steps = run(name, requests)
        assert (progress.status == Status.ENDED).all(), f"seed {seed}: livelock"
        for i, now in enumerate(steps):
            require_sound_step(memory, budget, requests, now, f"seed {seed}, step {i}", policy == FIRST_COME)
            step = oracle.step()
            require_equal_step(requests, step, now, f"seed {seed}, step {i}")
            happened["preempted"] += step.preempted
            happened["chunks"] += sum(step.starts[r] > 0 and count > 1 for r, count in step.new_tokens.items())
        assert all(r.ended for r in requests), f"seed {seed}"
        happened.update(r.reason for r in requests)
    if type(memory) is not Reserved:
        assert happened["preempted"] > 4
    wanted = {"LENGTH", "STOP_TOKEN", "REFUSED_TOO_LONG", "NO_OUTPUT", "chunks"}
    wanted |= {"MAX_MODEL_LEN"} if oracle.memory.fits_empty(1, MAX_LEN) else {"REFUSED_NEVER_FITS"}
    assert all(happened[reason] > 4 for reason in wanted), happened


@pytest.mark.parametrize("name", ["paged_3_watermark", "vattention"])
def test_every_policy_is_a_value_to_one_program_and_decides_as_the_oracle_does(name):
    memory, budget = MEMORIES[name]
    unlike = Counter()
    for policy in CHOICES.values():
        for seed in range(12):
            requests = random_workload(seed)
            oracle = PolicyOracle(ORACLES[type(memory)](memory), requests, budget, STOP, ticks_of, policy)
            progress, steps = run(name, requests, choices(policy, tuple(CHOICES.values())))
            assert (progress.status == Status.ENDED).all(), f"{policy}, seed {seed}: livelock"
            for i, now in enumerate(steps):
                require_equal_step(requests, oracle.step(), now, f"{policy}, seed {seed}, step {i}")
            unlike[policy] += progress.admitted_at.tolist() != run(name, requests)[0].admitted_at.tolist()
    assert unlike.pop(FIRST_COME) == 0
    assert min(unlike.values()) > 3, unlike
    assert jitted_trace(name)._cache_size() == 2


def require_sound_step(memory, budget, requests, now, where, in_order):
    """What holds in every step, whatever the oracle says. `requests` are still as they were before it."""
    (rows_before, lengths_before, generated), (rows, lengths), plan = now["before"], now["scheduled"], now["plan"]
    assert now["faults"] == 0, where
    assert plan.new_tokens.sum() <= budget, where
    known = {r.id: r.prompt + int(generated[r.id]) for r in requests}
    for row in range(memory.rows):
        request = int(rows[row])
        if request == REQUESTS:
            assert plan.new_tokens[row] == 0, where
            continue
        assert plan.starts[row] + plan.new_tokens[row] == lengths[row] <= known[request], where
        if request == int(rows_before[row]) and lengths_before[row] == known[request] - 1:
            assert plan.new_tokens[row] == 1, f"a decode row got nothing, {where}"
    running = [int(r) for r in rows if r < REQUESTS]
    assert len(set(running)) == len(running), where
    ended = now["progress"].reason != Reason.NONE
    waiting = [r.id for r in requests if r.arrival <= now["clock"] and r.id not in running and not ended[r.id]]
    assert not in_order or not running or not waiting or max(running) < min(waiting), f"somebody was overtaken, {where}"
    if running or waiting:
        assert plan.new_tokens.sum() > 0, f"nothing was computed, {where}"


def require_equal_step(requests, step, now, where):
    rows, plan, progress = now["scheduled"][0].tolist(), now["plan"], now["progress"]
    row_of = {request: row for row, request in enumerate(rows) if request < REQUESTS}
    assert {row: request for request, row in row_of.items()} == step.rows, where
    assert {r: int(plan.new_tokens[row]) for r, row in row_of.items() if plan.new_tokens[row]} == step.new_tokens, where
    assert {r: int(plan.starts[row_of[r]]) for r in step.starts} == step.starts, where
    assert {r for r, row in row_of.items() if plan.samples[row]} == step.samples, where
    assert plan.samples.sum() == len(step.samples), f"a free row samples, {where}"
    for field in ("admitted", "refused", "preempted", "recompute_tokens"):
        assert int(getattr(plan, field)) == getattr(step, field), f"{field}, {where}"
    assert int(now["clock"]) == step.clock, where
    status = [Status.ENDED if r.ended else Status.WAITING if r.row is None else Status.RUNNING for r in requests]
    assert progress.status.tolist() == status, where
    assert progress.reason.tolist() == [Reason[r.reason] for r in requests], where
    for field in ("generated", "admitted_at", "first_token_at", "ended_at", "preemptions"):
        assert getattr(progress, field).tolist() == [getattr(r, field) for r in requests], f"{field}, {where}"


def require_empty(memory, available, held, owners):
    """Everything came back."""
    assert available == (0 if type(memory) is Reserved else memory.num_units)  # nobody can get more after admission
    assert (held == 0).all()
    assert (owners == memory.rows).all()


def by_hand(*workload):
    """Requests `(prompt, output, arrival)`; the rest of the batch asks for nothing, at the end."""
    last = max(arrival for _, _, arrival in workload)
    workload = [*workload, *[(1, 0, last)] * (REQUESTS - len(workload))]
    return [Request(i, prompt, output, arrival, [5] * 40) for i, (prompt, output, arrival) in enumerate(workload)]


def computed(steps):
    """Tokens by request in each step that computes anything."""
    found = []
    for now in steps:
        rows, counts = now["scheduled"][0].tolist(), now["plan"].new_tokens.tolist()
        found.append({r: n for r, n in sorted(zip(rows, counts, strict=True)) if n})
    return [step for step in found if step]


def test_the_youngest_is_preempted_and_recomputed_worked_out_by_hand():
    # Four blocks of four tokens, four tokens a step. In the fourth step request 0 takes the last block for its ninth
    # token, request 1 finds none for its fifth to eighth and loses its four; it comes back when request 0 has ended.
    progress, steps = run("paged_4_small", by_hand((7, 4, 0), (8, 2, 0)))
    assert computed(steps) == [{0: 4}, {0: 3, 1: 1}, {0: 1, 1: 3}, {0: 1}, {0: 1}, {1: 4}, {1: 4}, {1: 1}]
    assert [int(now["plan"].recompute_tokens) for now in steps[:5]] == [0, 0, 0, 4, 0]
    assert progress.preemptions.tolist()[:2] == [0, 1]
    assert progress.admitted_at.tolist()[:2] == [0, 11]  # its first row counts
    assert progress.first_token_at.tolist()[:2] == [22, 3 * 11 + 2 * 5 + 2 * 11]


def test_a_request_that_can_never_fit_is_refused_and_the_queue_goes_on():
    # 14 + 4 tokens, all but the last stored, need five of four blocks: waiting would keep everybody behind it.
    progress, steps = run("paged_4_small", by_hand((2, 1, 0), (14, 4, 0), (3, 3, 0)))
    assert [Reason(int(r)).name for r in progress.reason[:3]] == ["LENGTH", "REFUSED_NEVER_FITS", "LENGTH"]
    assert progress.admitted_at.tolist()[:3] == [0, -1, 0]
    assert progress.ended_at[1] == 0
    assert computed(steps)[0] == {0: 2, 2: 2}


def test_a_request_that_fits_to_the_last_slot_is_served():
    # 14 + 3 tokens store 16, which is all there is.
    progress, _ = run("paged_4_small", by_hand((14, 3, 0), (2, 1, 0), (3, 3, 0)))
    assert [Reason(int(r)).name for r in progress.reason[:3]] == ["LENGTH"] * 3


def test_a_small_request_does_not_overtake_a_large_one():
    # Request 1 needs all of the memory; request 2 would fit beside request 0 at once.
    progress, _ = run("paged_4_small", by_hand((4, 6, 0), (13, 3, 0), (1, 1, 0)))
    assert progress.admitted_at[2] >= progress.admitted_at[1] >= progress.ended_at[0]


def test_a_small_request_overtakes_a_large_one_if_it_may():
    # Request 0 leaves six of nine blocks and request 1 needs seven; request 2 needs one.
    progress, _ = run("paged_3_overtake", by_hand((7, 4, 0), (19, 1, 0), (1, 1, 0)))
    assert progress.admitted_at.tolist()[:3:2] == [0, 0]
    assert progress.ended_at[2] < progress.ended_at[0] <= progress.admitted_at[1]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"victim": "oldest"}, "victim: expected one of last_arrived, least_work, priority, got 'oldest'"),
        ({"preemption": None}, "preemption: expected one of recompute, swap, got None"),
        ({"overtake": "no"}, "overtake must be True or False, got 'no'"),
        ({"overtake": 1}, "overtake must be True or False, got 1"),
    ],
)
def test_policies_that_there_are_not_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        unchecked.replace(FIRST_COME, **changes)


def test_an_idle_server_jumps_to_the_next_arrival():
    _, steps = run("reserved_oracle", by_hand((2, 1, 40), (2, 1, 1000)))
    assert [int(now["clock"]) for now in steps[:4]] == [0, 40, 40 + ticks_of(2), 1000]
