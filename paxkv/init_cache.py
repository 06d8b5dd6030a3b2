"""An empty KV cache in a format."""

import dataclasses
import warnings
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np

from paxkv.calibration import Calibration
from paxkv.kv_cache import KVCache, KVPool, LayerCache
from paxkv.kv_format import KVFormat, TensorFormat, check_shape


def init_kv_cache(
    layers: int,
    slots: int,
    kv_heads: int,
    head_dim: int,
    kv_format: KVFormat,
    *,
    block_size: int = 1,
    rows: int | None = None,
    calibration: Calibration | None = None,
) -> KVCache:
    """A zeroed cache of `layers` times `[slots, kv_heads, head_dim]` keys and as many values.

    Args:
      layers: of the model.
      slots: that the memory hands out.
      kv_heads: of the model.
      head_dim: of the model.
      kv_format: how they are stored.
      block_size: slots in a block; 1 for a memory without blocks.
      rows: sequences of the memory; needed by a format that keeps their first tokens as they are.
      calibration: where static scales come from. Without one they are 1, and a warning says so.

    Raises:
      ValueError: the format does not fit the model, the memory or the calibration.
    """
    check_shape(kv_format, layers, head_dim)
    formats = [kv_format.of_layer(layer) for layer in range(layers)]
    tensors = [tensor for fmt in formats for tensor in (fmt.k, fmt.v)]
    if block_size == 1 and any(tensor.granularity == "block_head" for tensor in tensors):
        raise ValueError(
            "kv_format: expected scales of another granularity than 'block_head' in a memory without blocks of several "
            "slots, got 'block_head'; use 'token_head'"
        )
    if kv_format.precise_tokens and rows is None:
        raise ValueError("rows: expected those of the memory, as the format keeps each one's first tokens, got None")
    if slots % block_size:
        raise ValueError(f"slots: expected whole blocks of {block_size}, got {slots}")
    needs = any(tensor.calibration == "static" for tensor in tensors)
    if calibration is not None and needs:
        shape = (layers, kv_heads, head_dim)
        if calibration.k_amax.shape != shape:
            raise ValueError(f"calibration: expected one of {shape}, got {calibration.k_amax.shape}")
        if calibration.skipped_tokens != kv_format.precise_tokens:
            raise ValueError(
                f"calibration: expected one without the first {kv_format.precise_tokens} tokens of each window, got "
                f"one without {calibration.skipped_tokens}"
            )
        if calibration.rotated != kv_format.rotate:
            raise ValueError(
                f"calibration: expected one of keys with rotate={kv_format.rotate}, got {calibration.rotated}"
            )
    if calibration is None and needs:
        warnings.warn(
            "kv_format asks for static scales and no calibration was given: they are 1, so that values are clipped or "
            "rounded away; calibrate, or have scales fixed at the first write, as in 'e4m3_layer:first_write'",
            stacklevel=2,
        )

    def pool(layer: int, tensor: Literal["k", "v"]) -> KVPool:
        fmt = formats[layer]
        empty = quantised(fmt.k if tensor == "k" else fmt.v, layer, tensor)
        if not fmt.precise_tokens or rows is None:
            return empty
        first = jnp.zeros((rows, fmt.precise_tokens, kv_heads, head_dim), TensorFormat(fmt.precise).dtype)
        return dataclasses.replace(empty, first=first)

    def quantised(fmt: TensorFormat, layer: int, tensor: str) -> KVPool:
        width = head_dim // 2 if fmt.element == "int4" else head_dim
        data = jnp.zeros((slots, kv_heads, width), jnp.uint8 if fmt.element == "int4" else fmt.dtype)
        scales_of = {"token_head": slots, "block_head": slots // block_size}
        if fmt.granularity in scales_of:
            # 1 is what a power of two can hold in place of 0, and data of 0 reads as 0 under it.
            return KVPool(data, scales=jnp.ones((scales_of[fmt.granularity], kv_heads), fmt.scale_dtype))
        if fmt.calibration is None:
            return KVPool(data)
        if calibration is not None and fmt.calibration == "static":
            return KVPool(data, factor=calibration.factor(fmt, layer, tensor))
        shape = {"layer": (), "head": (kv_heads,), "channel": (kv_heads, head_dim)}[fmt.granularity]
        return KVPool(data, factor=jnp.full(shape, 1.0 if fmt.calibration == "static" else 0.0, jnp.float32))

    return KVCache(tuple(LayerCache(pool(i, "k"), pool(i, "v"), jnp.zeros(1, jnp.int32)) for i in range(layers)))


def clipped_values(cache: KVCache) -> int:
    """Host side: values that were clipped in all layers since the cache was made. Waits for the device."""
    return sum(int(np.sum(jax.device_get(layer.clipped))) for layer in cache.layers if layer is not None)
