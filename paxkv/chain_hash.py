"""The 64-bit hash of a prefix, in two uint32 lanes.

    hash(p) = seed(adapter, salt, epoch, format) + sum of term(position, token) over the first p tokens   (mod 2**32)

A sum is associative, so the hashes of all prefixes of a prompt are one cumulative sum, a decode step adds one term
to each row, and prefixes of any block size come from the same sum. Each term mixes token and position, so the order
of the tokens counts. The key under which a block is found is the hash at its end, mixed once more.

Integer arithmetic alone: two processes, machines and Python versions give the same hash.
"""

import hashlib

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int32, UInt32

# Odd constants with well-spread bits, one for each lane and use: the first 32 bits of the fractional parts of the
# square roots of 2, 3, 5, 7, 11 and 13, their lowest bit set.
_TOKEN = (0x6A09E667, 0xBB67AE85)
_POSITION = (0x3C6EF373, 0xA54FF53B)
_KEY = (0x510E527F, 0x9B05688D)


def mix(x: jax.Array) -> jax.Array:
    """Spreads every bit of a uint32 over all others: a bijection of two multiply-xorshift rounds."""
    x = (x ^ (x >> 16)) * jnp.uint32(0x21F0AAAD)
    x = (x ^ (x >> 15)) * jnp.uint32(0x735A2D97)
    return x ^ (x >> 15)


def terms(tokens: Int32[Array, " n"], positions: Int32[Array, " n"]) -> UInt32[Array, "n 2"]:
    """What each token at its position adds to the hash of every prefix that holds it."""
    token, position = tokens.astype(jnp.uint32), positions.astype(jnp.uint32)
    lanes = [mix(token * jnp.uint32(t) ^ mix(position * jnp.uint32(p) + jnp.uint32(t))) for t, p in _lanes()]
    return jnp.stack(lanes, axis=-1)


def seed(
    adapter: Int32[Array, "*n"], salt: Int32[Array, "*n"], epoch: Int32[Array, "*n"], kv_format: str
) -> UInt32[Array, "*n 2"]:
    """The hash of an empty prefix: whatever makes equal tokens have other keys and values, or keeps tenants apart."""
    digest = hashlib.sha256(kv_format.encode()).digest()  # on the host, while tracing
    lanes = []
    for lane, constant in enumerate(_KEY):
        h = jnp.uint32(int.from_bytes(digest[4 * lane : 4 * lane + 4], "little"))
        for part in (adapter, salt, epoch):
            h = mix(h * jnp.uint32(constant) + part.astype(jnp.uint32))
        lanes.append(h)
    return jnp.stack(lanes, axis=-1)


def prefix_hashes(tokens: Int32[Array, " n"], start: UInt32[Array, " 2"], block_size: int) -> UInt32[Array, "blocks 2"]:
    """The hash of a prompt at the end of each of its `n // block_size` full blocks.

    Args:
      tokens: the prompt, from its first token.
      start: `seed` of the prompt.
      block_size: tokens in a block.
    """
    blocks = tokens.shape[0] // block_size
    count = blocks * block_size
    added = terms(tokens[:count], jnp.arange(count, dtype=jnp.int32)).reshape(blocks, block_size, 2)
    return start[None, :] + jnp.cumsum(jnp.sum(added, axis=1, dtype=jnp.uint32), axis=0, dtype=jnp.uint32)


def hash_of_length(
    tokens: Int32[Array, " n"], length: Int32[Array, ""], start: UInt32[Array, " 2"]
) -> UInt32[Array, " 2"]:
    """The hash of the first `length` tokens."""
    position = jnp.arange(tokens.shape[0], dtype=jnp.int32)
    inside = (position < length)[:, None]
    return start + jnp.sum(jnp.where(inside, terms(tokens, position), jnp.uint32(0)), axis=0, dtype=jnp.uint32)


def block_keys(hashes: UInt32[Array, "n 2"], group: int = 0) -> UInt32[Array, "n 2"]:
    """The keys under which blocks that end at these hashes are found.

    Args:
      hashes: of the prefixes.
      group: of layers; each has its own blocks of the same tokens.
    """
    return jnp.stack(
        [mix(hashes[:, lane] ^ jnp.uint32(((group + 1) * _KEY[lane]) % 2**32)) for lane in range(2)], axis=-1
    )


def constant_keys(hashes: UInt32[Array, "n 2"], group: int = 0) -> UInt32[Array, "n 2"]:
    """The same key for everything: for tests, which show that a collision is a miss."""
    del group
    return jnp.zeros_like(hashes)


def _lanes() -> zip:
    return zip(_TOKEN, _POSITION, strict=True)
