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
from jaxtyping import Array, Float


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
