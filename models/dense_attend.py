"""Attention without a cache: what training, and whoever reads whole texts at once, hands to the decoder."""

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from paxkv.kv_cache import AttentionSpec, LayerCache


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class DenseAttend:
    """An `Attend` without a cache: the tokens are `batch` sequences of equal length, one after the other."""

    batch: int

    def of_layer(self, layer: int) -> tuple["DenseAttend", int]:
        """All layers do the same."""
        return self, layer

    def __call__(
        self,
        q: Float[Array, "tokens q_heads head_dim"],
        k: Float[Array, "tokens kv_heads head_dim"],
        v: Float[Array, "tokens kv_heads head_dim"],
        cache: LayerCache | None,
        spec: AttentionSpec,
    ) -> tuple[Float[Array, "tokens q_heads head_dim"], LayerCache | None]:
        """Causal attention within each sequence, in float32; the cache passes through untouched."""
        (_, q_heads, head_dim), kv_heads = q.shape, k.shape[1]
        by_group = q.reshape(self.batch, -1, kv_heads, q_heads // kv_heads, head_dim).astype(jnp.float32)
        keys, values = (x.reshape(self.batch, -1, kv_heads, head_dim).astype(jnp.float32) for x in (k, v))
        highest = jax.lax.Precision.HIGHEST
        logits = jnp.einsum("bqmgh,bkmh->bmgqk", by_group, keys, precision=highest)
        logits *= head_dim**-0.5 if spec.scale is None else spec.scale
        if spec.soft_cap is not None:
            logits = spec.soft_cap * jnp.tanh(logits / spec.soft_cap)
        position = jnp.arange(keys.shape[1], dtype=jnp.int32)
        ago = position[:, None] - position[None, :]
        seen = (ago >= 0) if spec.window is None else (ago >= 0) & (ago < spec.window)
        weights = jax.nn.softmax(logits, axis=-1, where=jnp.broadcast_to(seen, logits.shape))
        out = jnp.einsum("bmgqk,bkmh->bqmgh", weights, values, precision=highest)
        return out.reshape(q.shape).astype(q.dtype), cache
