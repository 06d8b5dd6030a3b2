"""vAttention memory: one virtual range per sequence, backed by page groups that are mapped as it fills.

The mechanism is that of vAttention (arXiv 2405.04437): the KV cache consists of `buffers` virtual tensors (keys
and values of each layer) of shape `[rows, max_len, kv_heads, head_dim]`, and a page group is one physical page in
each of them. Attention sees plain contiguous memory; what is paged is the address space.

XLA cannot remap physical pages, so here the arrays are as large as the virtual tensors, and the mapping is kept
as a count: which rows have how many groups, how often the driver was called, and for whom a step had to wait.
"""

import dataclasses
import math
import typing
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int32

from paxkv.kv_cache import AttentionSpec, KVPool, attend_ranges
from paxkv.memory import Ask, Limits, MapCalls, SharesNothing, Usage, no_map_calls, require_int32, usage_of_rows
from paxkv.memory import limits as make_limits
from paxkv.outcomes import Outcome, select_outcome
from paxkv.seqs import Seqs, advance, check_append, init_seqs, longer, occupy, vacate
from paxkv.sizes import require_bool, require_int


@typing.no_type_check
@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class VAttentionState:
    """Who has how much memory. Physical groups are interchangeable, so a count per row says everything."""

    seqs: Seqs
    limits: Limits
    mapped: jax.Array  # i32[rows]; groups at the start of the row's range, also of a row that is idle
    calls: MapCalls


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class VAttention(SharesNothing):
    """vAttention memory of `num_groups` page groups. Implements `KVMemory[VAttentionState]`.

    What it does, exactly. A row *needs* `ceil(tokens * token_bytes / page_bytes)` groups; whatever it has mapped
    beyond that is surplus, and an idle row needs none. The pool is free when `num_groups` exceed all mapped ones.

    - *Reclaiming* `n` groups walks the rows from the highest id down and unmaps the whole surplus of each, until at
      least `n` groups were unmapped.
    - `admit` takes, of the idle rows, the one with the fewest mapped groups among those that have enough for the
      known tokens; if none has enough, the one with the most. Ties go to the lowest id.
    - `append` maps what each row misses for its new length, reclaiming first what the free pool is short of. The
      step waits for these maps.
    - `release` leaves the groups mapped for the next sequence in this row, or unmaps them if not `deferred_reclaim`.
    - `background` runs beside the computation, unless `lookahead_steps` is 0, in two parts. First, each live row should
      have what one more token needs: rows are served in ascending order as long as free groups and surplus beyond that
      need suffice, reclaiming what is short; the first row that cannot be served ends this part. Second, up to
      `background_groups` of the groups that are free by then go to live rows that have too little for
      `lookahead_steps` more tokens, one group each, first to the row that has room for the fewest further
      tokens; ties go to the lowest id. A row never gets more than `max_len` tokens need.

    Attributes:
      rows: sequences in flight at most; the first axis of the virtual tensors.
      max_len: tokens of one sequence at most; their second axis.
      num_groups: page groups that the memory budget pays for.
      page_bytes: bytes of one physical page.
      token_bytes: bytes of one token in one buffer, `kv_heads * head_dim * element_bytes`.
      buffers: virtual tensors, two per layer; mapping or unmapping a group takes a driver call for each.
      lookahead_steps: how many tokens ahead the background maps; 0 for none, so that steps wait for all maps.
      background_groups: most groups that one step maps ahead of need.
      deferred_reclaim: keep the groups of released rows mapped until they are wanted elsewhere.
      watermark_groups: groups kept back from admissions while anything runs.
    """

    rows: int
    max_len: int
    num_groups: int
    page_bytes: int
    token_bytes: int
    buffers: int
    lookahead_steps: int = 10
    background_groups: int = 2
    deferred_reclaim: bool = True
    watermark_groups: int = 0

    def __post_init__(self) -> None:
        """Refuses sizes that are not positive or do not fit int32."""
        for name in ("rows", "max_len", "num_groups", "page_bytes", "token_bytes", "buffers"):
            require_int(name, getattr(self, name))
        for name in ("lookahead_steps", "background_groups", "watermark_groups"):
            require_int(name, getattr(self, name), minimum=0)
        require_bool("deferred_reclaim", self.deferred_reclaim)
        token, page = self._ratio
        require_int32(
            virtual_slots=self.num_slots,
            capacity=self.capacity,
            virtual_groups=self.rows * (-(-self.max_len * token // page)),
            max_len_in_common_units_of_token_and_page=self.max_len * token + page,
        )

    @property
    def _ratio(self) -> tuple[int, int]:
        """`token_bytes` to `page_bytes` in lowest terms: tokens need not divide a page."""
        divisor = math.gcd(self.token_bytes, self.page_bytes)
        return self.token_bytes // divisor, self.page_bytes // divisor

    @property
    def num_slots(self) -> int:
        return self.rows * self.max_len

    @property
    def capacity(self) -> int:
        return self.num_groups * self.page_bytes // self.token_bytes

    @property
    def num_units(self) -> int:
        return self.num_groups

    def _capacity_of(self, groups: Int32[Array, ""]) -> Int32[Array, ""]:
        """Whole tokens of so many groups laid end to end."""
        token, page = self._ratio
        return groups // token * page + groups % token * page // token  # `groups * page` could pass int32

    def groups_for(self, tokens: Int32[Array, "*n"]) -> Int32[Array, "*n"]:
        """Groups that back `tokens <= max_len` tokens; a token may lie across two pages."""
        token, page = self._ratio
        return (tokens * token + (page - 1)) // page

    def room(self, state: VAttentionState) -> Int32[Array, " rows"]:
        """Whole tokens that the mapped part of each row's range can hold."""
        token, page = self._ratio
        return jnp.minimum(state.mapped * page // token, self.max_len)

    @property
    def own_limits(self) -> Limits:
        return make_limits(self.num_groups, self.watermark_groups)

    def with_units(self, units: int) -> "VAttention":
        return dataclasses.replace(self, num_groups=units, watermark_groups=0)

    def init(self, limits: Limits | None = None) -> VAttentionState:
        return VAttentionState(
            seqs=init_seqs(self.rows),
            limits=limits or self.own_limits,
            mapped=jnp.zeros(self.rows, jnp.int32),
            calls=no_map_calls(),
        )

    def seqs(self, state: VAttentionState) -> Seqs:
        return state.seqs

    def admit(self, state: VAttentionState, ask: Ask) -> tuple[VAttentionState, Int32[Array, ""], Int32[Array, ""]]:
        need = jnp.minimum(self.groups_for(ask.promised_tokens), state.limits.units)
        owed = jnp.sum(jnp.maximum(self.groups_for(state.seqs.promised) - self.held(state), 0))
        reserve = jnp.where(jnp.any(state.seqs.active), state.limits.watermark, 0)
        never = (ask.most_tokens > self.max_len) | (self.groups_for(ask.most_tokens) > state.limits.units)
        later = jnp.all(state.seqs.active) | (need + owed + reserve > self.available(state))
        outcome = select_outcome((never, Outcome.NEVER), (later, Outcome.LATER))
        ok = outcome == Outcome.OK
        row = jnp.where(ok, _best_fit(state, need), self.rows)
        seqs = occupy(state.seqs, row, ask.promised_tokens, ok)
        return dataclasses.replace(state, seqs=seqs), row, outcome

    def demand(self, state: VAttentionState, new_lengths: Int32[Array, " rows"]) -> Int32[Array, " rows"]:
        return self.groups_for(new_lengths) - self.held(state)

    def held(self, state: VAttentionState) -> Int32[Array, " rows"]:
        return self.groups_for(state.seqs.lengths)

    def available(self, state: VAttentionState) -> Int32[Array, ""]:
        return state.limits.units - jnp.sum(self.held(state))

    def steady_steps(
        self, state: VAttentionState, grows: Bool[Array, " rows"], steps: Int32[Array, ""]
    ) -> Int32[Array, ""]:
        # As long as every row has room for what the background looks ahead to, nothing is mapped.
        ahead = self.lookahead_steps if self.background_groups else min(self.lookahead_steps, 1)
        room = self.room(state)
        spare = jnp.where(room < self.max_len, room - state.seqs.lengths - ahead, self.max_len - state.seqs.lengths)
        return jnp.clip(jnp.min(jnp.where(state.seqs.active, spare, steps)), 0, steps)

    def look_ahead(
        self, state: VAttentionState, grows: Bool[Array, " rows"], steps: Int32[Array, ""]
    ) -> VAttentionState:
        return dataclasses.replace(state, seqs=longer(state.seqs, grows, steps))

    def append(
        self, state: VAttentionState, new_tokens: Int32[Array, " rows"], max_new_tokens: int
    ) -> tuple[VAttentionState, Int32[Array, ""]]:
        malformed = check_append(state.seqs, new_tokens, self.max_len, max_new_tokens)
        new_lengths = state.seqs.lengths + jnp.where(jnp.any(malformed), 0, new_tokens)
        need = self.groups_for(new_lengths)
        served = jnp.sum(need) <= state.limits.units
        missing = jnp.where(served, jnp.maximum(need - state.mapped, 0), 0)
        state = self._map(state, missing, keep=need, background=False)
        seqs, outcome = advance(state.seqs, new_lengths, malformed, served)
        return dataclasses.replace(state, seqs=seqs), outcome

    def release(self, state: VAttentionState, rows: Bool[Array, " rows"]) -> VAttentionState:
        seqs, released = vacate(state.seqs, rows)
        state = dataclasses.replace(state, seqs=seqs)
        if self.deferred_reclaim:
            return state
        return self._unmap(state, jnp.where(released, state.mapped, 0))

    def background(self, state: VAttentionState) -> VAttentionState:
        return self._map_ahead(self._map_next(state)) if self.lookahead_steps else state

    def slots(
        self, state: VAttentionState, row: Int32[Array, " tokens"], position: Int32[Array, " tokens"]
    ) -> Int32[Array, " tokens"]:
        backed = jnp.where(state.seqs.active, self.room(state), 0)
        end = backed.at[row].get(mode="fill", fill_value=0, wrap_negative_indices=False)
        return jnp.where((position >= 0) & (position < end), row * self.max_len + position, self.num_slots)

    def attend(
        self,
        state: VAttentionState,
        q: Float[Array, "tokens q_heads head_dim"],
        k: KVPool,
        v: KVPool,
        cu_q_lens: Int32[Array, " rows_and_one"],
        spec: AttentionSpec,
        *,
        max_q_len: int,
        backend: str | Sequence[str] | None = None,
    ) -> Float[Array, "tokens q_heads head_dim"]:
        starts = jnp.arange(self.rows, dtype=jnp.int32) * self.max_len
        return attend_ranges(q, k, v, starts, state.seqs.lengths, cu_q_lens, spec, max_q_len=max_q_len, backend=backend)

    def usage(self, state: VAttentionState, final_lengths: Int32[Array, " rows"]) -> Usage:
        capacity = self._capacity_of(state.limits.units)
        return usage_of_rows(capacity, state.seqs, *self.request_slots(state), final_lengths)

    def request_slots(self, state: VAttentionState) -> tuple[Int32[Array, " rows"], Int32[Array, " rows"]]:
        given = jnp.where(state.seqs.active, self.room(state), 0)
        return given, given

    def owners(self, state: VAttentionState) -> Int32[Array, " units"]:
        # Groups have no identity: the picture lines them up by row. Those of idle rows count as free.
        ends = jnp.cumsum(jnp.where(state.seqs.active, state.mapped, 0))
        unit = jnp.arange(self.num_groups, dtype=jnp.int32)
        return jnp.searchsorted(ends, unit, side="right").astype(jnp.int32)

    def map_calls(self, state: VAttentionState) -> MapCalls:
        return state.calls

    def _unmap(self, state: VAttentionState, groups: Int32[Array, " rows"]) -> VAttentionState:
        """Unmaps the last `groups` of each row."""
        calls = dataclasses.replace(state.calls, unmap=state.calls.unmap + jnp.sum(groups) * self.buffers)
        return dataclasses.replace(state, mapped=state.mapped - groups, calls=calls)

    def _map(
        self,
        state: VAttentionState,
        groups: Int32[Array, " rows"],
        keep: Int32[Array, " rows"],
        *,
        background: bool,
    ) -> VAttentionState:
        """Maps `groups` more in each row; what is not free is reclaimed from rows that have more than `keep`."""
        wanted = jnp.sum(groups)
        short = wanted - (state.limits.units - jnp.sum(state.mapped))
        surplus = jnp.maximum(state.mapped - keep, 0)
        of_higher_rows = jnp.cumsum(surplus[::-1])[::-1] - surplus
        state = self._unmap(state, jnp.where(of_higher_rows < short, surplus, 0))
        made = wanted * self.buffers
        calls = state.calls
        if background:
            calls = dataclasses.replace(calls, background=calls.background + made)
        else:
            calls = dataclasses.replace(calls, sync=calls.sync + made)
        return dataclasses.replace(state, mapped=state.mapped + groups, calls=calls)

    def _map_next(self, state: VAttentionState) -> VAttentionState:
        """What one more token needs, for as many live rows as there is memory for."""
        next_length = jnp.minimum(state.seqs.lengths + 1, self.max_len)
        need = jnp.where(state.seqs.active, self.groups_for(next_length), 0)
        missing = jnp.maximum(need - state.mapped, 0)
        reachable = state.limits.units - jnp.sum(jnp.minimum(state.mapped, need))
        served = jnp.cumsum(missing) <= reachable
        return self._map(state, jnp.where(served, missing, 0), keep=need, background=True)

    def _map_ahead(self, state: VAttentionState) -> VAttentionState:
        """One group each for the live rows that run out of room first, while any is free."""
        horizon = jnp.minimum(state.seqs.lengths + self.lookahead_steps, self.max_len)
        room = self.room(state)
        crosses = state.seqs.active & (horizon > room)
        left = jnp.where(crosses, room - state.seqs.lengths, self.max_len + 1)
        _, first = jax.lax.top_k(-left, min(self.background_groups, self.rows))  # ties: lowest row first
        chosen = crosses[first] & (jnp.arange(first.size) < state.limits.units - jnp.sum(state.mapped))
        at = jnp.where(chosen, first, self.rows)
        groups = jnp.zeros_like(state.mapped).at[at].set(1, mode="drop")
        return self._map(state, groups, keep=state.mapped, background=True)


def _best_fit(state: VAttentionState, need: Int32[Array, ""]) -> Int32[Array, ""]:
    """The idle row that wastes the fewest mapped groups, or else needs the fewest new ones."""
    idle = ~state.seqs.active
    enough = idle & (state.mapped >= need)
    fewest = jnp.argmin(jnp.where(enough, state.mapped, jnp.iinfo(jnp.int32).max))
    most = jnp.argmax(jnp.where(idle, state.mapped, -1))
    return jnp.where(jnp.any(enough), fewest, most).astype(jnp.int32)
