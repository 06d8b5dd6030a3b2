"""Caches put together by hand."""

import jax.numpy as jnp

from paxkv.kv_cache import KVCache, KVPool, LayerCache


def cache_of(keys, values) -> KVCache:
    """Keys and values of each layer as they are."""
    pairs = zip(keys, values, strict=True)
    return KVCache(tuple(LayerCache(KVPool(k), KVPool(v), jnp.zeros(1, jnp.int32)) for k, v in pairs))


def filled_cache(layers: int, shape, value: float) -> KVCache:
    """Every key and every value is `value`: NaN where nothing may be read before it was written."""
    return cache_of(*([jnp.full(shape, value, jnp.float32) for _ in range(layers)] for _ in range(2)))


def keys_and_values(cache: KVCache) -> list:
    """The data of each layer's keys, then of each layer's values."""
    return [layer.k.data for layer in cache.layers] + [layer.v.data for layer in cache.layers]
