"""One decoder for many families (Llama, Qwen, Mistral, Gemma) over a ragged batch of tokens.

The decoder sees one flat axis of tokens, their positions, and an `attend`. It does not know how many sequences the
tokens belong to, where keys and values are kept, or whether there is a cache at all: the engine hands it an attention
over a paged or contiguous memory, training hands it `DenseAttend`. So one forward pass is trained, tested and served.
What a family does otherwise than the others is a field of `DecoderConfig`.
"""

import dataclasses
import functools

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Float32, Int32, PyTree

from models.config import DecoderConfig
from models.dense_attend import DenseAttend
from models.layers import Layer, RMSNorm, project, random_weight, run_layer
from models.split import WHOLE, Split, gather_logits, look_up
from paxkv.kv_cache import Attend, KVCache, attend_layer, no_cache

# The weights of a model, as `nnx.split` gives them.
Params = PyTree[Float[Array, "..."]]

# Standard deviation 0.02: small enough that, the embedding being the output projection too, an untrained model
# does not simply repeat its input.
_EMBEDDING_FAN_IN = 2500


class Decoder(nnx.Module):
    """Embedding, layers, final norm, output projection; weights drawn from `rngs`."""

    def __init__(self, config: DecoderConfig, *, rngs: nnx.Rngs, split: Split = WHOLE) -> None:
        self.embedding = random_weight(config, rngs, (config.vocab, config.width), fan_in=_EMBEDDING_FAN_IN)
        self.layers = nnx.List(
            [Layer(config, config.window_of(i), rngs=rngs, split=split) for i in range(config.layers)]
        )
        self.norm = RMSNorm(config, config.width)
        if not config.tied_embeddings:
            self.output = random_weight(config, rngs, (config.vocab, config.width), fan_in=config.width)
        self.config, self.split = config, split

    def __call__(
        self,
        tokens: Int32[Array, " tokens"],
        positions: Int32[Array, " tokens"],
        select: Int32[Array, " rows"],
        cache: KVCache,
        attend: Attend,
    ) -> tuple[Float32[Array, "rows vocab"], KVCache]:
        """Logits of the token that follows each selected one.

        Args:
          tokens: Token ids of a ragged batch. An id outside the vocabulary makes that token NaN, and no other.
          positions: Of each token in its own sequence, from 0.
          select: Indices into `tokens`; a row that selects outside of them gets logits without meaning.
          cache: Keys and values so far; whatever `attend` understands.
          attend: Stores the new keys and values and attends over all; owns causality.
        """
        x = self.embed(tokens)
        for i, layer in enumerate(self.layers):
            x, cache = attend_layer(attend, i, cache, functools.partial(run_layer, layer, x, positions))
        return self.logits(x, select), cache

    def embed(self, tokens: Int32[Array, " tokens"]) -> Float[Array, "tokens width"]:
        """What the first layer is given."""
        x = look_up(self.embedding[...], tokens, self.split.vocab).astype(self.config.dtype)
        if self.config.embedding_scale:
            # Rounded to the activations' dtype, as the models were trained.
            x *= jnp.asarray(self.config.width**0.5, x.dtype)
        return x

    def logits(self, x: Float[Array, "tokens width"], select: Int32[Array, " rows"]) -> Float32[Array, "rows vocab"]:
        """What follows the selected of the tokens that the last layer gives."""
        # Most of a prefill chunk needs no logits: pick first, project after.
        x = self.norm(x.at[select].get(mode="fill", fill_value=0, wrap_negative_indices=False))
        output = self.embedding[...] if self.config.tied_embeddings else self.output[...]
        logits = project("rd,vd->rv", x, output, jnp.dtype("float32"))
        if self.config.final_soft_cap is not None:
            logits = self.config.final_soft_cap * jnp.tanh(logits / self.config.final_soft_cap)
        return gather_logits(logits, self.split.vocab)


@dataclasses.dataclass(frozen=True)
class Decode:
    """A decoder without its weights: hashable, so it can be a static argument of a jitted step.

    Two models of one config give equal `Decode`s, which share a compiled program.
    """

    config: DecoderConfig  # of the whole, or of a device's part
    split: Split = WHOLE

    def __call__(
        self,
        params: Params,
        tokens: Int32[Array, " tokens"],
        positions: Int32[Array, " tokens"],
        select: Int32[Array, " rows"],
        cache: KVCache,
        attend: Attend,
    ) -> tuple[Float32[Array, "rows vocab"], KVCache]:
        """`Decoder.__call__` as a pure function of its weights."""
        return self.model(params)(tokens, positions, select, cache, attend)

    def model(self, params: Params) -> Decoder:
        """The decoder with these weights."""
        return nnx.merge(_structure(self.config, self.split), params)


def abstract_decoder(config: DecoderConfig, split: Split = WHOLE) -> Decoder:
    """A decoder whose weights are shapes and dtypes only."""
    return nnx.eval_shape(lambda: Decoder(config, rngs=nnx.Rngs(0), split=split))


@functools.cache
def _structure(config: DecoderConfig, split: Split) -> nnx.GraphDef[Decoder]:
    """What a decoder is beside its weights; takes a while to find out for many layers."""
    return nnx.graphdef(abstract_decoder(config, split))


def make_decode(model: Decoder) -> tuple[Decode, Params]:
    """Splits a model into the function an engine calls and the weights it passes (a pytree of arrays)."""
    return Decode(model.config, model.split), nnx.as_pure(nnx.state(model))


def forward(
    decode: Decode, params: Params, tokens: Int32[Array, "batch context"]
) -> Float32[Array, "batch context vocab"]:
    """Next-token logits at every position of equally long sequences that start at position 0."""
    batch, context = tokens.shape
    positions = jnp.tile(jnp.arange(context, dtype=jnp.int32), batch)
    select = jnp.arange(batch * context, dtype=jnp.int32)
    cache = no_cache(decode.config.layers)
    logits, _ = decode(params, tokens.reshape(-1), positions, select, cache, DenseAttend(batch))
    return logits.reshape(batch, context, -1)
