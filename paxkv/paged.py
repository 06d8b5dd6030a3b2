"""Paged memory: blocks of a few tokens, handed out on demand and found through a block table."""

import dataclasses
import typing
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int32

from pallas_kernels.paged_attention import paged_attention
from paxkv import block_tables
from paxkv.block_pool import BlockPool, init_block_pool
from paxkv.block_tables import blocks_for
from paxkv.memory import Ask, MapCalls, no_map_calls, require_int32
from paxkv.outcomes import Outcome, record, select_outcome
from paxkv.seqs import Seqs, advance, check_append, init_seqs, lowest_free_row, occupy, vacate
from paxkv.sizes import require_int


@typing.no_type_check
@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class PagedState:
    """Who owns which block. The blocks of a row are `tables[row, :ceil(lengths[row] / block_size)]`."""

    seqs: Seqs
    pool: BlockPool
    tables: jax.Array  # i32[rows, blocks_per_seq]; the sentinel num_blocks where a row has no block


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class Paged:
    """Paged memory of `num_blocks` blocks of `block_size` tokens. Implements `KVMemory[PagedState]`.

    `watermark_blocks` are kept back from admissions while anything runs, so that running sequences can grow
    before one of them has to be preempted.
    """

    rows: int
    max_len: int
    block_size: int
    num_blocks: int
    watermark_blocks: int = 0

    def __post_init__(self) -> None:
        """Refuses sizes that are not positive or do not fit int32."""
        for name in ("rows", "max_len", "block_size", "num_blocks"):
            require_int(name, getattr(self, name))
        require_int("watermark_blocks", self.watermark_blocks, minimum=0)
        require_int32(slots=self.num_slots, table_entries=self.rows * self.blocks_per_seq)

    @property
    def num_slots(self) -> int:
        return self.num_blocks * self.block_size

    @property
    def capacity(self) -> int:
        return self.num_slots

    @property
    def num_units(self) -> int:
        return self.num_blocks

    @property
    def blocks_per_seq(self) -> int:
        """Width of a block table."""
        return -(-self.max_len // self.block_size)

    def init(self) -> PagedState:
        tables = jnp.full((self.rows, self.blocks_per_seq), self.num_blocks, jnp.int32)
        return PagedState(seqs=init_seqs(self.rows), pool=init_block_pool(self.num_blocks), tables=tables)

    def seqs(self, state: PagedState) -> Seqs:
        return state.seqs

    def admit(self, state: PagedState, ask: Ask) -> tuple[PagedState, Int32[Array, ""], Int32[Array, ""]]:
        row, has_row = lowest_free_row(state.seqs)
        need = blocks_for(ask.known_tokens, self.block_size)
        owed = jnp.sum(jnp.maximum(blocks_for(state.seqs.promised, self.block_size) - self.held(state), 0))
        reserve = jnp.where(jnp.any(state.seqs.active), self.watermark_blocks, 0)
        most = blocks_for(ask.most_tokens, self.block_size)
        never = (ask.most_tokens > self.max_len) | (most > self.num_blocks)
        later = ~has_row | (need + owed + reserve > state.pool.num_free)
        outcome = select_outcome((never, Outcome.NEVER), (later, Outcome.LATER))
        ok = outcome == Outcome.OK
        seqs = occupy(state.seqs, row, ask.known_tokens, ok)
        return dataclasses.replace(state, seqs=seqs), jnp.where(ok, row, self.rows), outcome

    def demand(self, state: PagedState, new_lengths: Int32[Array, " rows"]) -> Int32[Array, " rows"]:
        return blocks_for(new_lengths, self.block_size) - self.held(state)

    def held(self, state: PagedState) -> Int32[Array, " rows"]:
        return blocks_for(state.seqs.lengths, self.block_size)

    def available(self, state: PagedState) -> Int32[Array, ""]:
        return state.pool.num_free

    def append(
        self, state: PagedState, new_tokens: Int32[Array, " rows"], max_new_tokens: int
    ) -> tuple[PagedState, Int32[Array, ""]]:
        malformed = check_append(state.seqs, new_tokens, self.max_len, max_new_tokens)
        new_lengths = state.seqs.lengths + jnp.where(jnp.any(malformed), 0, new_tokens)
        tables, pool, served = block_tables.grow(
            state.tables, state.pool, state.seqs.lengths, new_lengths, self.block_size, max_new_tokens
        )
        seqs, outcome = advance(state.seqs, new_lengths, malformed, served)
        return PagedState(seqs=seqs, pool=pool, tables=tables), outcome

    def release(self, state: PagedState, rows: Bool[Array, " rows"]) -> PagedState:
        seqs, released = vacate(state.seqs, rows)
        tables, pool, bad = block_tables.empty_rows(state.tables, state.pool, released)
        faults = record(seqs.faults, Outcome.DOUBLE_FREE, bad)
        return PagedState(seqs=dataclasses.replace(seqs, faults=faults), pool=pool, tables=tables)

    def background(self, state: PagedState) -> PagedState:
        return state

    def slots(
        self, state: PagedState, row: Int32[Array, " tokens"], position: Int32[Array, " tokens"]
    ) -> Int32[Array, " tokens"]:
        return block_tables.slot_of(state.tables, row, position, self.block_size, self.num_blocks)

    def attend(
        self,
        state: PagedState,
        q: Float[Array, "tokens q_heads head_dim"],
        k: Float[Array, "slots kv_heads head_dim"],
        v: Float[Array, "slots kv_heads head_dim"],
        cu_q_lens: Int32[Array, " rows_and_one"],
        *,
        max_q_len: int,
        backend: str | Sequence[str] | None = None,
    ) -> Float[Array, "tokens q_heads head_dim"]:
        in_blocks = (self.num_blocks, self.block_size, *k.shape[1:])
        return paged_attention(
            q,
            k.reshape(in_blocks),
            v.reshape(in_blocks),
            state.tables,
            state.seqs.lengths,
            cu_q_lens,
            max_q_len=max_q_len,
            backend=backend,
        )

    def request_slots(self, state: PagedState) -> tuple[Int32[Array, " rows"], Int32[Array, " rows"]]:
        given = self.held(state) * self.block_size
        return given, given

    def owners(self, state: PagedState) -> Int32[Array, " units"]:
        row = jnp.broadcast_to(jnp.arange(self.rows, dtype=jnp.int32)[:, None], state.tables.shape)
        return jnp.full(self.num_blocks, self.rows, jnp.int32).at[state.tables].set(row, mode="drop")

    def map_calls(self, state: PagedState) -> MapCalls:
        del state
        return no_map_calls()
