"""A Llama-architecture decoder over a ragged batch of tokens.

The decoder sees one flat axis of tokens, their positions, and a function `attend`. It does not know how many
sequences the tokens belong to, where keys and values are kept, or whether there is a cache at all: the engine hands
it an `attend` over a paged or contiguous memory, training hands it `dense_attend`. So one forward pass is trained,
tested and served.

All arithmetic is float32. `PRECISION` keeps it so on GPUs and TPUs, whose default for float32 products is a
shorter format, too coarse to compare the greedy tokens of two memories.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, Int32, PyTree

from models.config import DecoderConfig
from paxkv.kv_cache import Attend, AttentionSpec, KVCache, LayerAttend, LayerCache, attend_layer, no_cache

# The weights of a model, as `nnx.split` gives them.
Params = PyTree[Float[Array, "..."]]

PRECISION = jax.lax.Precision.HIGHEST


def rope(
    x: Float[Array, "tokens heads head_dim"], positions: Int32[Array, " tokens"], theta: float
) -> Float[Array, "tokens heads head_dim"]:
    """Turns the pairs (i, i + head_dim/2) of every head by `position * theta^(-2i/head_dim)` radians.

    The half-split order of pairs, as Hugging Face's Llama has it (Su et al., arXiv:2104.09864, section 3.4).
    """
    half = x.shape[-1] // 2
    inverse_wavelengths = jnp.asarray(theta ** (-np.arange(half) / half), jnp.float32)
    angles = positions.astype(jnp.float32)[:, None, None] * inverse_wavelengths[None, None, :]
    cos, sin = jnp.cos(angles), jnp.sin(angles)
    first, second = x[..., :half], x[..., half:]
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)


class RMSNorm(nnx.Module):
    """Divides by the root mean square, then scales each channel (Zhang & Sennrich, arXiv:1910.07467)."""

    def __init__(self, width: int, eps: float) -> None:
        self.scale = nnx.Param(jnp.ones((width,), jnp.float32))
        self.eps = eps

    def __call__(self, x: Float[Array, "tokens width"]) -> Float[Array, "tokens width"]:
        """Normalises every token by itself."""
        mean_square = jnp.mean(jnp.square(x), axis=-1, keepdims=True)
        return x * jax.lax.rsqrt(mean_square + self.eps) * self.scale[...][None, :]


class Attention(nnx.Module):
    """Grouped-query self-attention; what is kept of earlier tokens, and where, is `attend`'s business."""

    def __init__(self, config: DecoderConfig, *, rngs: nnx.Rngs) -> None:
        d, n, m, h = config.width, config.q_heads, config.kv_heads, config.head_dim
        self.q_proj = _weight(rngs, (d, n, h), fan_in=d)
        self.k_proj = _weight(rngs, (d, m, h), fan_in=d)
        self.v_proj = _weight(rngs, (d, m, h), fan_in=d)
        self.o_proj = _weight(rngs, (n, h, d), fan_in=n * h * 2 * config.layers)
        self.rope_theta = config.rope_theta

    def __call__(
        self,
        x: Float[Array, "tokens width"],
        positions: Int32[Array, " tokens"],
        attend: LayerAttend,
        cache: LayerCache | None,
    ) -> tuple[Float[Array, "tokens width"], LayerCache | None]:
        """Keys are stored after RoPE, so a stored key never has to be turned again."""
        q = jnp.einsum("td,dnh->tnh", x, self.q_proj[...], precision=PRECISION)
        k = jnp.einsum("td,dmh->tmh", x, self.k_proj[...], precision=PRECISION)
        v = jnp.einsum("td,dmh->tmh", x, self.v_proj[...], precision=PRECISION)
        q, k = rope(q, positions, self.rope_theta), rope(k, positions, self.rope_theta)
        out, cache = attend(q, k, v, cache, AttentionSpec())
        return jnp.einsum("tnh,nhd->td", out, self.o_proj[...], precision=PRECISION), cache


class SwiGLU(nnx.Module):
    """The gated feed-forward block (Shazeer, arXiv:2002.05202)."""

    def __init__(self, config: DecoderConfig, *, rngs: nnx.Rngs) -> None:
        self.gate_proj = _weight(rngs, (config.width, config.ffn), fan_in=config.width)
        self.up_proj = _weight(rngs, (config.width, config.ffn), fan_in=config.width)
        self.down_proj = _weight(rngs, (config.ffn, config.width), fan_in=config.ffn * 2 * config.layers)

    def __call__(self, x: Float[Array, "tokens width"]) -> Float[Array, "tokens width"]:
        """Each token by itself."""
        gate = jnp.dot(x, self.gate_proj[...], precision=PRECISION)
        up = jnp.dot(x, self.up_proj[...], precision=PRECISION)
        return jnp.dot(jax.nn.silu(gate) * up, self.down_proj[...], precision=PRECISION)


class Layer(nnx.Module):
    """Attention and feed-forward, each behind a norm and beside a residual."""

    def __init__(self, config: DecoderConfig, *, rngs: nnx.Rngs) -> None:
        self.attention_norm = RMSNorm(config.width, config.norm_eps)
        self.attention = Attention(config, rngs=rngs)
        self.ffn_norm = RMSNorm(config.width, config.norm_eps)
        self.ffn = SwiGLU(config, rngs=rngs)

    def __call__(
        self,
        x: Float[Array, "tokens width"],
        positions: Int32[Array, " tokens"],
        attend: LayerAttend,
        cache: LayerCache | None,
    ) -> tuple[Float[Array, "tokens width"], LayerCache | None]:
        """One layer of the residual stream."""
        attended, cache = self.attention(self.attention_norm(x), positions, attend, cache)
        x = x + attended
        return x + self.ffn(self.ffn_norm(x)), cache


class Decoder(nnx.Module):
    """Embedding, layers, final norm, output projection; weights drawn from `rngs`."""

    def __init__(self, config: DecoderConfig, *, rngs: nnx.Rngs) -> None:
        self.embedding = _weight(rngs, (config.vocab, config.width), fan_in=_EMBEDDING_FAN_IN)
        self.layers = nnx.List([Layer(config, rngs=rngs) for _ in range(config.layers)])
        self.norm = RMSNorm(config.width, config.norm_eps)
        if not config.tied_embeddings:
            self.output = _weight(rngs, (config.vocab, config.width), fan_in=config.width)
        self.config = config

    def __call__(
        self,
        tokens: Int32[Array, " tokens"],
        positions: Int32[Array, " tokens"],
        select: Int32[Array, " rows"],
        cache: KVCache,
        attend: Attend,
    ) -> tuple[Float[Array, "rows vocab"], KVCache]:
        """Logits of the token that follows each selected one.

        Args:
          tokens: Token ids of a ragged batch. An id outside the vocabulary makes that token NaN, and no other.
          positions: Of each token in its own sequence, from 0.
          select: Indices into `tokens`; a row that selects outside of them gets logits without meaning.
          cache: Keys and values so far; whatever `attend` understands.
          attend: Stores the new keys and values and attends over all; owns causality and scaling.
        """
        embedding = self.embedding[...]
        x = _take_rows(embedding, tokens, fill=jnp.nan)
        for i, layer in enumerate(self.layers):
            x, cache = attend_layer(attend, i, cache, functools.partial(layer, x, positions))
        # Most of a prefill chunk needs no logits: pick first, project after.
        x = self.norm(_take_rows(x, select, fill=0.0))
        output = embedding if self.config.tied_embeddings else self.output[...]
        return jnp.einsum("rd,vd->rv", x, output, precision=PRECISION), cache


@dataclasses.dataclass(frozen=True)
class Decode:
    """A decoder without its weights: hashable, so it can be a static argument of a jitted step.

    Two models of one config give equal `Decode`s, which share a compiled program.
    """

    config: DecoderConfig

    def __call__(
        self,
        params: Params,
        tokens: Int32[Array, " tokens"],
        positions: Int32[Array, " tokens"],
        select: Int32[Array, " rows"],
        cache: KVCache,
        attend: Attend,
    ) -> tuple[Float[Array, "rows vocab"], KVCache]:
        """`Decoder.__call__` as a pure function of its weights."""
        return self.model(params)(tokens, positions, select, cache, attend)

    def model(self, params: Params) -> Decoder:
        """The decoder with these weights."""
        return nnx.merge(nnx.graphdef(abstract_decoder(self.config)), params)


def abstract_decoder(config: DecoderConfig) -> Decoder:
    """A decoder whose weights are shapes and dtypes only."""
    return nnx.eval_shape(lambda: Decoder(config, rngs=nnx.Rngs(0)))


def make_decode(model: Decoder) -> tuple[Decode, Params]:
    """Splits a model into the function an engine calls and the weights it passes (a pytree of arrays)."""
    return Decode(model.config), nnx.as_pure(nnx.state(model))


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
        """Causal attention within each sequence; the cache passes through untouched."""
        by_sequence = [x.reshape(self.batch, -1, *x.shape[1:]) for x in (q, k, v)]
        with jax.default_matmul_precision("highest"):
            out = jax.nn.dot_product_attention(*by_sequence, is_causal=True)
        return out.reshape(q.shape), cache


def forward(
    decode: Decode, params: Params, tokens: Int32[Array, "batch context"]
) -> Float[Array, "batch context vocab"]:
    """Next-token logits at every position of equally long sequences that start at position 0."""
    batch, context = tokens.shape
    positions = jnp.tile(jnp.arange(context, dtype=jnp.int32), batch)
    select = jnp.arange(batch * context, dtype=jnp.int32)
    cache = no_cache(decode.config.layers)
    logits, _ = decode(params, tokens.reshape(-1), positions, select, cache, DenseAttend(batch))
    return logits.reshape(batch, context, -1)


# Standard deviation 0.02: small enough that, the embedding being the output projection too, an untrained model
# does not simply repeat its input.
_EMBEDDING_FAN_IN = 2500


def _weight(rngs: nnx.Rngs, shape: tuple[int, ...], fan_in: int) -> nnx.Param[jax.Array]:
    """Normal with variance 1/fan_in; layers' outputs pass 2 * layers as well, to keep the residual stream level."""
    return nnx.Param(jax.random.normal(rngs.params(), shape, jnp.float32) * fan_in**-0.5)


def _take_rows(
    table: Float[Array, "rows width"], rows: Int32[Array, " picked"], fill: float
) -> Float[Array, "picked width"]:
    return table.at[rows].get(mode="fill", fill_value=fill, wrap_negative_indices=False)
