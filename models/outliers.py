"""An outlier in the keys that changes nothing a model computes: one RoPE pair of keys up, of queries down.

The channels i and i + head_dim / 2 turn together under RoPE. If the keys' projection of both is multiplied by a factor
and the queries' is divided by it, every product of a query and a key stays what it was; and where the factor is a power
of two, its bits do. So whatever the outlier does to a model with a quantised cache, the quantisation did.
"""

import math

import jax
import jax.numpy as jnp

from models.config import DecoderConfig
from models.decoder import Params


def with_outlier(config: DecoderConfig, params: Params, factor: float, pair: int = 0) -> Params:
    """The weights of a model whose keys have an outlier in one RoPE pair, in every layer and KV head.

    Args:
      config: of the model.
      params: its weights, which stay as they are.
      factor: by which the pair of the keys is multiplied and that of the queries divided; a power of two.
      pair: which, below head_dim / 2; pair 0 turns fastest.

    Raises:
      ValueError: the factor is no power of two, the pair does not exist, or the model normalises queries and keys,
        which takes any factor out again.
    """
    if not (0 < factor < math.inf) or math.frexp(factor)[0] != 0.5:
        raise ValueError(f"factor: expected a power of two, which changes no bit but the exponent's, got {factor}")
    half = config.head_dim // 2
    if not 0 <= pair < half:
        raise ValueError(f"pair: expected one of the {half} RoPE pairs, 0 to {half - 1}, got {pair}")
    if getattr(config, "qk_norm", False):
        raise ValueError("config.qk_norm: expected a model that does not normalise queries and keys, got True")
    factors = {"k": factor, "q": 1 / factor}

    def scaled(path: tuple, weight: jax.Array) -> jax.Array:
        name = jax.tree_util.keystr(path[-1:], simple=True)
        of, _, kind = name.partition("_")
        if of not in factors or kind not in ("proj", "bias"):
            return weight
        channels = jnp.array([pair, pair + half])
        return weight.at[..., channels].multiply(jnp.asarray(factors[of], weight.dtype))

    return jax.tree_util.tree_map_with_path(scaled, params)
