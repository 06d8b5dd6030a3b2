"""Wrong schedulers that the tests must notice: what they would let pass, they do not test.

Each is a mistake that somebody made or could make, in the source of one module; the tests with an oracle, or those with
figures worked out by hand, run with it.
"""

import pytest

from paxkv import policy, preemption, queue, scheduler, scheduler_state, waiting
from tests.paxkv import test_engine_lifecycle, test_queue, test_scheduler, test_scheduler_groups, test_simulate
from tests.paxkv.mutants import assert_noticed, each

pytestmark = pytest.mark.soak


STEPS = each(test_scheduler.test_every_step_is_that_of_the_sequential_oracle, "paged_3_watermark")
OVERTAKING = each(test_scheduler.test_every_step_is_that_of_the_sequential_oracle, "paged_3_overtake")
LEAST_WORK = each(test_scheduler.test_every_step_is_that_of_the_sequential_oracle, "paged_4_least_work")
BY_PRIORITY = each(test_scheduler.test_every_step_is_that_of_the_sequential_oracle, "paged_1_priority")
POLICIES = each(
    test_scheduler.test_every_policy_is_a_value_to_one_program_and_decides_as_the_oracle_does, "paged_3_watermark"
)
RECORDS = each(test_simulate.test_every_step_is_that_of_the_oracle_and_strides_change_nothing, "paged")
NOT_AWAITED = each(test_scheduler_groups.test_nobody_waits_for_one_of_a_group_that_has_ended, ())
GROUPS = each(
    test_scheduler_groups.test_groups_run_and_leave_as_a_whole_and_one_at_most_waits_for_its_members, "in_order"
)
PASSED_OVER = each(
    test_scheduler_groups.test_groups_run_and_leave_as_a_whole_and_one_at_most_waits_for_its_members, "overtaking"
)
SWAPS = each(test_scheduler_groups.test_groups_run_and_leave_as_a_whole_and_one_at_most_waits_for_its_members, "swap")
COMPLETED = each(test_scheduler_groups.test_who_completes_a_group_may_have_the_blocks_that_are_kept_back, ())
NEVER_BACK = each(test_scheduler_groups.test_who_can_never_come_back_from_the_host_is_refused_and_leaves_it, ())
QUEUE = test_queue.test_who_leaves_before_it_comes_is_neither_counted_nor_awaited


def next_in_order() -> None:
    with pytest.MonkeyPatch.context() as patch:
        test_queue.test_the_next_in_order_is_found_in_any_window_and_among_equals_who_came_first(patch)


ABORTED = each(test_engine_lifecycle.test_a_request_can_be_aborted_wherever_it_stands, ())
BEAMS = each(test_engine_lifecycle.test_who_aborts_a_beam_aborts_its_search_and_no_token_of_another, ())
REFUSED = each(
    test_simulate.test_servers_that_cannot_be_are_refused,
    ({"token_budget": 4}, "token_budget: expected at least rows = 5"),
)

MISTAKES = {
    # ---- who computes what ----
    "prompts wait while answers are computed": (
        scheduler,
        POLICIES,
        "choice.prefill_first & (backlog == 1)",
        "choice.prefill_first & (backlog > 1)",
    ),
    "the budget is spent twice": (
        scheduler,
        STEPS,
        "token_budget - jnp.sum(stored.granted),\n",
        "jnp.int32(token_budget),\n",
    ),
    "admissions after a preemption": (scheduler, POLICIES, "closed=stored.preempted > 0,", "closed=jnp.bool(False),"),
    "answers only if nobody is admitted": (
        scheduler,
        POLICIES,
        "(jnp.sum(stored.granted) == 0)",
        "(jnp.sum(new.granted) == 0)",
    ),
    "free rows sample": (scheduler, STEPS, "samples=(granted > 0) & (stored", "samples=(stored"),
    "victims get tokens": (scheduler, STEPS, "granted = jnp.where(victims, 0, granted)\n    starts", "starts"),
    "starts after the step": (
        scheduler,
        STEPS,
        "    starts = memory.seqs(state.memory).lengths\n"
        "    state = dataclasses.replace(state, memory=memory.append(state.memory, granted, token_budget)[0])\n",
        "    state = dataclasses.replace(state, memory=memory.append(state.memory, granted, token_budget)[0])\n"
        "    starts = memory.seqs(state.memory).lengths\n",
    ),
    "closed though somebody was preempted": (
        scheduler,
        RECORDS,
        "closed=new.closed & (stored.preempted == 0)",
        "closed=new.closed",
    ),
    "nobody waits for the others of a group": (
        scheduler,
        GROUPS,
        "if requests.samples > 1 and memory.can_fork:\n        backlog",
        "if False:\n        backlog",
    ),
    "a group waits for who has ended": (
        scheduler,
        NOT_AWAITED,
        "behind = (state.progress.status != Status.ENDED) & ~caught_up",
        "behind = ~caught_up",
    ),
    "a group is behind wherever one of it is not": (
        scheduler,
        GROUPS,
        "zeros(nobody, jnp.int32).at[requests.leaders].add(behind.astype(jnp.int32))",
        "zeros(nobody, jnp.int32).at[jnp.arange(nobody)].add(behind.astype(jnp.int32))",
    ),
    "the oldest first, whatever they compute": (
        scheduler,
        POLICIES,
        "jnp.lexsort((row_request, backlog > 1))",
        "jnp.lexsort((backlog > 1, row_request))",
    ),
    "what is left after the share": (
        scheduler,
        STEPS,
        "before = jnp.cumsum(wanted) - wanted",
        "before = jnp.cumsum(wanted)",
    ),
    # ---- what is booked ----
    "the last token is the first": (
        scheduler,
        STEPS,
        "first_token_at=progress.first_token_at.at[first]",
        "first_token_at=progress.first_token_at.at[at]",
    ),
    "a token past the longest sequence": (scheduler, STEPS, "total >= memory.max_len", "total > memory.max_len"),
    "an output of one token more": (scheduler, STEPS, "produced >= asked", "produced > asked"),
    "the longest sequence before the length": (
        scheduler,
        STEPS,
        "    reason = jnp.where(total >= memory.max_len, Reason.MAX_MODEL_LEN, reason)\n"
        "    reason = jnp.where(produced >= asked, Reason.LENGTH, reason)\n",
        "    reason = jnp.where(produced >= asked, Reason.LENGTH, reason)\n"
        "    reason = jnp.where(total >= memory.max_len, Reason.MAX_MODEL_LEN, reason)\n",
    ),
    "the length before the stop token": (
        scheduler,
        STEPS,
        "    reason = jnp.where(produced >= asked, Reason.LENGTH, reason)\n"
        "    reason = jnp.where(tokens == requests.stop_token, Reason.STOP_TOKEN, reason)\n",
        "    reason = jnp.where(tokens == requests.stop_token, Reason.STOP_TOKEN, reason)\n"
        "    reason = jnp.where(produced >= asked, Reason.LENGTH, reason)\n",
    ),
    "who reads a prompt stops": (
        scheduler,
        STEPS,
        "done = plan.samples & (reason != Reason.NONE)",
        "done = reason != Reason.NONE",
    ),
    "the background before the release": (
        scheduler,
        each(test_simulate.test_every_step_is_that_of_the_oracle_and_strides_change_nothing, "vattention"),
        "memory.background(memory.release(state.memory, done))",
        "memory.release(memory.background(state.memory), done)",
    ),
    "an end before the step": (scheduler, STEPS, ".at[ended].set(now,", ".at[ended].set(state.clock,"),
    # ---- who is aborted ----
    "who has not come leaves the queue": (
        scheduler,
        QUEUE,
        " & (jnp.arange(requests.count) < state.arrived)\n",
        "\n",
    ),
    "who is aborted still waits": (
        scheduler,
        QUEUE,
        "queued=state.queued - jnp.sum(waited, dtype=jnp.int32)",
        "queued=state.queued",
    ),
    "who has ended is aborted": (
        scheduler,
        QUEUE,
        "reason=jnp.where(ends, Reason.ABORTED",
        "reason=jnp.where(unwanted, Reason.ABORTED",
    ),
    "who has ended ends again": (
        scheduler,
        QUEUE,
        "ended_at=jnp.where(ends, state.clock",
        "ended_at=jnp.where(unwanted, state.clock",
    ),
    "who is aborted stays on the host": (scheduler, ABORTED, "state = discard_parked(memory, state, ends)", "pass"),
    "one beam is aborted": (scheduler, BEAMS, "unwanted = groups[requests.leaders]", "pass"),
    # ---- the queue ----
    "a tick late": (queue, RECORDS, "(at <= state.clock)", "(at < state.clock)"),
    "who was aborted comes": (queue, QUEUE, "queued + waits.astype(jnp.int32)", "queued + 1"),
    "the future waits": (
        queue,
        next_in_order,
        "waits = (status == Status.WAITING) & (ids < state.arrived)",
        "waits = status == Status.WAITING",
    ),
    "one among equals": (queue, next_in_order, " | ((key == last) & (ids > after))", ""),
    "the last among equals": (
        queue,
        next_in_order,
        "jnp.min(jnp.where(waits & (key == here), ids, nobody))",
        "jnp.max(jnp.where(waits & (key == here), ids, -1))",
    ),
    "the last window among equals": (queue, next_in_order, "(here < least)", "(here <= least)"),
    "the last window": (queue, next_in_order, "jnp.any(waits) & ((here < least) | (best == nobody))", "jnp.any(waits)"),
    "nobody whose key is the largest": (queue, next_in_order, "((here < least) | (best == nobody))", "(here < least)"),
    "shortest outputs": (
        queue,
        next_in_order,
        "of(requests.prompt_lens) + of(requests.predicted_lens)",
        "of(requests.predicted_lens)",
    ),
    "the least important first": (queue, next_in_order, "-1 - of(requests.priorities)", "of(requests.priorities)"),
    "minus the lowest priority": (queue, next_in_order, "-1 - of(requests.priorities)", "-of(requests.priorities)"),
    "nobody to come comes at zero": (queue, STEPS, "jnp.where(following < requests.count, at, state.clock)", "at"),
    "who was aborted is awaited": (
        queue,
        QUEUE,
        "following = first_waiting(requests, state, state.arrived)",
        "following = state.arrived",
    ),
    # ---- who is admitted ----
    "admissions without a token": (waiting, STEPS, "(left > 0)", "(left >= 0)"),
    "a prompt that just fits waits": (waiting, POLICIES, "(known <= left)", "(known < left)"),
    "a prompt that no step could hold waits": (waiting, POLICIES, " | (known > max_new_tokens))", ")"),
    "what is brought has to fit, too": (
        waiting,
        RECORDS,
        "            known -= _delivered(requests, carry.so_far.state, carry.candidate, known)\n",
        "            pass\n",
    ),
    "a prompt of a group is computed to the end": (
        waiting,
        GROUPS,
        "wanted = known - stored - together.astype(jnp.int32)",
        "wanted = known - stored",
    ),
    "each candidate has all that is left": (
        waiting,
        STEPS,
        "jnp.minimum(wanted, token_budget - jnp.sum(so_far.granted))",
        "jnp.minimum(wanted, token_budget)",
    ),
    "nobody overtakes": (waiting, OVERTAKING, "later & (carry.completes | ~policy.overtake)", "later"),
    "admitted when it came back": (waiting, STEPS, "runs & (admitted_at < 0)", "runs"),
    "all of it is brought": (waiting, RECORDS, "jnp.minimum(brought, known - 1)", "jnp.minimum(brought, known)"),
    "it is brought again": (
        waiting,
        RECORDS,
        "return jnp.where(is_new, jnp.minimum(brought, known - 1), 0)",
        "return jnp.minimum(brought, known - 1)",
    ),
    "one adapter too many": (
        waiting,
        POLICIES,
        "dtype=jnp.int32) >= policy.max_adapters",
        "dtype=jnp.int32) > policy.max_adapters",
    ),
    "an adapter that runs is one more": (waiting, POLICIES, "~jnp.any(running == wanted) & ", ""),
    "each row has an adapter": (
        waiting,
        POLICIES,
        "(running != none) & jnp.concatenate([jnp.ones(1, jnp.bool), running[1:] != running[:-1]])",
        "running != none",
    ),
    "free rows have one, too": (waiting, POLICIES, "is_other = (running != none) & ", "is_other = "),
    "who has not come is next": (
        waiting,
        STEPS,
        "following = jnp.where(following < state.arrived, following, nobody)",
        "pass",
    ),
    "the others of a group wait their turn": (
        waiting,
        PASSED_OVER,
        "return state, jnp.where(completes, jnp.argmax(missing).astype(jnp.int32), following), completes",
        "return state, following, completes",
    ),
    "no room for a single token": (
        waiting,
        STEPS,
        "too_long = prompt >= memory.max_len",
        "too_long = prompt > memory.max_len",
    ),
    "room for the last token": (
        waiting,
        POLICIES,
        ", memory.max_len) - 1\n        # Room",
        ", memory.max_len)\n        # Room",
    ),
    "room for the prediction alone": (waiting, POLICIES, "jnp.maximum(known, predicted), known", "predicted, known"),
    "room that a group waits for": (
        waiting,
        SWAPS,
        "policy.reserve_output & ((requests.group_sizes[candidate] == 1) | (not memory.can_fork))",
        "policy.reserve_output",
    ),
    "room for one of a group": (
        waiting,
        GROUPS,
        "sequences=requests.group_sizes[candidate] if memory.can_fork else 1",
        "sequences=1",
    ),
    "who completes a group keeps to the watermark": (
        waiting,
        COMPLETED,
        "memory.swap_in(memory_state, place, ~jnp.any(together))",
        "memory.swap_in(memory_state, place, jnp.bool(True))",
    ),
    "who never comes back stays on the host": (
        waiting,
        NEVER_BACK,
        "            memory_state = run_if(ends, lambda state: memory.discard(state, place)[0], memory_state)\n",
        "            del ends\n",
    ),
    "a fork of what is not there yet": (
        waiting,
        GROUPS,
        "ready = follows & (stored[parent] >= prompt - 1)",
        "ready = follows",
    ),
    "a fork of the whole prompt": (
        waiting,
        GROUPS,
        "ready = follows & (stored[parent] >= prompt - 1)",
        "ready = follows & (stored[parent] >= prompt)",
    ),
    "who is refused waits": (
        waiting,
        RECORDS,
        "queued=state.queued - (runs | ends).astype(jnp.int32)",
        "queued=state.queued - runs.astype(jnp.int32)",
    ),
    "who is refused has a place": (
        waiting,
        NEVER_BACK,
        "places.at[jnp.where(runs | ends,",
        "places.at[jnp.where(runs,",
    ),
    "too long before no output": (
        waiting,
        STEPS,
        "    reason = jnp.where(requests.output_lens[candidate] == 0, Reason.NO_OUTPUT, reason)\n",
        "    reason = jnp.where((requests.output_lens[candidate] == 0) & ~too_long, Reason.NO_OUTPUT, reason)\n",
    ),
    "a refusal has no time": (
        waiting,
        STEPS,
        "ended_at=progress.ended_at.at[at_end].set(state.clock, mode",
        "ended_at=progress.ended_at.at[at_end].set(-1, mode",
    ),
    "all were asked though the budget is spent": (
        waiting,
        RECORDS,
        "~closed & (last.closed | (last.candidate >= requests.count))",
        "~closed",
    ),
    "what was known counts as found": (
        waiting,
        RECORDS,
        "hit_tokens=so_far.hit_tokens + stored",
        "hit_tokens=so_far.hit_tokens + known",
    ),
    # ---- who has to go ----
    "victims still want room": (
        preemption,
        STEPS,
        "lengths + jnp.where(victims, 0, granted)",
        "lengths + granted",
    ),
    "a block to spare": (
        preemption,
        STEPS,
        "(jnp.sum(demand) > memory.available",
        "(jnp.sum(demand) >= memory.available",
    ),
    "what is parked is lost": (preemption, SWAPS, "jnp.where(lost, stored, 0)", "stored"),
    "the first among equals goes": (
        preemption,
        STEPS,
        "last = jnp.max(jnp.where(candidates, state.row_request, -1))",
        "last = jnp.min(jnp.where(candidates, state.row_request, requests.count))",
    ),
    "the last row goes": (
        preemption,
        STEPS,
        "        return running & (state.row_request == last)\n",
        "        del last\n        rows = jnp.arange(memory.rows)\n"
        "        return rows == jnp.max(jnp.where(candidates, rows, -1))\n",
    ),
    "the most work goes": (
        preemption,
        LEAST_WORK,
        "least = jnp.min(jnp.where(running, worth, 2**31 - 1))",
        "least = jnp.max(jnp.where(running, worth, -1))",
    ),
    "work and priority exchanged": (
        preemption,
        BY_PRIORITY,
        "        memory.seqs(state.memory).lengths,  # least_work\n"
        "        by_row(requests.priorities, state.row_request, 0),  # priority\n",
        "        by_row(requests.priorities, state.row_request, 0),  # priority\n"
        "        memory.seqs(state.memory).lengths,  # least_work\n",
    ),
    "a group is torn": (
        preemption,
        GROUPS,
        "return running & (leaders == jnp.max(jnp.where(candidates, leaders, -1)))",
        "return running & (state.row_request == jnp.max(jnp.where(candidates, state.row_request, -1)))",
    ),
    "nobody counts how often": (
        preemption,
        STEPS,
        "preemptions=state.progress.preemptions.at[at].add(1, mode",
        "preemptions=state.progress.preemptions.at[at].add(0, mode",
    ),
    "who is parked is released": (preemption, SWAPS, "victims & lost)", "victims)"),
    "victims do not wait": (
        preemption,
        RECORDS,
        "queued=state.queued + jnp.sum(victims, dtype=jnp.int32)",
        "queued=state.queued",
    ),
    "victims are behind the mark": (
        preemption,
        STEPS,
        "first=jnp.minimum(state.first, jnp.min(jnp.where(victims, state.row_request, nobody)))",
        "first=state.first",
    ),
    # ---- policies and states ----
    "decode first is prefill first": (policy, POLICIES, 'policy.first == "prefill"', 'policy.first == "decode"'),
    "options from zero": (policy, POLICIES, "enumerate(options[1:], 1)", "enumerate(options[1:])"),
    "orders for victims": (
        policy,
        POLICIES,
        "typing.get_args(Victim).index(policy.victim)",
        "typing.get_args(Order).index(policy.order)",
    ),
    "a budget of one less is enough": (
        policy,
        REFUSED,
        'require_int("token_budget", token_budget) < memory.rows',
        'require_int("token_budget", token_budget) < memory.rows - 1',
    ),
    "prompts alone are known": (
        scheduler_state,
        STEPS,
        "by_row(requests.prompt_lens, row_request, 0) + by_row(progress.generated, row_request, 0)",
        "by_row(requests.prompt_lens, row_request, 0)",
    ),
    "free rows are zero": (scheduler_state, POLICIES, "fill_value=free", "fill_value=0"),
    "all begin on the host": (
        scheduler_state,
        SWAPS,
        "jnp.full(requests.count, memory.rows, jnp.int32)",
        "jnp.zeros(requests.count, jnp.int32)",
    ),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_noticed(name):
    assert_noticed(*MISTAKES[name])
