"""Paged memory whose blocks lie across the devices of a mesh axis: context parallelism.

Every device has the whole bookkeeping and takes the same decisions, those of a single device with all the blocks; what
is split is what the blocks hold. A device stores the tokens that fall into its blocks and attends over these alone. The
partial results are merged by the logarithms of their softmax denominators, which is all that devices exchange: no key
and no value moves, but for a block that is copied into another device's.

Runs inside `jax.shard_map` over the axis.
"""

import dataclasses
import typing
from collections.abc import Sequence
from typing import Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Float32, Int32

from pallas_kernels.paged_attention import paged_attention
from paxkv.control_flow import run_if
from paxkv.kv_cache import AttentionSpec, KVCache, KVPool, from_bits, map_blocks, to_bits
from paxkv.paged import Paged
from paxkv.paged_state import PagedState
from paxkv.sizes import require_int

Dealing = Literal["round_robin", "by_shard"]
_NOWHERE = 2**31 - 1

MERGE = "merge_attention"
"""In the names of the operations that merge partial attentions."""


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class SplitPaged(Paged):
    """`Paged` with `num_blocks` over all devices of `axis`; slots, tables and arrays are each device's own.

    Attributes:
      shards: devices that share the blocks; must divide `num_blocks`.
      axis: of the mesh.
      dealing: which device has a block: ids in turn (`round_robin`), so that a sequence, whose blocks mostly have
        neighbouring ids, lies on all devices and is read by all of them at once; or ids in equal runs (`by_shard`), so
        that a sequence mostly lies on one.
    """

    shards: int = 1
    axis: str = "kv"
    dealing: Dealing = "round_robin"

    def __post_init__(self) -> None:
        """Refuses what cannot be split."""
        super().__post_init__()
        require_int("shards", self.shards)
        if self.num_blocks % self.shards:
            raise ValueError(f"num_blocks: expected a multiple of shards = {self.shards}, got {self.num_blocks}")
        if self.dealing not in typing.get_args(Dealing):
            raise ValueError(f"dealing: expected {' or '.join(typing.get_args(Dealing))}, got {self.dealing!r}")
        if self.host_blocks:
            raise ValueError(
                "host_blocks: expected 0 where blocks lie across devices, as a sequence would come back to blocks of "
                f"other devices than it left, got {self.host_blocks}; preempt by recomputing"
            )

    @property
    def num_slots(self) -> int:
        """Of one device."""
        return self.num_blocks // self.shards * self.block_size

    @property
    def capacity(self) -> int:
        """Of all devices."""
        return self.num_blocks * self.block_size

    def own_blocks(self, ids: Int32[Array, "*shape"]) -> Int32[Array, "*shape"]:
        """Places of blocks in this device's arrays: the number of its blocks for those of others and for none."""
        here = self.num_blocks // self.shards
        if self.dealing == "round_robin":
            shard, place = ids % self.shards, ids // self.shards
        else:
            shard, place = ids // here, ids % here
        mine = (ids >= 0) & (ids < self.num_blocks) & (shard == jax.lax.axis_index(self.axis))
        return jnp.where(mine, place, here)

    def slots(
        self, state: PagedState, row: Int32[Array, " tokens"], position: Int32[Array, " tokens"]
    ) -> Int32[Array, " tokens"]:
        """See `KVMemory.slots`; `num_slots` for a token that another device stores, as well."""
        slot = super().slots(state, row, position)
        return self.own_blocks(slot // self.block_size) * self.block_size + slot % self.block_size

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
        """See `KVMemory.attend`."""
        in_blocks = (self.num_blocks // self.shards, self.block_size)
        table, order = self._own_table(state)
        lengths = state.seqs.lengths
        if max_q_len == 1 and spec.window is None:
            # One query sees all that is stored of its row, wherever it lies: any kernel can do that.
            begin = jnp.minimum(order, self.blocks_per_seq) * self.block_size
            lengths = jnp.sum(jnp.clip(lengths[:, None] - begin, 0, self.block_size), axis=1)
            order = None
        out, lse = paged_attention(
            q,
            k.data.reshape(*in_blocks, *k.data.shape[1:]),
            v.data.reshape(*in_blocks, *v.data.shape[1:]),
            table,
            lengths,
            cu_q_lens,
            k_scale=k.scales_in(in_blocks),
            v_scale=v.scales_in(in_blocks),
            block_order=order,
            return_lse=True,
            max_q_len=max_q_len,
            backend=backend,
            **dataclasses.asdict(spec),
        )
        with jax.named_scope(MERGE):
            return merge_over(self.axis, out, lse)

    def _own_table(self, state: PagedState) -> tuple[Int32[Array, "rows columns"], Int32[Array, "rows columns"]]:
        """This device's blocks of each sequence, and which of its blocks they are, in their order."""
        ids = state.tables[0].ids
        here, (rows, columns) = self.num_blocks // self.shards, ids.shape
        place = self.own_blocks(ids)
        mine = place < here
        width = min(columns, here)
        row = jnp.arange(rows, dtype=jnp.int32)[:, None]
        column = jnp.where(mine, jnp.cumsum(mine, axis=1, dtype=jnp.int32) - 1, width)
        logical = jnp.broadcast_to(jnp.arange(columns, dtype=jnp.int32)[None, :], ids.shape)
        table = jnp.full((rows, width), here, jnp.int32).at[row, column].set(place, mode="drop")
        return table, jnp.full((rows, width), _NOWHERE, jnp.int32).at[row, column].set(logical, mode="drop")

    def read_blocks(self, blocks: jax.Array, ids: Int32[Array, " n"]) -> jax.Array:
        """See `Paged.read_blocks`; whoever has a block sends it to all."""
        own = to_bits(blocks).at[self.own_blocks(ids)].get(mode="fill", fill_value=0)
        return from_bits(jax.lax.psum(own, self.axis), blocks.dtype)

    def copy(self, cache: KVCache, src: Int32[Array, " pairs"], dst: Int32[Array, " pairs"]) -> KVCache:
        """See `Paged.copy`. Whoever has a block sends it to all, as they may all be who needs it."""

        def copy(array: jax.Array, rows: int) -> jax.Array:
            blocks = array.reshape(-1, rows, *array.shape[1:])
            sent = self.read_blocks(blocks, src)
            return blocks.at[self.own_blocks(dst)].set(sent, mode="drop").reshape(array.shape)

        any_copy = jnp.any(dst < self.num_blocks)
        return run_if(any_copy, lambda cache: map_blocks(copy, self.block_size, cache), cache)


def split_blocks(memory: Paged, shards: int, dealing: Dealing = "round_robin", axis: str = "kv") -> SplitPaged:
    """The memory with its blocks across so many devices."""
    knobs = {field.name: getattr(memory, field.name) for field in dataclasses.fields(Paged)}
    return SplitPaged(**knobs, shards=shards, axis=axis, dealing=dealing)


def merge_over(
    axis: str, out: Float[Array, "tokens q_heads head_dim"], lse: Float32[Array, "tokens q_heads"]
) -> Float[Array, "tokens q_heads head_dim"]:
    """The attention over all keys, from each device's output over its own and the logarithm of their weights' sum.

    Exchanges `4 * tokens * q_heads` bytes from each device to all, and sums `4 * tokens * q_heads * head_dim`.
    """
    every = jax.lax.all_gather(lse, axis)
    largest = jnp.max(every, axis=0)
    seen = largest > -jnp.inf
    total = largest + jnp.log(jnp.sum(jnp.exp(every - jnp.where(seen, largest, 0)[None]), axis=0))
    # A NaN of any device stays one.
    weight = jnp.where(seen | jnp.isnan(total), jnp.exp(lse - total), 0)
    return jax.lax.psum(out.astype(jnp.float32) * weight[..., None], axis).astype(out.dtype)
