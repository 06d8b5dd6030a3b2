"""Storing keys and values in their format, and what a query must look like to be compared with stored keys.

Quantised values are first rounded to bfloat16, as a server that computes in it would store them: one order of
rounding, whatever the model computes in. They are clipped before the cast, as a cast of 465 to float8_e4m3fn is NaN.
"""

import dataclasses
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Float32, Int32

from pallas_kernels.int4 import unpack_int4
from pallas_kernels.kv_write import store_rows
from pallas_kernels.kv_write.quantise import Quantised, largest, quantise, quantise_by_token, scale_up
from paxkv.kv_cache import KVPool, LayerCache
from paxkv.kv_format import KVFormat, TensorFormat


class Places(NamedTuple):
    """Where a step's tokens go. Those of one sequence are neighbours and fill its slots in order."""

    slots: Int32[Array, " tokens"]  # num_slots for none
    seqs: int  # most sequences among the tokens
    block_size: int  # slots in a block; 1 where there are no blocks
    backend: str | tuple[str, ...] | None = None
    first: Int32[Array, " tokens"] | None = None  # among the rows' first tokens, one row after another; or beyond them


def store(
    fmt: KVFormat,
    cache: LayerCache,
    k: Float[Array, "tokens kv_heads head_dim"],
    v: Float[Array, "tokens kv_heads head_dim"],
    places: Places,
) -> LayerCache:
    """Stores a step's keys (after RoPE) and values in their slots, and counts what had to be clipped.

    Args:
      fmt: of this layer.
      cache: of this layer; updated in place inside a jitted function that donates it.
      k: keys of the step's tokens, in the model's dtype.
      v: values.
      places: where they go.
    """
    pools, new = [], []
    for tensor, pool, x in ((fmt.k, cache.k, rotate(k) if fmt.rotate else k), (fmt.v, cache.v, v)):
        if pool.first is not None and places.first is not None:
            pool, x = _keep_first(fmt, tensor, pool, x, places.first)
        if tensor.quantised:
            x = rounded_first(x)
            pool = _with_scales_for(tensor, pool, x, places)
        pools.append(pool)
        new.append(_encode(tensor, pool, x, places))
    arrays, rows = [], []
    for pool, encoded in zip(pools, new, strict=True):
        arrays += [pool.data] if encoded.scale is None else [pool.data, pool.scales]
        rows += [encoded.stored] if encoded.scale is None else [encoded.stored, encoded.scale]
    stored = iter(store_rows(tuple(arrays), tuple(rows), places.slots, backend=places.backend))
    k_pool, v_pool = (
        KVPool(next(stored), pool.factor, pool.scales if encoded.scale is None else next(stored), pool.first)
        for pool, encoded in zip(pools, new, strict=True)
    )
    real = places.slots < cache.k.data.shape[0]
    clipped = jnp.sum(jnp.where(real, sum(encoded.clipped for encoded in new), 0), dtype=jnp.int32)
    return LayerCache(k_pool, v_pool, cache.clipped + clipped[None])


def queries(
    fmt: KVFormat, keys: KVPool, q: Float[Array, "tokens q_heads head_dim"]
) -> Float[Array, "tokens q_heads head_dim"]:
    """Queries that meet stored keys: rotated as the keys were, and with the factors of the keys' channels."""
    if fmt.rotate:
        q = rotate(q)
    if fmt.k.granularity == "channel" and keys.factor is not None:
        factor = jnp.repeat(keys.factor, q.shape[1] // keys.factor.shape[0], axis=0)
        q = (q.astype(jnp.float32) * factor[None]).astype(q.dtype)
    return q


def rounded_first(x: Float[Array, "*shape"]) -> Float32[Array, "*shape"]:
    """Keys or values as they are before they are quantised: see above."""
    return x.astype(jnp.bfloat16).astype(jnp.float32)


def rotate(x: Float[Array, "tokens heads head_dim"]) -> Float[Array, "tokens heads head_dim"]:
    """Multiplies every head by the orthonormal Hadamard matrix of Sylvester's construction, its own inverse."""
    matrix = np.ones((1, 1))
    while matrix.shape[0] < x.shape[-1]:
        matrix = np.block([[matrix, matrix], [matrix, -matrix]])
    matrix = jnp.asarray(matrix / math.sqrt(x.shape[-1]), jnp.float32)
    turned = jnp.einsum("tnh,hg->tng", x.astype(jnp.float32), matrix, precision=jax.lax.Precision.HIGHEST)
    return turned.astype(x.dtype)


def _keep_first(
    fmt: KVFormat,
    tensor: TensorFormat,
    pool: KVPool,
    x: Float[Array, "tokens kv_heads head_dim"],
    places: Int32[Array, " tokens"],
) -> tuple[KVPool, Float[Array, "tokens kv_heads head_dim"]]:
    """Keeps the rows' first tokens as they are.

    Returns:
      The pool, and what is left to quantise: zeros in their place, as nobody reads them there and no scale must be
      large on their account.
    """
    if pool.first is None:
        raise ValueError("pool.first: expected a place for the rows' first tokens, got None")
    flat = pool.first.reshape(-1, *pool.first.shape[2:])
    precise = TensorFormat(fmt.precise)
    kept = x
    if tensor.granularity == "channel" and pool.factor is not None:
        # The queries come multiplied by the factor of each channel.
        kept = (x.astype(jnp.float32) / jnp.where(pool.factor > 0, pool.factor, 1)[None]).astype(x.dtype)
    encoded = _encode(precise, pool, kept, Places(places, 0, 1))
    flat = flat.at[places].set(encoded.stored, mode="drop")
    rest = jnp.where((places < flat.shape[0])[:, None, None], jnp.zeros((), x.dtype), x)
    return dataclasses.replace(pool, first=flat.reshape(pool.first.shape)), rest


def _encode(fmt: TensorFormat, pool: KVPool, x: Float[Array, "tokens kv_heads head_dim"], places: Places) -> Quantised:
    """What is stored of each token, with its own scale if it has one."""
    one = jnp.float32(1)
    if not fmt.quantised and fmt.element != "f16":
        return Quantised(x.astype(fmt.dtype), None, jnp.zeros(x.shape[0], jnp.int32))
    if fmt.granularity == "token_head":
        return quantise_by_token(x, fmt.dtype, fmt.scale_dtype)
    if fmt.granularity == "block_head" and pool.scales is not None:
        block = places.slots // places.block_size
        scale = pool.scales.at[block].get(mode="fill", fill_value=1).astype(jnp.float32)
    elif fmt.granularity != "none" and pool.factor is not None:
        scale = pool.factor if pool.factor.ndim < 2 else pool.factor[None]
    else:
        scale = one
    return quantise(x, fmt.dtype, jnp.where(scale > 0, scale, one))


def _with_scales_for(
    fmt: TensorFormat, pool: KVPool, x: Float32[Array, "tokens kv_heads head_dim"], places: Places
) -> KVPool:
    """The pool with what `x` will be divided by, where that comes from what is stored."""
    if fmt.granularity == "block_head":
        return _with_block_scales(fmt, pool, x, places)
    if fmt.calibration != "first_write" or pool.factor is None:
        return pool
    real = places.slots < pool.data.shape[0]
    by_channel = jnp.max(jnp.where(real[:, None, None], _magnitudes(x), 0), axis=0)
    found = scale_up(reduce_amax(fmt, by_channel) / largest(fmt.dtype), fmt.scale_dtype).astype(jnp.float32)
    known = jnp.any(pool.factor > 0)
    return dataclasses.replace(pool, factor=jnp.where(known, pool.factor, found))


def reduce_amax(fmt: TensorFormat, by_channel: Float32[Array, "kv_heads head_dim"]) -> Float32[Array, "..."]:
    """The largest absolute value of all that shares a factor: [], [kv_heads], or [kv_heads, head_dim] for channels."""
    match fmt.granularity:
        case "layer":
            return jnp.max(by_channel)
        case "head":
            return jnp.max(by_channel, axis=1)
        case _:
            heads, width = by_channel.shape
            groups = jnp.max(by_channel.reshape(heads, width // fmt.channels, fmt.channels), axis=2)
            return jnp.repeat(groups, fmt.channels, axis=1)


def _with_block_scales(
    fmt: TensorFormat, pool: KVPool, x: Float32[Array, "tokens kv_heads head_dim"], places: Places
) -> KVPool:
    """Scales of the blocks that tokens go into; where one grows, what the block holds is quantised anew.

    A block that gets its first slot filled is new, whatever its scale was. Never is a scale merely raised: all that is
    stored under it would be read too large.
    """
    if pool.scales is None:
        raise ValueError("pool.scales: expected scales of blocks, got None; make the cache with init_kv_cache")
    num_slots, num_blocks = pool.data.shape[0], pool.scales.shape[0]
    real = places.slots < num_slots
    block = jnp.where(real, places.slots // places.block_size, num_blocks)
    first = places.slots % places.block_size == 0
    needed = jnp.zeros(pool.scales.shape, jnp.float32)
    needed = needed.at[block].max(jnp.max(_magnitudes(x), axis=2) / largest(fmt.dtype), mode="drop")
    touched = jnp.zeros(num_blocks, jnp.bool).at[block].set(True, mode="drop")[:, None]
    new = jnp.zeros(num_blocks, jnp.bool).at[block].max(first, mode="drop")[:, None]
    old = jnp.where(new | ~touched, 0, pool.scales.astype(jnp.float32))
    grown = jnp.maximum(old, needed) if fmt.calibration == "dynamic" else jnp.where(old > 0, old, needed)
    scales = scale_up(grown, fmt.scale_dtype)
    data = pool.data
    if fmt.calibration == "dynamic":
        data = _requantise(fmt, data, block, first, old, scales.astype(jnp.float32), places)
    return dataclasses.replace(pool, data=data, scales=jnp.where(touched, scales, pool.scales))


def _requantise(
    fmt: TensorFormat,
    data: jax.Array,
    block: Int32[Array, " tokens"],
    first: jax.Array,
    old: Float32[Array, "num_blocks kv_heads"],
    new: Float32[Array, "num_blocks kv_heads"],
    places: Places,
) -> jax.Array:
    """What blocks held before this step under their old scales, under their new ones: at most one block a sequence."""
    num_slots, num_blocks, size = data.shape[0], new.shape[0], places.block_size
    enters = (block != jnp.concatenate([jnp.full(1, -1, jnp.int32), block[:-1]])) & ~first & (block < num_blocks)
    token = jnp.nonzero(enters, size=min(places.seqs, block.shape[0]), fill_value=block.shape[0])[0]
    ids = block.at[token].get(mode="fill", fill_value=num_blocks)
    held = places.slots.at[token].get(mode="fill", fill_value=0) % size
    was, now = (scales.at[ids].get(mode="fill", fill_value=1) for scales in (old, new))
    offset = jnp.arange(size, dtype=jnp.int32)[None, :]
    moves = (offset < held[:, None]) & jnp.any(now > was, axis=1)[:, None]
    slots = jnp.where(moves, ids[:, None] * size + offset, num_slots).reshape(-1)
    items = data.at[slots].get(mode="clip")
    items = (unpack_int4(items) if fmt.element == "int4" else items).astype(jnp.float32)
    was, now = (jnp.repeat(scale, size, axis=0) for scale in (was, now))
    again = quantise(items * was[..., None], fmt.dtype, jnp.where(now > 0, now, 1))
    return store_rows((data,), (again.stored,), slots, backend=places.backend)[0]


def _magnitudes(x: Float32[Array, "tokens kv_heads head_dim"]) -> Float32[Array, "tokens kv_heads head_dim"]:
    """Absolute values, 0 for what is no finite number and must not spoil the scale of all others."""
    return jnp.where(jnp.isfinite(x), jnp.abs(x), 0)
