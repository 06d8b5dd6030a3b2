"""The arrays that hold keys and values: per layer, one flat axis of slots, whatever hands the slots out.

Paged memory reads the slot axis as `[num_blocks, block_size]`, vAttention as `[rows, max_len]`, reserved
memory as ranges of a buddy arena. The data therefore has one layout and one write operation, and the three
memories differ in nothing but the slot ids they give out.
"""

import dataclasses
import typing
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int32

from pallas_kernels import block_copy
from pallas_kernels.contiguous_attention import contiguous_attention


@typing.no_type_check
@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class KVPool:
    """The keys, or the values, of one layer. What it holds stands for `data` times the factor or the scales, if any."""

    data: jax.Array  # dtype[slots, kv_heads, head_dim]; 4-bit integers as u8[slots, kv_heads, head_dim // 2]
    factor: jax.Array | None = None  # of all slots: f32[], f32[kv_heads] or f32[kv_heads, head_dim]; 0 for unknown
    scales: jax.Array | None = None  # beside the blocks, under their ids: [blocks, kv_heads] or [slots, kv_heads]
    first: jax.Array | None = None  # [rows, precise_tokens, kv_heads, head_dim]; each row's first ones, as they are

    def scales_in(self, in_blocks: tuple[int, int] | None = None) -> jax.Array | None:
        """What attention multiplies by, in the form that a kernel takes it; a factor of channels is not its business.

        `in_blocks` are the number and the size of blocks, where slots lie in blocks.
        """
        if self.scales is None:
            return self.factor if self.factor is None or self.factor.ndim < 2 else None
        if in_blocks is None or self.scales.shape[0] == in_blocks[0]:
            return self.scales
        return self.scales.reshape(*in_blocks, -1)


@typing.no_type_check
@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class LayerCache:
    """Keys and values of one layer, and how many of them were clipped when they were stored."""

    k: KVPool
    v: KVPool
    clipped: jax.Array  # i32[1], a number for each device that stores; wraps around at 2**31


@typing.no_type_check
@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class KVCache:
    """Keys and values of all layers.

    Arrays for each layer rather than stacked ones: a kernel takes a layer's array as it lies, without a slice that
    might copy, and a write touches one layer's buffers in place.
    """

    layers: tuple[LayerCache | None, ...]  # None where nothing is kept

    @property
    def num_slots(self) -> int:
        """Slots of every layer; 0 if nothing is kept."""
        return max((layer.k.data.shape[0] for layer in self.layers if layer is not None), default=0)


@dataclasses.dataclass(frozen=True)
class AttentionSpec:
    """What a layer's attention is, beside its inputs. Static.

    Attributes:
      scale: factor of the logits; None for head_dim**-0.5.
      window: positions that a query sees, its own included; None for all.
      soft_cap: logits become `soft_cap * tanh(logits / soft_cap)`; None for as they are.
    """

    scale: float | None = None
    window: int | None = None
    soft_cap: float | None = None


@typing.runtime_checkable
class LayerAttend(Protocol):
    """Attention of one layer in one step. A pytree, so that it can be an argument of a jitted function."""

    def __call__(
        self,
        q: Float[Array, "tokens q_heads head_dim"],
        k: Float[Array, "tokens kv_heads head_dim"],
        v: Float[Array, "tokens kv_heads head_dim"],
        cache: LayerCache | None,
        spec: AttentionSpec,
    ) -> tuple[Float[Array, "tokens q_heads head_dim"], LayerCache | None]:
        """Stores `k` and `v` of this step's tokens (after RoPE), then attends `q` over all stored ones."""
        ...


@typing.runtime_checkable
class Attend(Protocol):
    """What a model is handed for one step: the only thing it knows of the cache."""

    def of_layer(self, layer: Any) -> tuple[LayerAttend, int]:
        """How a layer attends, and which entry of `KVCache.layers` it stores in.

        A layer is a number, or an i32[] where layers are a loop. Layers whose attentions have the same structure are
        alike to a jitted function.
        """
        ...


def attend_layer(
    attend: Attend,
    layer: int | Int32[Array, ""],
    cache: KVCache,
    run: Callable[[LayerAttend, LayerCache | None], tuple],
) -> tuple[jax.Array, KVCache]:
    """Runs one layer on its own part of the cache.

    Args:
      attend: the step's attention.
      layer: which.
      cache: of all layers.
      run: given the layer's attention and cache, returns its output and its cache.

    Returns:
      The output, and the cache of all layers.

    Raises:
      ValueError: the layer cannot attend so; a note names the layer.
    """
    of_layer, place = attend.of_layer(layer)
    try:
        out, changed = run(of_layer, cache.layers[place])
    except ValueError as error:
        error.add_note(f"in layer {layer} of the model")
        raise
    return out, KVCache((*cache.layers[:place], changed, *cache.layers[place + 1 :]))


def attend_ranges(
    q: Float[Array, "tokens q_heads head_dim"],
    k: KVPool,
    v: KVPool,
    starts: Int32[Array, " rows"],
    lengths: Int32[Array, " rows"],
    cu_q_lens: Int32[Array, " rows_and_one"],
    spec: AttentionSpec,
    *,
    max_q_len: int,
    backend: str | Sequence[str] | None,
) -> Float[Array, "tokens q_heads head_dim"]:
    """Attention over sequences that each have one range of slots: see `pallas_kernels.contiguous_attention`."""
    return contiguous_attention(
        q,
        k.data,
        v.data,
        starts,
        lengths,
        cu_q_lens,
        k_scale=k.scales_in(),
        v_scale=v.scales_in(),
        k_first=k.first,
        v_first=v.first,
        max_q_len=max_q_len,
        backend=backend,
        **dataclasses.asdict(spec),
    )


def no_cache(layers: int) -> KVCache:
    """A cache for attentions that keep nothing."""
    return KVCache((None,) * layers)


def block_bytes(cache: KVCache, block_size: int) -> int:
    """Bytes of one block in all layers, keys, values and their scales: what copying or swapping it moves one way."""
    pools = [pool for layer in cache.layers if layer is not None for pool in (layer.k, layer.v)]
    arrays = [array for pool in pools for array in (pool.data, pool.scales) if array is not None]
    return block_size * sum(array.size * array.dtype.itemsize for array in arrays) // cache.num_slots


def copy_blocks(cache: KVCache, src: Int32[Array, " pairs"], dst: Int32[Array, " pairs"], block_size: int) -> KVCache:
    """Copies block `src[i]` over block `dst[i]` in every layer, as `pallas_kernels.block_copy.block_copy` does.

    Args:
      cache: keys, values and their scales; updated in place inside a jitted function that donates them.
      src: the blocks that are read, all before any is written; num_blocks in an empty place.
      dst: the blocks that are overwritten; num_blocks in an empty place.
      block_size: slots in a block.

    Returns:
      The cache.
    """

    def copy(array: jax.Array, rows: int) -> jax.Array:
        return block_copy.block_copy(array, src, dst, block_size=rows)

    return map_blocks(copy, block_size, cache)


def copy_blocks_between(
    src_cache: KVCache,
    dst_cache: KVCache,
    src: Int32[Array, " pairs"],
    dst: Int32[Array, " pairs"],
    block_size: int,
) -> KVCache:
    """Copies block `src[i]` of one cache over block `dst[i]` of another of the same model, in every layer.

    Args:
      src_cache: keys, values and scales that are read.
      dst_cache: what is written; it may have another number of slots. A factor of all its slots stays as it is.
      src: blocks of `src_cache`; its num_blocks in an empty place.
      dst: blocks of `dst_cache`; its num_blocks in an empty place.
      block_size: slots in a block, of both.

    Returns:
      `dst_cache` with the copies.
    """

    def copy(dst_array: jax.Array, rows: int, src_array: jax.Array) -> jax.Array:
        return block_copy.block_copy_between(src_array, dst_array, src, dst, block_size=rows)

    return map_blocks(copy, block_size, dst_cache, src_cache)


def fill_blocks(cache: KVCache, ids: Int32[Array, " ids"], value: float | int, block_size: int) -> KVCache:
    """Writes `value` all over the blocks `ids` in every layer, as `pallas_kernels.block_copy.fill_blocks` does.

    Args:
      cache: keys, values and their scales; updated in place inside a jitted function that donates them.
      ids: the blocks to fill; num_blocks in an empty place.
      value: 0, so that nobody finds what a freed block held, or NaN, so that whoever reads one shows. Static.
      block_size: slots in a block.

    Returns:
      The cache.

    Raises:
      ValueError: `value` is NaN, and neither what is stored nor scales beside it can hold one.
    """

    def fill(array: jax.Array, rows: int) -> jax.Array:
        if value != value and jnp.issubdtype(array.dtype, jnp.integer):
            return array  # its scales tell
        # A power of two cannot be 0, and need not be where what it multiplies is.
        stored = 1 if value == 0 and array.dtype == jnp.float8_e8m0fnu else value
        return block_copy.fill_blocks(array, ids, stored, block_size=rows)

    for layer in filter(None, cache.layers):
        for pool in (layer.k, layer.v):
            if value != value and pool.scales is None and jnp.issubdtype(pool.data.dtype, jnp.integer):
                raise ValueError(
                    f"value: expected 0, as {pool.data.dtype.name} without scales beside the blocks has no NaN, got "
                    f"{value}"
                )
    return map_blocks(fill, block_size, cache)


def to_bits(array: jax.Array) -> jax.Array:
    """The same bits as unsigned integers, which all have a 0 and can be added."""
    return jax.lax.bitcast_convert_type(array, jnp.dtype(f"uint{8 * array.dtype.itemsize}"))


def from_bits(bits: jax.Array, dtype: jnp.dtype) -> jax.Array:
    """What `to_bits` was given."""
    return jax.lax.bitcast_convert_type(bits, dtype)


def with_blocks(cache: KVCache, num_blocks: int, block_size: int) -> KVCache:
    """A zeroed cache of another number of blocks of the same form, such as one on the host."""

    def zeros(array: jax.Array, rows: int) -> jax.Array:
        return jnp.zeros((num_blocks * rows, *array.shape[1:]), array.dtype)

    # Nothing is shared with `cache`, so that both can be donated to one function.
    return jax.tree.map(jnp.copy, map_blocks(zeros, block_size, cache))


def map_blocks(change: Callable[..., jax.Array], block_size: int, cache: KVCache, *others: KVCache) -> KVCache:
    """Applies `change(array, rows of it in a block, *arrays of the others)` to all that lies in blocks."""

    def of_pool(pool: KVPool, *others: KVPool) -> KVPool:
        slots = pool.data.shape[0]
        data = change(pool.data, block_size, *(other.data for other in others))
        if pool.scales is None:
            return dataclasses.replace(pool, data=data)
        rows = block_size * pool.scales.shape[0] // slots
        return dataclasses.replace(
            pool, data=data, scales=change(pool.scales, rows, *(other.scales for other in others))
        )

    def of_layer(layer: LayerCache | None, *others: LayerCache | None) -> LayerCache | None:
        if layer is None:
            return None
        k = of_pool(layer.k, *(other.k for other in others if other is not None))
        v = of_pool(layer.v, *(other.v for other in others if other is not None))
        return dataclasses.replace(layer, k=k, v=v)

    return KVCache(tuple(map(of_layer, cache.layers, *(other.layers for other in others))))
