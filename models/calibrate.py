"""How large a model's keys and values get on a text: where static scales of a quantised cache come from."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int32

from models.decoder import Decode, Params
from models.dense_attend import DenseAttend
from paxkv.calibration import Calibration
from paxkv.kv_cache import AttentionSpec, KVCache, KVPool, LayerAttend, LayerCache
from paxkv.kv_store import rotate, rounded_first


def calibrate(
    decode: Decode,
    params: Params,
    windows: Int32[np.ndarray, "windows context"],
    *,
    rotated: bool = False,
    skip: int = 0,
) -> Calibration:
    """Reads windows of a text without a cache and notes the largest keys and values of every channel.

    Args:
      decode: the model.
      params: its weights.
      windows: token ids, each window a sequence of its own. Nothing else is looked at: no warm-up, no padding.
      rotated: of keys times the Hadamard matrix, for formats that rotate.
      skip: tokens at the beginning of each window that are read and not looked at, for formats that keep them as they
        are.

    Raises:
      ValueError: nothing is left to look at.
    """
    if not 0 <= skip < windows.shape[1]:
        raise ValueError(f"skip: expected 0 to {windows.shape[1] - 1}, less than a window, got {skip}")
    config = decode.config
    nothing = jnp.zeros((config.kv_heads, config.head_dim), jnp.float32)
    layer = LayerCache(KVPool(nothing), KVPool(nothing), jnp.zeros(1, jnp.int32))
    cache = jax.tree.map(jnp.copy, KVCache((layer,) * config.layers))
    positions = jnp.arange(windows.shape[1], dtype=jnp.int32)
    none = jnp.zeros(1, jnp.int32)
    for window in windows:
        _, cache = decode(params, jnp.asarray(window, jnp.int32), positions, none, cache, _Watch(rotated, skip))
    kept = [layer for layer in cache.layers if layer is not None]
    return Calibration(
        k_amax=np.stack([np.asarray(layer.k.data) for layer in kept]),
        v_amax=np.stack([np.asarray(layer.v.data) for layer in kept]),
        tokens=windows[:, skip:].size,
        rotated=rotated,
        skipped_tokens=skip,
    )


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class _Watch:
    """An `Attend` without a cache, which keeps the largest absolute value of every channel in place of one."""

    rotated: bool
    skip: int

    def of_layer(self, layer: int) -> tuple[LayerAttend, int]:
        return self, layer

    def __call__(
        self,
        q: Float[Array, "tokens q_heads head_dim"],
        k: Float[Array, "tokens kv_heads head_dim"],
        v: Float[Array, "tokens kv_heads head_dim"],
        cache: LayerCache | None,
        spec: AttentionSpec,
    ) -> tuple[Float[Array, "tokens q_heads head_dim"], LayerCache | None]:
        if cache is None:
            raise ValueError("cache: expected the largest values so far, got None")
        out, _ = DenseAttend(batch=1)(q, k, v, None, spec)
        keys, values = (
            KVPool(jnp.maximum(pool.data, jnp.max(jnp.abs(rounded_first(x[self.skip :])), axis=0)))
            for pool, x in ((cache.k, rotate(k) if self.rotated else k), (cache.v, v))
        )
        return out, LayerCache(keys, values, cache.clipped)
