"""The parts of a decoder: norm, attention, feed-forward, and the layer they make up.

A layer is a pytree of its weights, so it can be an argument of a jitted function; what it knows beside them is static.
Layers that differ in their weights only are therefore one compiled program.

Products are taken at full float32 precision where the inputs are float32: GPUs and TPUs default to a shorter format,
too coarse to compare the greedy tokens of two memories. Norms and RoPE are float32 whatever the activations are.
"""

import functools
from collections.abc import Callable, Mapping

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int32

from models.config import Activation, DecoderConfig
from models.rope import rope
from models.split import WHOLE, Split, add_up
from paxkv.kv_cache import AttentionSpec, LayerAttend, LayerCache

_ACTIVATIONS: Mapping[Activation, Callable[[jax.Array], jax.Array]] = {
    "silu": jax.nn.silu,
    "gelu_tanh": functools.partial(jax.nn.gelu, approximate=True),
}


def project(
    equation: str, x: Float[Array, "..."], weight: Float[Array, "..."], dtype: jnp.dtype | None = None
) -> Float[Array, "..."]:
    """An einsum with a weight, which is read in x's dtype; the result has that too, or `dtype`."""
    return jnp.einsum(
        equation, x, weight.astype(x.dtype), precision=jax.lax.Precision.HIGHEST, preferred_element_type=dtype
    )


def random_weight(config: DecoderConfig, rngs: nnx.Rngs, shape: tuple[int, ...], fan_in: int) -> nnx.Param[jax.Array]:
    """Normal with variance 1/fan_in; layers' outputs pass 2 * layers as well, to keep the residual stream level."""
    weight = jax.random.normal(rngs.params(), shape, jnp.float32) * fan_in**-0.5
    return nnx.Param(weight.astype(config.param_dtype))


class RMSNorm(nnx.Module):
    """Divides by the root mean square, then scales each channel (Zhang & Sennrich, arXiv:1910.07467)."""

    def __init__(self, config: DecoderConfig, width: int) -> None:
        # Either way a new norm scales by one.
        self.scale = nnx.Param(jnp.full((width,), 0 if config.norm_plus_one else 1, config.param_dtype))
        self.plus_one = config.norm_plus_one
        self.eps = config.norm_eps

    def __call__(self, x: Float[Array, "*batch width"]) -> Float[Array, "*batch width"]:
        """Normalises every vector by itself."""
        full = x.astype(jnp.float32)
        mean_square = jnp.mean(jnp.square(full), axis=-1, keepdims=True)
        scale = self.scale[...].astype(jnp.float32)
        scale = jnp.broadcast_to(1 + scale if self.plus_one else scale, x.shape)
        return (full * jax.lax.rsqrt(mean_square + self.eps) * scale).astype(x.dtype)


class Attention(nnx.Module):
    """Grouped-query self-attention; what is kept of earlier tokens, and where, is `attend`'s business."""

    def __init__(self, config: DecoderConfig, window: int | None, *, rngs: nnx.Rngs, split: Split = WHOLE) -> None:
        d, n, m, h = config.width, config.q_heads, config.kv_heads, config.head_dim
        self.q_proj = random_weight(config, rngs, (d, n, h), fan_in=d)
        self.k_proj = random_weight(config, rngs, (d, m, h), fan_in=d)
        self.v_proj = random_weight(config, rngs, (d, m, h), fan_in=d)
        self.o_proj = random_weight(config, rngs, (n, h, d), fan_in=n * h * 2 * config.layers)
        if config.attention_bias:
            self.q_bias, self.k_bias, self.v_bias = (
                nnx.Param(jnp.zeros((heads, h), config.param_dtype)) for heads in (n, m, m)
            )
        if config.qk_norm:
            self.q_norm, self.k_norm = RMSNorm(config, h), RMSNorm(config, h)
        self.spec = AttentionSpec(scale=config.query_scale, window=window, soft_cap=config.attention_soft_cap)
        self.rope_theta, self.rope_scaling = config.rope_theta, config.rope_scaling
        if window is not None and config.local_rope_theta is not None:
            self.rope_theta, self.rope_scaling = config.local_rope_theta, None
        self.config, self.split = config, split

    def __call__(
        self,
        x: Float[Array, "tokens width"],
        positions: Int32[Array, " tokens"],
        attend: LayerAttend,
        cache: LayerCache | None,
    ) -> tuple[Float[Array, "tokens width"], LayerCache | None]:
        """Keys are stored after RoPE, so a stored key never has to be turned again."""
        q = project("td,dnh->tnh", x, self.q_proj[...])
        k = project("td,dmh->tmh", x, self.k_proj[...])
        v = project("td,dmh->tmh", x, self.v_proj[...])
        if self.config.attention_bias:
            q, k, v = (
                heads + bias[...].astype(heads.dtype)[None]
                for heads, bias in ((q, self.q_bias), (k, self.k_bias), (v, self.v_bias))
            )
        if self.config.qk_norm:
            q, k = self.q_norm(q), self.k_norm(k)
        q, k = (rope(heads, positions, self.rope_theta, self.rope_scaling) for heads in (q, k))
        out, cache = attend(q, k, v, cache, self.spec)
        return add_up(project("tnh,nhd->td", out, self.o_proj[...]), self.split.heads), cache


class FeedForward(nnx.Module):
    """The gated feed-forward block (Shazeer, arXiv:2002.05202): SwiGLU or GeGLU."""

    def __init__(self, config: DecoderConfig, *, rngs: nnx.Rngs, split: Split = WHOLE) -> None:
        self.gate_proj = random_weight(config, rngs, (config.width, config.ffn), fan_in=config.width)
        self.up_proj = random_weight(config, rngs, (config.width, config.ffn), fan_in=config.width)
        self.down_proj = random_weight(config, rngs, (config.ffn, config.width), fan_in=config.ffn * 2 * config.layers)
        self.activation: Activation = config.activation
        self.split = split

    def __call__(self, x: Float[Array, "tokens width"]) -> Float[Array, "tokens width"]:
        """Each token by itself."""
        gate = _ACTIVATIONS[self.activation](project("td,df->tf", x, self.gate_proj[...]))
        up = project("td,df->tf", x, self.up_proj[...])
        return add_up(project("tf,fd->td", gate * up, self.down_proj[...]), self.split.ffn)


class Layer(nnx.Module):
    """Attention and feed-forward, each behind a norm and beside a residual.

    Args:
      config: of the decoder.
      window: positions a query of this layer sees, its own included; None for all.
      rngs: the weights are drawn from it.
      split: what is shared with other devices.
    """

    def __init__(self, config: DecoderConfig, window: int | None, *, rngs: nnx.Rngs, split: Split = WHOLE) -> None:
        self.attention_norm = RMSNorm(config, config.width)
        self.attention = Attention(config, window, rngs=rngs, split=split)
        self.ffn_norm = RMSNorm(config, config.width)
        self.ffn = FeedForward(config, rngs=rngs, split=split)
        if config.post_norms:
            self.attention_post_norm = RMSNorm(config, config.width)
            self.ffn_post_norm = RMSNorm(config, config.width)
        self.post_norms = config.post_norms

    def __call__(
        self,
        x: Float[Array, "tokens width"],
        positions: Int32[Array, " tokens"],
        attend: LayerAttend,
        cache: LayerCache | None,
    ) -> tuple[Float[Array, "tokens width"], LayerCache | None]:
        """One layer of the residual stream."""
        attended, cache = self.attention(self.attention_norm(x), positions, attend, cache)
        x = x + (self.attention_post_norm(attended) if self.post_norms else attended)
        fed = self.ffn(self.ffn_norm(x))
        return x + (self.ffn_post_norm(fed) if self.post_norms else fed), cache


@jax.jit(donate_argnames="cache")
def run_layer(
    layer: Layer,
    x: Float[Array, "tokens width"],
    positions: Int32[Array, " tokens"],
    attend: LayerAttend,
    cache: LayerCache | None,
) -> tuple[Float[Array, "tokens width"], LayerCache | None]:
    """`Layer.__call__`, compiled once for all layers of a kind.

    Donates `cache`, so that a step outside of jit writes a few slots and does not copy all of them.
    """
    return layer(x, positions, attend, cache)
