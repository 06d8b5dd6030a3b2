"""The arrays that hold keys and values: per layer, one flat axis of slots, whatever hands the slots out.

Paged memory reads the slot axis as `[num_blocks, block_size]`, vAttention as `[rows, max_len]`, reserved
memory as ranges of a buddy arena. The data therefore has one layout and one write operation, and the three
memories differ in nothing but the slot ids they give out.
"""

import dataclasses
import typing
from typing import Protocol

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int32

from pallas_kernels import block_copy


@typing.no_type_check
@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class KVCache:
    """Keys and values of all layers.

    One array per layer rather than a stacked one: a kernel takes a layer's array as it lies, without a slice
    that might copy, and a write touches one layer's buffer in place.
    """

    k: tuple[jax.Array, ...]  # layers x dtype[slots, kv_heads, head_dim]
    v: tuple[jax.Array, ...]  # layers x dtype[slots, kv_heads, head_dim]


@typing.runtime_checkable
class Attend(Protocol):
    """What a model calls where it needs attention: the only thing it knows of the cache."""

    def __call__(
        self,
        layer: int,
        q: Float[Array, "tokens q_heads head_dim"],
        k: Float[Array, "tokens kv_heads head_dim"],
        v: Float[Array, "tokens kv_heads head_dim"],
        cache: KVCache,
    ) -> tuple[Float[Array, "tokens q_heads head_dim"], KVCache]:
        """Stores `k` and `v` of this step's tokens (after RoPE), then attends `q` over all stored ones."""
        ...


def init_kv_cache(layers: int, slots: int, kv_heads: int, head_dim: int, dtype: jnp.dtype) -> KVCache:
    """A zeroed cache of `layers` times `[slots, kv_heads, head_dim]` keys and as many values."""
    zeros = tuple(jnp.zeros((slots, kv_heads, head_dim), dtype) for _ in range(layers))
    return KVCache(k=zeros, v=jax.tree.map(jnp.copy, zeros))


def block_bytes(cache: KVCache, block_size: int) -> int:
    """Bytes of one block in all layers, keys and values: what copying or swapping it moves one way."""
    return sum(block_size * pool.size // pool.shape[0] * pool.dtype.itemsize for pool in jax.tree.leaves(cache))


def copy_blocks(cache: KVCache, src: Int32[Array, " pairs"], dst: Int32[Array, " pairs"], block_size: int) -> KVCache:
    """Copies block `src[i]` over block `dst[i]` in every layer, as `pallas_kernels.block_copy.block_copy` does.

    Args:
      cache: keys and values; updated in place inside a jitted function that donates them.
      src: the blocks that are read, all before any is written; num_blocks in an empty place.
      dst: the blocks that are overwritten; num_blocks in an empty place.
      block_size: slots in a block.

    Returns:
      The cache.
    """
    return jax.tree.map(lambda pool: block_copy.block_copy(pool, src, dst, block_size=block_size), cache)


def copy_blocks_between(
    src_cache: KVCache,
    dst_cache: KVCache,
    src: Int32[Array, " pairs"],
    dst: Int32[Array, " pairs"],
    block_size: int,
) -> KVCache:
    """Copies block `src[i]` of one cache over block `dst[i]` of another of the same model, in every layer.

    Args:
      src_cache: keys and values that are read.
      dst_cache: keys and values that are written; it may have another number of slots.
      src: blocks of `src_cache`; its num_blocks in an empty place.
      dst: blocks of `dst_cache`; its num_blocks in an empty place.
      block_size: slots in a block, of both.

    Returns:
      `dst_cache` with the copies.
    """

    def copy(src_pool: jax.Array, dst_pool: jax.Array) -> jax.Array:
        return block_copy.block_copy_between(src_pool, dst_pool, src, dst, block_size=block_size)

    return jax.tree.map(copy, src_cache, dst_cache)


def fill_blocks(cache: KVCache, ids: Int32[Array, " ids"], value: float | int, block_size: int) -> KVCache:
    """Writes `value` all over the blocks `ids` in every layer, as `pallas_kernels.block_copy.fill_blocks` does.

    Args:
      cache: keys and values; updated in place inside a jitted function that donates them.
      ids: the blocks to fill; num_blocks in an empty place.
      value: 0, so that nobody finds what a freed block held, or NaN, so that whoever reads one shows. Static.
      block_size: slots in a block.

    Returns:
      The cache.
    """
    return jax.tree.map(lambda pool: block_copy.fill_blocks(pool, ids, value, block_size=block_size), cache)
