"""Reserved memory: each request gets one contiguous range when it is admitted, as long as it may ever grow.

This is the memory of Orca as PagedAttention (SOSP'23, section 6.1) models it, on a buddy allocator, with three
guesses at how long that is. What a request was given but never fills is lost, and so is what lies between ranges.
"""

import dataclasses
import typing
from collections.abc import Sequence
from typing import Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int32

from paxkv.block_tables import cdiv
from paxkv.buddy import best_fit, ceil_log2, largest_order
from paxkv.kv_cache import AttentionSpec, KVPool, attend_ranges
from paxkv.memory import Ask, Limits, MapCalls, SharesNothing, Usage, no_map_calls, require_int32, usage_of_rows
from paxkv.memory import limits as make_limits
from paxkv.outcomes import Outcome, select_outcome
from paxkv.seqs import Seqs, advance, check_append, init_seqs, longer, lowest_free_row, occupy, vacate
from paxkv.sizes import require_int

Policy = Literal["max", "pow2", "oracle"]


@typing.no_type_check
@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class ReservedState:
    """Who has which range. The row owns `2**orders * min_block` slots and may use the first `sizes` of them."""

    seqs: Seqs
    limits: Limits
    starts: jax.Array  # i32[rows]; first slot, 0 for a free row
    sizes: jax.Array  # i32[rows]; slots asked for, 0 for a free row
    orders: jax.Array  # i32[rows]; of the buddy block, 0 for a free row


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class Reserved(SharesNothing):
    """Reserved memory of `num_slots` slots. Implements `KVMemory[ReservedState]`; its unit is a leaf of the buddy tree.

    Nothing is ever demanded after admission: growing within the reservation is free, and growing past it is a
    fault, `OUT_OF_RANGE`.

    Attributes:
      rows: sequences in flight at most.
      max_len: tokens of one sequence at most.
      num_slots: slots of the arena; any multiple of `min_block`.
      policy: how much a request reserves. "max": `max_len`. "pow2": its prompt, and its output rounded up to a power of
        two, at most `max_len` together. "oracle": exactly what it will have at its end, which no server can know.
      min_block: slots of the smallest range, a power of two.
    """

    rows: int
    max_len: int
    num_slots: int
    policy: Policy
    min_block: int = 1

    def __post_init__(self) -> None:
        """Refuses sizes that are not positive, do not fit int32 or do not fill the arena, and unknown policies."""
        for name in ("rows", "max_len", "num_slots", "min_block"):
            require_int(name, getattr(self, name))
        require_int32(slots_of_the_padded_arena=2 * self.num_slots, longest_block=2 * self.max_len)
        if self.policy not in typing.get_args(Policy):
            raise ValueError(f"policy must be one of {', '.join(typing.get_args(Policy))}, got {self.policy!r}")
        if self.min_block.bit_count() != 1:
            raise ValueError(f"min_block must be a power of two, got {self.min_block}")
        if self.num_slots % self.min_block:
            raise ValueError(
                f"num_slots must be a multiple of min_block = {self.min_block}, got {self.num_slots}; "
                f"take {self.num_slots // self.min_block * self.min_block} slots or a smaller min_block"
            )

    @property
    def capacity(self) -> int:
        return self.num_slots

    @property
    def num_units(self) -> int:
        return self.num_slots // self.min_block

    @property
    def own_limits(self) -> Limits:
        return make_limits(self.num_units)

    def with_units(self, units: int) -> "Reserved":
        return dataclasses.replace(self, num_slots=units * self.min_block)

    def init(self, limits: Limits | None = None) -> ReservedState:
        zeros = jnp.zeros(self.rows, jnp.int32)
        return ReservedState(
            seqs=init_seqs(self.rows),
            limits=limits or self.own_limits,
            starts=zeros,
            sizes=jnp.zeros_like(zeros),
            orders=jnp.zeros_like(zeros),
        )

    def seqs(self, state: ReservedState) -> Seqs:
        return state.seqs

    def admit(self, state: ReservedState, ask: Ask) -> tuple[ReservedState, Int32[Array, ""], Int32[Array, ""]]:
        size = self.reservation(ask)
        order = ceil_log2(cdiv(size, self.min_block))
        row, has_row = lowest_free_row(state.seqs)
        ranges = (state.starts // self.min_block, state.orders, state.seqs.active)
        leaf, found = best_fit(*ranges, order, self.num_units, state.limits.units)
        never = (ask.most_tokens > self.max_len) | (order > largest_order(state.limits.units))
        outcome = select_outcome((never, Outcome.NEVER), (~has_row | ~found, Outcome.LATER))
        ok = outcome == Outcome.OK
        row = jnp.where(ok, row, self.rows)
        return (
            ReservedState(
                seqs=occupy(state.seqs, row, ask.known_tokens, ok),
                limits=state.limits,
                starts=state.starts.at[row].set(leaf * self.min_block, mode="drop"),
                sizes=state.sizes.at[row].set(size, mode="drop"),
                orders=state.orders.at[row].set(order, mode="drop"),
            ),
            row,
            outcome,
        )

    def reservation(self, ask: Ask) -> Int32[Array, ""]:
        """Slots that a request asks for, before the allocator rounds them up."""
        if self.policy == "max":
            return jnp.int32(self.max_len)
        if self.policy == "oracle":
            return ask.most_tokens
        output = ask.most_tokens - ask.prompt_tokens
        rounded = jnp.where(output > 0, 1 << ceil_log2(output), 0)
        return jnp.minimum(ask.prompt_tokens + rounded, self.max_len)

    def demand(self, state: ReservedState, new_lengths: Int32[Array, " rows"]) -> Int32[Array, " rows"]:
        del state
        return jnp.zeros_like(new_lengths)

    def held(self, state: ReservedState) -> Int32[Array, " rows"]:
        return jnp.where(state.seqs.active, 1 << state.orders, 0)

    def available(self, state: ReservedState) -> Int32[Array, ""]:
        del state
        return jnp.int32(0)

    def steady_steps(
        self, state: ReservedState, grows: Bool[Array, " rows"], steps: Int32[Array, ""]
    ) -> Int32[Array, ""]:
        del state, grows
        return steps

    def look_ahead(self, state: ReservedState, grows: Bool[Array, " rows"], steps: Int32[Array, ""]) -> ReservedState:
        return dataclasses.replace(state, seqs=longer(state.seqs, grows, steps))

    def append(
        self, state: ReservedState, new_tokens: Int32[Array, " rows"], max_new_tokens: int
    ) -> tuple[ReservedState, Int32[Array, ""]]:
        malformed = check_append(state.seqs, new_tokens, state.sizes, max_new_tokens)
        new_lengths = state.seqs.lengths + jnp.where(jnp.any(malformed), 0, new_tokens)
        seqs, outcome = advance(state.seqs, new_lengths, malformed, served=jnp.bool(True))
        return dataclasses.replace(state, seqs=seqs), outcome

    def release(self, state: ReservedState, rows: Bool[Array, " rows"]) -> ReservedState:
        seqs, released = vacate(state.seqs, rows)
        return ReservedState(
            seqs=seqs,
            limits=state.limits,
            starts=jnp.where(released, 0, state.starts),
            sizes=jnp.where(released, 0, state.sizes),
            orders=jnp.where(released, 0, state.orders),
        )

    def background(self, state: ReservedState) -> ReservedState:
        return state

    def slots(
        self, state: ReservedState, row: Int32[Array, " tokens"], position: Int32[Array, " tokens"]
    ) -> Int32[Array, " tokens"]:
        size = state.sizes.at[row].get(mode="fill", fill_value=0, wrap_negative_indices=False)
        start = state.starts.at[row].get(mode="fill", fill_value=0, wrap_negative_indices=False)
        return jnp.where((position >= 0) & (position < size), start + position, self.num_slots)

    def attend(
        self,
        state: ReservedState,
        q: Float[Array, "tokens q_heads head_dim"],
        k: KVPool,
        v: KVPool,
        cu_q_lens: Int32[Array, " rows_and_one"],
        spec: AttentionSpec,
        *,
        max_q_len: int,
        backend: str | Sequence[str] | None = None,
    ) -> Float[Array, "tokens q_heads head_dim"]:
        starts, lengths = state.starts, state.seqs.lengths
        return attend_ranges(q, k, v, starts, lengths, cu_q_lens, spec, max_q_len=max_q_len, backend=backend)

    def usage(self, state: ReservedState, final_lengths: Int32[Array, " rows"]) -> Usage:
        return usage_of_rows(state.limits.units * self.min_block, state.seqs, *self.request_slots(state), final_lengths)

    def request_slots(self, state: ReservedState) -> tuple[Int32[Array, " rows"], Int32[Array, " rows"]]:
        return state.sizes, self.held(state) * self.min_block

    def owners(self, state: ReservedState) -> Int32[Array, " units"]:
        # A running sum over the leaves that rises where a range begins and falls where it ends.
        held = self.held(state)
        first = state.starts // self.min_block
        change = jnp.where(state.seqs.active, jnp.arange(self.rows, dtype=jnp.int32) - self.rows, 0)
        steps = jnp.zeros(self.num_units, jnp.int32).at[first].add(change)
        return self.rows + jnp.cumsum(steps.at[first + held].add(-change, mode="drop"))

    def map_calls(self, state: ReservedState) -> MapCalls:
        del state
        return no_map_calls()
