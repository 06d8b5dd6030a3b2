"""Random choices out of a few random words, and the texts that make prompts begin alike."""

import jax.numpy as jnp
from jaxtyping import Array, Bool, Int32, UInt32

from paxkv.chain_hash import mix
from paxkv.memory import Content

WORDS = 12
"""Random words that one operation may use."""

_TEXTS = (0x9E3779B97F4A7C15F39CC0605CEDC834, 0x6A09E667F3BCC908B2FB1366EA957D3E, 0x510E527FADE682D19B05688C2B3E6C1F)
"""Zeros and ones that prompts begin like, again and again."""


def below(word: UInt32[Array, "*n"], bound: Int32[Array, ""] | int) -> Int32[Array, "*n"]:
    """A number from 0 to `bound` - 1."""
    return (word % jnp.asarray(bound, jnp.int32).astype(jnp.uint32)).astype(jnp.int32)


def rarely(word: UInt32[Array, "*n"], one_in: int) -> Bool[Array, "*n"]:
    """True for one in so many words."""
    return word % jnp.uint32(one_in) == 0


def spread(word: UInt32[Array, ""], count: int) -> UInt32[Array, " count"]:
    """`count` words that follow from one."""
    return mix(word + jnp.arange(count, dtype=jnp.uint32) * jnp.uint32(0x9E3779B9))


def draw_tokens(words: UInt32[Array, " 3"], count: int) -> Int32[Array, " count"]:
    """Zeros and ones that begin like one of a few texts and part from it somewhere: equal blocks are common."""
    texts = jnp.array([[text >> (p % 128) & 1 for p in range(count)] for text in _TEXTS], jnp.int32)
    text = texts[below(words[0], len(_TEXTS))]
    parts = jnp.arange(count, dtype=jnp.int32) >= below(words[1], count + 1)
    return jnp.where(parts & rarely(spread(words[2], count), 3), 1 - text, text)


def draw_content(tokens: Int32[Array, " max_len"], word: UInt32[Array, ""]) -> Content:
    """Mostly of one adapter and one salt, mostly of a new request that looks for what is cached."""
    kind = spread(word, 5)
    return Content(
        tokens=tokens,
        adapter=rarely(kind[0], 5).astype(jnp.int32),
        salt=7 * rarely(kind[1], 5).astype(jnp.int32),
        priority=below(kind[2], 3),
        resumed=rarely(kind[3], 8),
        lookup=~rarely(kind[4], 8),
    )
