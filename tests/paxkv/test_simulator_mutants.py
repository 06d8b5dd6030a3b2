"""Wrong simulators, costs and memories that look ahead, which the tests must notice.

As in `test_scheduler_mutants`, each is a mistake in the source of one module.
"""

import pytest

from paxkv import (
    buddy,
    contiguous,
    cost_model,
    durations,
    growth,
    memory,
    paged,
    pool_metrics,
    reserved,
    roofline,
    simulate,
    steps,
)
from tests.paxkv import (
    test_buddy,
    test_cost_model,
    test_durations,
    test_paged,
    test_roofline,
    test_simulate,
    test_simulate_points,
    test_steps,
    test_usage,
)
from tests.paxkv.mutants import assert_noticed, each, every
from tests.paxkv.oracles.lockstep import MEMORIES, Lockstep, drive

pytestmark = pytest.mark.soak


SIM = test_simulate.test_every_step_is_that_of_the_oracle_and_strides_change_nothing
PAGED = each(SIM, "paged")
MAPPED = each(SIM, "vattention")
SYNC = each(SIM, "vattention_sync")
RESERVED = each(SIM, "reserved")
CLOCK = test_simulate.test_a_clock_that_runs_out_and_a_fault_of_memory_are_told
SMALLER = each(test_simulate_points.test_points_that_share_a_program_are_what_they_are_alone, "paged")
ROOFLINE = every(test_roofline)
DURATIONS = every(test_durations)


def costs() -> None:
    every(test_cost_model)()
    test_cost_model.test_a_cost_beyond_an_hour_is_refused("swap_block_ns")


def used() -> None:
    every(test_usage)()
    for forks in (False, True):
        test_usage.test_a_block_that_only_a_pin_holds_is_allocated_and_holds_no_token_of_a_sequence(forks)


STEP = test_steps.test_blocks_that_go_out_and_those_that_come_back_are_counted_apart_and_paid_for_together


def is_steady() -> None:
    for test in (
        test_steps.test_no_step_is_steady_in_which_blocks_may_be_published_copied_or_given_back,
        test_steps.test_steps_are_steady_until_the_background_maps_for_the_next_token_or_further_ahead,
    ):
        for case in test.pytestmark[0].args[1]:
            test(*case) if isinstance(case, tuple) else test(case)


MANY = test_paged.test_more_blocks_than_are_taken_at_once_go_to_their_rows_in_order


def allocates() -> None:
    every(test_buddy)()
    for leaves in (16, 29):
        test_buddy.test_random_allocations_agree_with_the_textbook(leaves)


def grows() -> None:
    for seed in range(6):
        drive(Lockstep(MEMORIES["paged_3_watermark"]), seed, steps=100)


def straddles() -> None:
    drive(Lockstep(MEMORIES["vattention_straddling"]), 0, steps=30)


MISTAKES = {
    # ---- what a step does ----
    "who waits in a row is read": (steps, PAGED, "jnp.sum(jnp.where(new > 0, lengths, 0))", "jnp.sum(lengths)"),
    "pairs without the token itself": (steps, PAGED, "new * (new + 1) // 2", "new * (new - 1) // 2"),
    "pairs of new tokens alone": (steps, PAGED, "new * plan.starts + new", "new"),
    "all calls so far": (
        steps,
        SYNC,
        "memory.map_calls(scheduled.memory).sync - memory.map_calls(before.memory).sync",
        "memory.map_calls(scheduled.memory).sync",
    ),
    "only what goes out": (
        steps,
        STEP,
        "swapped_blocks=_count(plan.moves_out) + _count(plan.moves_in)",
        "swapped_blocks=_count(plan.moves_out)",
    ),
    "the last chunk is no prompt": (
        steps,
        PAGED,
        "jnp.where(plan.samples & (plan.new_tokens == 1), 0, plan.new_tokens)",
        "jnp.where(plan.samples, 0, plan.new_tokens)",
    ),
    "usage after the step": (steps, PAGED, "usage=memory.usage(scheduled.memory,", "usage=memory.usage(after.memory,"),
    "calls before the background": (
        steps,
        MAPPED,
        "memory.map_calls(after.memory), memory",
        "memory.map_calls(scheduled.memory), memory",
    ),
    "samples for admissions": (steps, PAGED, "sampled=work.samples", "sampled=plan.admitted"),
    "out and in exchanged": (
        steps,
        STEP,
        "swapped_out_blocks=_count(plan.moves_out)",
        "swapped_out_blocks=_count(plan.moves_in)",
    ),
    "whoever was there runs": (
        steps,
        PAGED,
        "running=jnp.sum(row_request < requests.count, dtype=jnp.int32)",
        "running=jnp.sum(before.row_request < requests.count, dtype=jnp.int32)",
    ),
    "an idle server waits a step": (
        steps,
        PAGED,
        "jnp.where(idle, next_arrival(requests, scheduled) - scheduled.clock, cost.ticks(work))",
        "cost.ticks(work)",
    ),
    # ---- strides ----
    "idle is stuck": (simulate, PAGED, "((first.ticks == 0) | (first.running > 0))", "jnp.bool(True)"),
    "refusals are stuck": (simulate, PAGED, " & (first.refused == 0)", ""),
    "a turn is a step": (simulate, PAGED, "count=now.count + 1 + more", "count=now.count + 1"),
    "read before the step": (simulate, PAGED, "ahead * num_running", "(ahead - 1) * num_running"),
    "no pairs": (
        simulate,
        PAGED,
        "StepWork(everyone, everyone, read, read, zeros, zeros)",
        "StepWork(everyone, everyone, read, zeros, zeros, zeros)",
    ),
    "no samples": (simulate, PAGED, "StepWork(everyone, everyone,", "StepWork(everyone, zeros,"),
    "starts at the ends": (simulate, PAGED, "jnp.concatenate([state.clock[None], ends[:-1]])", "ends"),
    "past the longest sequence": (
        simulate,
        PAGED,
        "jnp.minimum(by_row(requests.output_lens, row_request, _FOREVER) - generated, memory.max_len - known)",
        "by_row(requests.output_lens, row_request, _FOREVER) - generated",
    ),
    "past the end": (
        simulate,
        PAGED,
        "jnp.min(jnp.where(running, left, _FOREVER)) - 1)",
        "jnp.min(jnp.where(running, left, _FOREVER)))",
    ),
    "past an arrival": (simulate, PAGED, "(starts < arrival)", "(starts <= arrival)"),
    "a clock that runs backwards": (simulate, CLOCK, " & (ends > starts)", ""),
    "who left is forgotten": (
        simulate,
        PAGED,
        "jnp.where(running, plan.samples, ~plan.samples)",
        "plan.samples | ~running",
    ),
    "nobody strides": (simulate, PAGED, " & jnp.any(running)\n    is", "\n    is"),
    "whoever waits may": (simulate, PAGED, "is_steady = all_decode & plan.closed", "is_steady = all_decode"),
    "usage as it was": (
        simulate,
        PAGED,
        "memory.usage(memory.look_ahead(state.memory, running, steps), final)",
        "memory.usage(state.memory, final)",
    ),
    "produced once": (simulate, PAGED, ".at[row_request].add(steps, mode", ".at[row_request].add(1, mode"),
    "the clock of the next": (simulate, PAGED, "ends[jnp.maximum(steps, 1) - 1]", "ends[steps]"),
    "done when all have come": (simulate, PAGED, " & (state.queued == 0)", ""),
    "done when the queue is empty": (
        simulate,
        PAGED,
        " & ~jnp.any(state.row_request < requests.count)\n\n\ndef _turn",
        "\n\n\ndef _turn",
    ),
    "nothing is a fault": (
        simulate,
        CLOCK,
        "    raise_on_fault(simulator.memory.seqs(simulation.scheduler.memory).faults)\n",
        "    pass\n",
    ),
    "the clock stands": (
        simulate,
        CLOCK,
        "after.clock < before.clock, Halt.CLOCK",
        "after.clock == before.clock, Halt.CLOCK",
    ),
    # ---- memories that look ahead ----
    "more than there is": (paged, PAGED, "jnp.where(jnp.sum(demand) <= self.available(state), steps, 0)", "steps"),
    "strides of a cache": (
        paged,
        is_steady,
        "return self.cache is None and not self.forks and",
        "return not self.forks and",
    ),
    "strides of forks": (
        paged,
        is_steady,
        "return self.cache is None and not self.forks and",
        "return self.cache is None and",
    ),
    "strides of a window": (paged, is_steady, " and all(group.sees_all for group in self.layer_groups)", ""),
    "a shared block counts for each": (pool_metrics, used, "tokens = alone.tokens - saved", "tokens = alone.tokens"),
    "pins are references of rows": (
        pool_metrics,
        used,
        "state.pool.ref_counts > required(state.pins)",
        "state.pool.ref_counts > 0",
    ),
    "tables stay": (
        paged,
        PAGED,
        "end=jnp.maximum(table.end, self._need(state, seqs.lengths, group))",
        "end=table.end",
    ),
    "all blocks may be used": (
        paged,
        SMALLER,
        "usage_of_rows(state.limits.units * self.block_size",
        "usage_of_rows(self.num_blocks * self.block_size",
    ),
    "maps within a stride": (contiguous, MAPPED, "room - state.seqs.lengths - ahead", "room - state.seqs.lengths"),
    "one map more": (contiguous, MAPPED, "room - state.seqs.lengths - ahead", "room - state.seqs.lengths - ahead + 1"),
    "the next token is not mapped": (
        contiguous,
        is_steady,
        "if self.background_groups else min(self.lookahead_steps, 1)",
        "if self.background_groups else 0",
    ),
    "as far as there is room": (
        contiguous,
        MAPPED,
        "jnp.where(room < self.max_len, room - state.seqs.lengths - ahead, self.max_len - state.seqs.lengths)",
        "self.max_len - state.seqs.lengths",
    ),
    "lengths stay (mapped)": (contiguous, MAPPED, "seqs=longer(state.seqs, grows, steps)", "seqs=state.seqs"),
    "lengths stay (reserved)": (reserved, RESERVED, "seqs=longer(state.seqs, grows, steps)", "seqs=state.seqs"),
    "all groups may be used": (
        contiguous,
        used,
        "self._capacity_of(state.limits.units)",
        "self._capacity_of(jnp.int32(self.num_groups))",
    ),
    "whole tokens of a page": (
        contiguous,
        straddles,
        "groups // token * page + groups % token * page // token",
        "groups * (page // token)",
    ),
    "all leaves may be used": (
        reserved,
        used,
        "usage_of_rows(state.limits.units * self.min_block",
        "usage_of_rows(self.num_slots",
    ),
    "ends that were passed": (memory, used, "jnp.maximum(final_lengths, seqs.lengths)", "final_lengths"),
    "ends past the given": (
        memory,
        PAGED,
        "jnp.minimum(given, jnp.maximum(final_lengths, seqs.lengths))",
        "jnp.maximum(final_lengths, seqs.lengths)",
    ),
    "rounding is internal": (memory, used, "given - fillable", "taken - fillable"),
    "shared tokens count twice": (pool_metrics, used, "tokens.at[table.ids].max(", "tokens.at[table.ids].add("),
    "blocks of a group are its tokens": (
        pool_metrics,
        used,
        "stored * memory.block_size // group.block_size",
        "stored",
    ),
    "pins are saved": (
        pool_metrics,
        used,
        "jnp.sum(memory.held(state)) - jnp.sum(named)",
        "jnp.sum(memory.held(state)) - (state.limits.units - state.pool.num_free)",
    ),
    # ---- growth ----
    "the last block is not given": (
        growth,
        grows,
        "served = ends[-1] <= state.pool.num_free",
        "served = ends[-1] < state.pool.num_free",
    ),
    "some are served": (
        growth,
        grows,
        "total = jnp.where(served, ends[-1], 0)",
        "total = jnp.minimum(ends[-1], state.pool.num_free)",
    ),
    "columns of the whole": (growth, grows, 'nth = place - first.at[at].get(mode="fill", fill_value=0)', "nth = place"),
    "only the first of a row": (growth, grows, "jax.lax.cummax(of)", "of"),
    "a second turn begins anew": (growth, MANY, "jnp.maximum(first - done, 0)", "first"),
    "ends though not served": (growth, grows, "table.end + jnp.where(served, more, 0)", "table.end + more"),
    # ---- the buddy allocator ----
    "a power of two is rounded up": (buddy, allocates, "jnp.maximum(n, 1) - 1)", "jnp.maximum(n, 1))"),
    "a leaf past the end": (buddy, allocates, "dtype=jnp.int32) >= usable", "dtype=jnp.int32) > usable"),
    "a larger block": (buddy, allocates, "(jnp.arange(top + 1) >= order)", "(jnp.arange(top + 1) > order)"),
    "halves of free blocks": (buddy, allocates, "(~pairs & pairs[:, ::-1])", "(~pairs)"),
    "who left is in the way": (buddy, allocates, "jnp.where(taken, node, 2 << top)", "node"),
    "the largest free block": (buddy, allocates, "first[jnp.argmax(usable)]", "first[top - jnp.argmax(usable[::-1])]"),
    "the highest of them": (
        buddy,
        allocates,
        "jnp.min(jnp.where(whole, jnp.arange(width, dtype=jnp.int32), width))",
        "jnp.where(jnp.any(whole), width - 1 - jnp.argmax(whole[::-1]), width)",
    ),
    "the root never fits": (buddy, allocates, "jnp.stack([busy, ~busy], axis=1)", "jnp.stack([busy, busy], axis=1)"),
    # ---- costs ----
    "kv for tokens": (cost_model, costs, "(self.token_ns, work.tokens)", "(self.token_ns, work.kv_tokens)"),
    "swaps are free": (cost_model, costs, "(self.swap_block_ns, work.swapped_blocks),", ""),
    "rates of ticks": (cost_model, costs, "(unit_ns * NS, count)", "(unit_ns, count)"),
    "rounded one by one": (
        cost_model,
        costs,
        "rounded_up(charge(self.step_ns * NS, *((unit_ns * NS, count) for unit_ns, count in rates)))",
        "rounded_up(charge(self.step_ns * NS)) + sum(rounded_up(charge(0, (ns * NS, count))) for ns, count in rates)",
    ),
    "hours of swaps": (
        cost_model,
        costs,
        '("step_ns", "token_ns", "kv_token_ns", "map_call_ns", "swap_block_ns"):\n            if',
        '("step_ns", "token_ns", "kv_token_ns", "map_call_ns"):\n            if',
    ),
    "ones are lost": (durations, DURATIONS, "second * tens % _BASE + second * ones // _BASE", "second * tens % _BASE"),
    "tens are lost": (durations, DURATIONS, "            ticks += second * tens // _BASE\n", ""),
    "no carry": (durations, DURATIONS, "    high += low // _BASE\n", ""),
    "by parts alone": (
        durations,
        DURATIONS,
        "(one.ticks > other.ticks) | ((one.ticks == other.ticks) & (one.parts > other.parts))",
        "one.parts > other.parts",
    ),
    "by ticks alone": (
        durations,
        DURATIONS,
        "(one.ticks > other.ticks) | ((one.ticks == other.ticks) & (one.parts > other.parts))",
        "one.ticks > other.ticks",
    ),
    "parts are not carried": (
        durations,
        DURATIONS,
        "Duration(ticks + parts // TICK_PARTS, parts % TICK_PARTS)",
        "Duration(ticks, parts % TICK_PARTS)",
    ),
    "rounded down": (
        durations,
        DURATIONS,
        "duration.ticks + (duration.parts + (TICK_PARTS - 1)) // TICK_PARTS",
        "duration.ticks",
    ),
    "a tick more": (durations, DURATIONS, "(duration.parts + (TICK_PARTS - 1)) // TICK_PARTS", "1"),
    "weights beside tokens": (
        roofline,
        ROOFLINE,
        "longer(charge(self.weights), charge(0, (self.token, work.tokens), (self.sample, work.samples)))",
        "charge(self.weights, (self.token, work.tokens), (self.sample, work.samples))",
    ),
    "samples for tokens": (roofline, ROOFLINE, "(self.sample, work.samples)", "(self.sample, work.tokens)"),
    "the faster of both": (
        roofline,
        ROOFLINE,
        "longer(charge(0, (self.kv_token, work.kv_tokens)), charge(0, (self.pair, work.pairs)))",
        "charge(0, (self.kv_token, work.kv_tokens))",
    ),
    "calls in parts": (roofline, ROOFLINE, "(self.map_call_ns * NS, work.sync", "(self.map_call_ns, work.sync"),
    "each device has all weights": (
        roofline,
        ROOFLINE,
        "Fraction(weights * _WEIGHT_BYTES[weight_dtype], devices)",
        "Fraction(weights * _WEIGHT_BYTES[weight_dtype])",
    ),
    "each device has all heads": (
        roofline,
        ROOFLINE,
        "Fraction(4 * layers * size.q_heads * shape.head_dim, devices)",
        "Fraction(4 * layers * size.q_heads * shape.head_dim)",
    ),
    "heads of keys": (
        roofline,
        ROOFLINE,
        "4 * layers * size.q_heads * shape.head_dim",
        "4 * layers * shape.kv_heads * shape.head_dim",
    ),
    "attention in eight bits": (
        roofline,
        ROOFLINE,
        'Fraction(target.peak_flops["bfloat16"])',
        "Fraction(target.peak_flops[weight_dtype])",
    ),
    "a ring of all": (roofline, ROOFLINE, "Fraction(2 * (devices - 1), devices)", "Fraction(2)"),
    "one exchange a layer": (roofline, ROOFLINE, "2 * layers * Fraction(2", "layers * Fraction(2"),
    "an exchange with nobody": (roofline, ROOFLINE, "2 * layers if devices > 1 else 0", "2 * layers"),
    "a table for all layers": (roofline, ROOFLINE, "Fraction(4 * layers, block_size)", "Fraction(4, block_size)"),
    "tables through the kernel": (
        roofline,
        ROOFLINE,
        "(kv_bytes * decode + table_bytes)",
        "((kv_bytes + table_bytes) * decode)",
    ),
    "decode for prefill": (
        roofline,
        ROOFLINE,
        'decode, prefill = reached["paged_decode"], reached["paged_prefill"]',
        'prefill, decode = reached["paged_decode"], reached["paged_prefill"]',
    ),
    "the output in every token": (
        roofline,
        ROOFLINE,
        "Fraction(2 * size.layer_parameters, devices)",
        "Fraction(2 * weights, devices)",
    ),
    "weights as fast as keys": (
        roofline,
        ROOFLINE,
        'weight_bytes / (bandwidth * reached["weight_bandwidth"])',
        'weight_bytes / (bandwidth * reached["kv_bandwidth"])',
    ),
    "one copy a layer": (
        roofline,
        ROOFLINE,
        "shape.block_bytes(block_size), 2 * layers",
        "shape.block_bytes(block_size), layers",
    ),
    "parts are rounded down": (
        roofline,
        ROOFLINE,
        "math.ceil(seconds * 10**6 * TICK_PARTS / TICK_US)",
        "int(seconds * 10**6 * TICK_PARTS / TICK_US)",
    ),
    "tables take no time": (
        roofline,
        ROOFLINE,
        'rates |= {"kv_tokens": self.kv_token + self.table_token}',
        'rates |= {"kv_tokens": self.kv_token}',
    ),
    "exchanges take no time": (
        roofline,
        ROOFLINE,
        '"tokens": self.token + self.exchange_token,',
        '"tokens": self.token,',
    ),
    "the constant takes no time": (
        roofline,
        ROOFLINE,
        "if constant + sum(charges.values()) >= 2**31",
        "if sum(charges.values()) >= 2**31",
    ),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_noticed(name):
    assert_noticed(*MISTAKES[name])
