"""Paged memory: blocks handed out on demand and found through block tables, as PagedAttention does."""

import dataclasses
import math
import typing
from collections.abc import Sequence
from typing import Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int32

from pallas_kernels.paged_attention import paged_attention
from paxkv import block_tables, chains, lifecycle, prefix_cache, publishing, sharing, swap, swap_state
from paxkv.admission import Hit, adopt, look_up, no_hit
from paxkv.block_pool import BlockPool, give_back, init_block_pool, mark_kept, may_have_content, of_use, take
from paxkv.block_tables import blocks_for
from paxkv.cache_stats import no_stats
from paxkv.control_flow import run_if
from paxkv.growth import grow
from paxkv.kv_cache import AttentionSpec, KVCache, KVPool, copy_blocks, from_bits, to_bits
from paxkv.memory import Ask, Content, Limits, MapCalls, Usage, no_map_calls, require_int32, usage_of_rows
from paxkv.memory import limits as make_limits
from paxkv.outcomes import Outcome, select_outcome
from paxkv.paged_state import PagedState, required
from paxkv.pool_metrics import usage_of_blocks, usage_of_cached
from paxkv.prefix_cache import PrefixCache
from paxkv.seqs import Seqs, advance, check_append, init_seqs, longer, lowest_free_row, occupy
from paxkv.sizes import require_bool, require_int
from paxkv.swap_state import Moves
from paxkv.windows import Group

FreeOrder = Literal["recent_first", "fifo"]


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class Paged:
    """Paged memory of `num_blocks` blocks of `block_size` tokens. Implements `KVMemory[PagedState]`.

    Attributes:
      rows: most sequences in flight.
      max_len: most tokens of one sequence.
      block_size: tokens in a block, if all layers see all tokens.
      num_blocks: blocks in the pool.
      watermark_blocks: kept back from admissions while anything runs, so that running sequences can grow before one of
        them has to be preempted.
      free_order: `recent_first` takes the block that was given back last, and blocks with cached content after all
        others; `fifo` takes the one that has been free for longest.
      cache: how prefixes are cached; None for not at all.
      lookahead: slots beyond the tokens of a step that each growing sequence is given, for tokens it may draft.
      forks: whether sequences may be forked; copy-on-write is paid for in every append.
      groups: of layers, instead of `block_size`, if not all see all tokens.
      max_chunk: most tokens that a sequence computes in a step, which bounds what a window holds; None for any number.
      host_blocks: blocks of a second pool on the host, to which sequences can be swapped out; 0 for none.
    """

    rows: int
    max_len: int
    block_size: int
    num_blocks: int
    watermark_blocks: int = 0
    free_order: FreeOrder = "recent_first"
    cache: PrefixCache | None = None
    lookahead: int = 0
    forks: bool = False
    groups: tuple[Group, ...] = ()
    max_chunk: int | None = None
    host_blocks: int = 0

    def __post_init__(self) -> None:
        """Refuses sizes that are not positive or do not fit int32, and knobs of another type."""
        for name in ("rows", "max_len", "block_size", "num_blocks"):
            require_int(name, getattr(self, name))
        for name in ("watermark_blocks", "lookahead", "host_blocks"):
            require_int(name, getattr(self, name), minimum=0)
        if self.max_chunk is not None:
            require_int("max_chunk", self.max_chunk)
        if self.free_order not in typing.get_args(FreeOrder):
            raise ValueError(
                f"free_order: expected one of {', '.join(typing.get_args(FreeOrder))}, got {self.free_order!r}"
            )
        require_bool("forks", self.forks)
        if self.cache is not None and not isinstance(self.cache, PrefixCache):
            raise ValueError(f"cache: expected a PrefixCache, or None for no cache, got {self.cache!r}")
        if not isinstance(self.groups, tuple) or not all(isinstance(group, Group) for group in self.groups):
            raise ValueError(f"groups: expected a tuple of Group, got {self.groups!r}")
        if self.groups and self.block_size != self.groups[0].block_size:
            raise ValueError(
                f"block_size: expected that of the first group, {self.groups[0].block_size}, got {self.block_size}"
            )
        require_int32(
            slots=self.num_slots,
            table_entries=self.rows * self.blocks_per_seq,
            max_len_and_lookahead=self.max_len + self.lookahead,
            longest_view=max(group.window or group.chunk or 0 for group in self.layer_groups)
            + (self.max_chunk or self.max_len),
            watermark_blocks=self.watermark_blocks,
            host_slots=self.host_blocks * self.block_size,
        )

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
        """Width of the widest block table."""
        return max(-(-self.max_len // group.block_size) for group in self.layer_groups)

    @property
    def layer_groups(self) -> tuple[Group, ...]:
        """The groups of layers: one that sees everything unless `groups` says otherwise."""
        return self.groups or (Group(self.block_size),)

    @property
    def alignment(self) -> int:
        """Tokens of which every hit is a multiple."""
        return math.lcm(*(group.block_size for group in self.layer_groups))

    @property
    def own_limits(self) -> Limits:
        return make_limits(self.num_blocks, self.watermark_blocks)

    def with_units(self, units: int) -> "Paged":
        return dataclasses.replace(self, num_blocks=units, watermark_blocks=0)

    def init(self, limits: Limits | None = None) -> PagedState:
        limits = limits or self.own_limits
        groups = self.layer_groups
        widest = max(group.block_size for group in groups)
        state = PagedState(
            seqs=init_seqs(self.rows),
            pool=init_block_pool(self.num_blocks, limits.units),
            tables=tuple(
                block_tables.init_block_table(self.rows, -(-self.max_len // group.block_size), self.num_blocks)
                for group in groups
            ),
            limits=limits,
            epoch=jnp.int32(0),
            copies=sharing.no_copies(self.rows * len(groups), self.num_blocks) if self.forks else None,
            swap=swap_state.init_swap(
                self.host_blocks, self.num_blocks, self.rows, self.max_len, groups, self.cache is not None
            )
            if self.host_blocks
            else None,
        )
        if self.cache is None:
            return state
        return dataclasses.replace(
            state,
            contents=prefix_cache.init_contents(self.cache, self.num_blocks, widest),
            chains=chains.init_chains(self.rows, groups),
            stats=no_stats(),
            pins=jnp.zeros(self.num_blocks, jnp.int32),
        )

    def seqs(self, state: PagedState) -> Seqs:
        return state.seqs

    def admit(self, state: PagedState, ask: Ask) -> tuple[PagedState, Int32[Array, ""], Int32[Array, ""]]:
        row, has_row = lowest_free_row(state.seqs)
        hit = self._hit(state, ask)
        need = jnp.sum(jnp.maximum(self.most_held(ask.promised_tokens, hit.first) - (hit.end - hit.first), 0))
        # A prediction may be more than there is: then it waits until it is alone.
        need = jnp.minimum(need + hit.free, state.limits.units)
        reserve = jnp.where(jnp.any(state.seqs.active), state.limits.watermark, 0)
        most = jnp.sum(self.most_held(ask.most_tokens, jnp.zeros_like(hit.first)))
        if self.forks:  # the others share what the prompt fills, but for its last token
            shared = jnp.sum(jnp.stack([(ask.prompt_tokens - 1) // group.block_size for group in self.layer_groups]))
            most += jnp.where(jnp.asarray(ask.sequences) > 1, (ask.sequences - 1) * jnp.maximum(most - shared, 1), 0)
        never = (ask.known_tokens < 0) | (ask.most_tokens > self.max_len) | (most > state.limits.units)
        never |= jnp.asarray(ask.sequences) > self.rows
        later = ~has_row | (need + self.owed(state) + reserve > state.pool.num_free)
        outcome = select_outcome((never, Outcome.NEVER), (later, Outcome.LATER))
        ok = outcome == Outcome.OK
        row = jnp.where(ok, row, self.rows)
        state = dataclasses.replace(state, seqs=occupy(state.seqs, row, ask.promised_tokens, ok, hit.tokens))
        if self.cache is not None and ask.content is not None:
            state = adopt(self, state, row, ask.content, ask.known_tokens, hit)
        return state, row, outcome

    def _hit(self, state: PagedState, ask: Ask) -> Hit:
        if self.cache is None:
            return no_hit(len(self.layer_groups))
        if ask.content is None:
            raise ValueError(
                "ask.content: expected the tokens of the request, as the memory has a prefix cache, got None"
            )
        return look_up(self, state, ask.content, ask.known_tokens)

    def most_held(self, tokens: Int32[Array, "*n"], first: Int32[Array, "*n groups"]) -> Int32[Array, "*n groups"]:
        """Blocks that a sequence of so many tokens comes to hold at once, which begins without its `first` ones."""
        reach = jnp.minimum(tokens + self.lookahead, self.max_len)
        most = [
            jnp.minimum(
                group.most_blocks(reach, self.max_chunk or self.max_len),
                blocks_for(reach, group.block_size) - first[..., g],
            )
            for g, group in enumerate(self.layer_groups)
        ]
        return jnp.stack(most, axis=-1)

    def owed(self, state: PagedState) -> Int32[Array, ""]:
        """Blocks that sequences were promised when they were admitted, and have not taken yet.

        Whoever has still to write into a block that others share was promised a copy of it.
        """
        first = jnp.stack([table.first for table in state.tables], axis=-1)
        end = jnp.stack([table.end for table in state.tables], axis=-1)
        owed = jnp.maximum(self.most_held(state.seqs.promised, first) - (end - first), 0)
        total = jnp.sum(jnp.where(state.seqs.active[:, None], owed, 0))
        for group, table in zip(self.layer_groups, state.tables, strict=True) if self.forks else ():
            lengths, promised = state.seqs.lengths, state.seqs.promised
            writes = sharing.tail_writes(table, state.pool, lengths, promised, group.block_size)
            total += jnp.sum(writes.copies, dtype=jnp.int32)
        return total

    def demand(self, state: PagedState, new_lengths: Int32[Array, " rows"]) -> Int32[Array, " rows"]:
        total = jnp.zeros(self.rows, jnp.int32)
        for group, table in zip(self.layer_groups, state.tables, strict=True):
            total += jnp.maximum(self._need(state, new_lengths, group) - table.end, 0)
            if self.forks:
                writes = sharing.tail_writes(table, state.pool, state.seqs.lengths, new_lengths, group.block_size)
                total += writes.copies.astype(jnp.int32)
        return total

    def _need(self, state: PagedState, new_lengths: Int32[Array, " rows"], group: Group) -> Int32[Array, " rows"]:
        """Columns of its table that each row must have filled to grow to `new_lengths`; 0 for one that does not."""
        reach = jnp.minimum(new_lengths + self.lookahead, self.max_len) if self.lookahead else new_lengths
        return jnp.where(new_lengths > state.seqs.lengths, blocks_for(reach, group.block_size), 0)

    def held(self, state: PagedState) -> Int32[Array, " rows"]:
        return sum((table.end - table.first for table in state.tables), jnp.zeros(self.rows, jnp.int32))

    def available(self, state: PagedState) -> Int32[Array, ""]:
        return state.pool.num_free

    @property
    def has_steady_steps(self) -> bool:
        return self.cache is None and not self.forks and all(group.sees_all for group in self.layer_groups)

    def steady_steps(self, state: PagedState, grows: Bool[Array, " rows"], steps: Int32[Array, ""]) -> Int32[Array, ""]:
        demand = self.demand(state, state.seqs.lengths + jnp.where(grows, steps, 0))
        return jnp.where(jnp.sum(demand) <= self.available(state), steps, 0)

    def look_ahead(self, state: PagedState, grows: Bool[Array, " rows"], steps: Int32[Array, ""]) -> PagedState:
        seqs = longer(state.seqs, grows, steps)
        tables = tuple(
            dataclasses.replace(table, end=jnp.maximum(table.end, self._need(state, seqs.lengths, group)))
            for group, table in zip(self.layer_groups, state.tables, strict=True)
        )
        return dataclasses.replace(state, seqs=seqs, tables=tables)

    def append(
        self, state: PagedState, new_tokens: Int32[Array, " rows"], max_new_tokens: int
    ) -> tuple[PagedState, Int32[Array, ""]]:
        malformed = check_append(state.seqs, new_tokens, self.max_len, max_new_tokens)
        if state.copies is not None:
            malformed |= (new_tokens != 0) & sharing.pending(state.copies, self.rows, self.num_blocks)
        old_lengths = state.seqs.lengths
        new_lengths = old_lengths + jnp.where(jnp.any(malformed), 0, new_tokens)

        missing, writes = [], []
        for group, table in zip(self.layer_groups, state.tables, strict=True):
            missing.append(jnp.maximum(self._need(state, new_lengths, group) - table.end, 0))
            if self.forks:
                writes.append(sharing.tail_writes(table, state.pool, old_lengths, new_lengths, group.block_size))
        state, copies, served = grow(self, state, tuple(missing), tuple(w.copies for w in writes))

        tables, pairs = list(state.tables), []
        for g, (group, write) in enumerate(zip(self.layer_groups, writes, strict=False)):
            copied = write.copies & served
            pairs.append((jnp.where(copied, write.blocks, self.num_blocks), copies[g]))
            tables[g] = sharing.replace_tail(tables[g], old_lengths // group.block_size, copies[g], copied)
            # A fork shorter than its parent goes on in a block that may be cached, full as the parent left it.
            written = jnp.where(write.keeps & served, write.blocks, self.num_blocks)
            state = self._forget(state, written, jnp.any(write.keeps), counts=0)
            state = dataclasses.replace(state, pool=mark_kept(state.pool, written, kept=False))
        state = dataclasses.replace(state, tables=tuple(tables))
        if pairs:
            pool, copies = sharing.hold(state.pool, pairs)
            state = dataclasses.replace(
                state, pool=pool, copies=sharing.add(required(state.copies), copies, self.num_blocks)
            )
        if state.swap is not None:
            grows = (new_lengths > old_lengths) & served
            parted = swap_state.part_written(state.swap, self.layer_groups, state.tables, old_lengths, grows)
            state = dataclasses.replace(state, swap=parted)
        seqs, outcome = advance(state.seqs, new_lengths, malformed, served)
        return dataclasses.replace(state, seqs=seqs), outcome

    def take_blocks(
        self, state: PagedState, wanted: Bool[Array, " n"]
    ) -> tuple[PagedState, Int32[Array, " n"], Bool[Array, ""]]:
        """Takes blocks to be written, as `block_pool.take` does: what they held is lost."""
        ranking = None
        if self.cache is not None and state.contents is not None:
            ranking = prefix_cache.ranking(self.cache, state.contents)
        pool, ids, served = take(state.pool, wanted, ranking)
        loses = may_have_content(state.pool, pool)
        state = self._forget(dataclasses.replace(state, pool=pool), ids, loses)
        if state.swap is not None:
            state = dataclasses.replace(state, swap=swap_state.part_twins(state.swap, ids))
        return state, ids, served

    def _forget(
        self, state: PagedState, ids: Int32[Array, " n"], any_cached: Bool[Array, ""], counts: int = 1
    ) -> PagedState:
        """These blocks are about to be written: what they held is lost, which counts as evictions."""
        if self.cache is None or state.contents is None or state.stats is None:
            return state
        config = self.cache

        def forget(carry: tuple) -> tuple:
            contents, evictions = carry
            contents, lost = prefix_cache.forget(config, contents, ids)
            return contents, evictions + counts * lost

        contents, evictions = run_if(any_cached, forget, (state.contents, state.stats.evictions))
        return dataclasses.replace(
            state, contents=contents, stats=dataclasses.replace(state.stats, evictions=evictions)
        )

    def give_back(
        self, pool: BlockPool, ids: Int32[Array, " n"], *, distinct: bool = False
    ) -> tuple[BlockPool, Bool[Array, ""]]:
        """`block_pool.give_back` in this memory's free order."""
        everyone = jnp.ones(ids.shape, jnp.bool) if self.free_order == "fifo" else None
        return give_back(pool, ids, everyone, kept_to_back=self.cache is not None, distinct=distinct)

    @property
    def publishes(self) -> prefix_cache.Publish | None:
        return None if self.cache is None else self.cache.publish

    @property
    def can_fork(self) -> bool:
        return self.forks

    def fork(
        self,
        state: PagedState,
        parent: Int32[Array, ""],
        length: Int32[Array, ""],
        promised: Int32[Array, ""],
        content: Content | None = None,
    ) -> tuple[PagedState, Int32[Array, ""], Int32[Array, ""]]:
        return lifecycle.fork(self, state, parent, length, promised, content)

    def reorder(self, state: PagedState, sources: Int32[Array, " rows"]) -> PagedState:
        return lifecycle.reorder(self, state, sources)

    def swap_out(
        self, state: PagedState, rows: Bool[Array, " rows"]
    ) -> tuple[PagedState, Int32[Array, " rows"], Int32[Array, ""], Moves]:
        return swap.swap_out(self, state, rows)

    def swap_in(
        self, state: PagedState, place: Int32[Array, ""], keep_back: Bool[Array, ""] | bool = True
    ) -> tuple[PagedState, Int32[Array, ""], Int32[Array, ""], Moves]:
        return swap.swap_in(self, state, place, keep_back)

    def parked(self, state: PagedState) -> Int32[Array, " places"]:
        return required(state.swap).lengths

    def discard(self, state: PagedState, place: Int32[Array, ""]) -> tuple[PagedState, Int32[Array, ""]]:
        return swap.discard(self, state, place)

    def vacated(self, before: PagedState, after: PagedState) -> Bool[Array, " units"]:
        return of_use(before.pool) & ~of_use(after.pool)

    def settle(self, state: PagedState, cache: KVCache) -> tuple[PagedState, KVCache, Int32[Array, ""]]:
        if state.copies is None:
            return state, cache, jnp.int32(0)
        copies = state.copies
        cache = self.copy(cache, copies.sources, copies.destinations)
        count = jnp.sum(copies.destinations != self.num_blocks, dtype=jnp.int32)
        return lifecycle.end_copies(self, state), cache, count

    def copy(self, cache: KVCache, src: Int32[Array, " pairs"], dst: Int32[Array, " pairs"]) -> KVCache:
        """What blocks `src` hold, all read before any is written, in blocks `dst`; `num_blocks` in an empty place."""
        return copy_blocks(cache, src, dst, self.block_size)

    def read_blocks(self, blocks: jax.Array, ids: Int32[Array, " n"]) -> jax.Array:
        """Blocks of an array `[num_blocks, rows, ...]`, zeros for `num_blocks`, bit for bit."""
        return from_bits(to_bits(blocks).at[ids].get(mode="fill", fill_value=0), blocks.dtype)

    def own_blocks(self, ids: Int32[Array, "*shape"]) -> Int32[Array, "*shape"]:
        """Places of blocks in the arrays of keys and values: all lie where their ids say."""
        return ids

    def publish(
        self,
        state: PagedState,
        tokens: Int32[Array, " tokens"],
        cu_lens: Int32[Array, " rows_and_one"],
        max_new_tokens: int,
    ) -> PagedState:
        """See `KVMemory.publish`."""
        if self.cache is None:
            return state
        return publishing.publish(self, state, tokens, cu_lens, max_new_tokens)

    def release(self, state: PagedState, rows: Bool[Array, " rows"]) -> PagedState:
        return lifecycle.release(self, state, rows)

    def background(self, state: PagedState) -> PagedState:
        return lifecycle.free_out_of_view(self, state)

    def of_group(self, state: PagedState, group: int) -> PagedState:
        return dataclasses.replace(state, tables=(state.tables[group],))

    def slots(
        self, state: PagedState, row: Int32[Array, " tokens"], position: Int32[Array, " tokens"]
    ) -> Int32[Array, " tokens"]:
        return block_tables.slot_of(state.tables[0], row, position, self.block_size, self.num_blocks)

    def attend(
        self,
        state: PagedState,
        q: Float[Array, "tokens q_heads head_dim"],
        k: KVPool,
        v: KVPool,
        cu_q_lens: Int32[Array, " rows_and_one"],
        spec: AttentionSpec,
        *,
        max_q_len: int,
        backend: str | Sequence[str] | None = None,
    ) -> Float[Array, "tokens q_heads head_dim"]:
        in_blocks = (self.num_blocks, self.block_size)
        return paged_attention(
            q,
            k.data.reshape(*in_blocks, *k.data.shape[1:]),
            v.data.reshape(*in_blocks, *v.data.shape[1:]),
            state.tables[0].ids,
            state.seqs.lengths,
            cu_q_lens,
            k_scale=k.scales_in(in_blocks),
            v_scale=v.scales_in(in_blocks),
            k_first=k.first,
            v_first=v.first,
            max_q_len=max_q_len,
            backend=backend,
            **dataclasses.asdict(spec),
        )

    def usage(self, state: PagedState, final_lengths: Int32[Array, " rows"]) -> Usage:
        if self.forks or self.groups:
            return usage_of_blocks(self, state, final_lengths)
        if self.cache is not None:
            return usage_of_cached(self, state, final_lengths)
        given = self.held(state) * self.block_size
        return usage_of_rows(state.limits.units * self.block_size, state.seqs, given, given, final_lengths)

    def owners(self, state: PagedState) -> Int32[Array, " units"]:
        owner = jnp.full(self.num_blocks, self.rows, jnp.int32)
        for table in state.tables:
            row = jnp.broadcast_to(jnp.arange(self.rows, dtype=jnp.int32)[:, None], table.ids.shape)
            owner = owner.at[table.ids].min(row, mode="drop")
        return owner

    def map_calls(self, state: PagedState) -> MapCalls:
        del state
        return no_map_calls()
