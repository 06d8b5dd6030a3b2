"""The hash of a prefix: the same everywhere, different for whatever differs, and spread evenly."""

import hashlib
import random

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from paxkv import hash_table
from paxkv.chain_hash import block_keys, constant_keys, hash_of_length, mix, prefix_hashes, seed, terms

PREFIX_HASHES = jax.jit(prefix_hashes, static_argnums=2)
SEED = jax.jit(seed, static_argnums=3)
BLOCK_KEYS = jax.jit(block_keys, static_argnums=1)
TERMS = jax.jit(terms)
HASH_OF_LENGTH = jax.jit(hash_of_length)


def ints(values) -> jax.Array:
    return jnp.asarray(np.asarray(values, np.int32))


def start(adapter: int = 0, salt: int = 0, epoch: int = 0, kv_format: str = "f32") -> jax.Array:
    return SEED(jnp.int32(adapter), jnp.int32(salt), jnp.int32(epoch), kv_format)


def prompt_hash(tokens: list[int], **identity) -> tuple[int, int]:
    """Of the whole prompt, in one go."""
    if not tokens:
        return pair(start(**identity))
    return pair(PREFIX_HASHES(ints(tokens), start(**identity), len(tokens))[-1])


def pair(lanes: jax.Array) -> tuple[int, int]:
    return int(lanes[0]), int(lanes[1])


# ---- the formula, in Python's integers -----------------------------------------------------------------------------

WORD = 2**32
ROOTS = [(int(n**0.5 * WORD) % WORD) | 1 for n in (2, 3, 5, 7, 11, 13)]


def plain_mix(x: int) -> int:
    x = (x ^ x >> 16) * 0x21F0AAAD % WORD
    x = (x ^ x >> 15) * 0x735A2D97 % WORD
    return x ^ x >> 15


def plain_term(token: int, position: int, lane: int) -> int:
    t, p = ROOTS[lane], ROOTS[2 + lane]
    return plain_mix(token * t % WORD ^ plain_mix((position * p + t) % WORD))


def plain_hash(tokens: list[int], identity=(0, 0, 0), kv_format: str = "f32") -> tuple[int, int]:
    lanes = []
    for lane in range(2):
        digest = hashlib.sha256(kv_format.encode()).digest()
        value = int.from_bytes(digest[4 * lane : 4 * lane + 4], "little")
        for part in identity:
            value = plain_mix((value * ROOTS[4 + lane] + part) % WORD)
        lanes.append((value + sum(plain_term(token, p, lane) for p, token in enumerate(tokens))) % WORD)
    return lanes[0], lanes[1]


def plain_key(hashed: tuple[int, int], group: int) -> tuple[int, int]:
    first, second = (plain_mix(hashed[lane] ^ (group + 1) * ROOTS[4 + lane] % WORD) for lane in range(2))
    return first, second


def test_hashes_are_what_the_formula_says():
    rng = random.Random(0)
    for _ in range(5):
        tokens = [rng.choice([0, 1, 127_999, 2**31 - 1, rng.randrange(128_000)]) for _ in range(12)]
        identity = tuple(rng.choice([0, 1, 2**31 - 1, rng.randrange(1000)]) for _ in range(3))
        begin = SEED(*map(jnp.int32, identity), "int8")
        hashes = PREFIX_HASHES(ints(tokens), begin, 4)
        assert [pair(h) for h in hashes] == [plain_hash(tokens[:n], identity, "int8") for n in (4, 8, 12)]
        for group in (0, 1, 7):
            keys = [pair(key) for key in BLOCK_KEYS(hashes, group)]
            assert keys == [plain_key(pair(h), group) for h in hashes]


@pytest.mark.parametrize(
    ("tokens", "identity", "expected_hash", "expected_key"),
    [
        ([], {}, (0x72B65148, 0x1C985156), (0xE3F0D534, 0x06649CE3)),
        ([5, 6, 7], {}, (0x76261DDB, 0x3CC196C9), (0x256621D1, 0x593AD366)),
        ([128_000, 9906, 1917, 0], {}, (0x86856AD7, 0x360FA015), (0xFBD94315, 0x7A7E9C43)),
        ([5, 6, 7], {"adapter": 1}, (0x587423F8, 0x2F6E515F), (0xE539C492, 0xA6CA12A8)),
        ([5, 6, 7], {"salt": 2}, (0x25CCB228, 0xB1AD9CAB), (0x4BCEDE59, 0x9604C84A)),
        ([5, 6, 7], {"epoch": 3}, (0x654C5D05, 0x9660A371), (0x54B842CF, 0x9D9EFDB3)),
        ([5, 6, 7], {"kv_format": "int8"}, (0xC1D75075, 0xA273C016), (0x699D293A, 0xFC18B278)),
    ],
)
def test_hashes_stay_what_they_are_from_process_to_process(tokens, identity, expected_hash, expected_key):
    """The same numbers in every process and version of Python or JAX: what one wrote, another finds."""
    assert prompt_hash(tokens, **identity) == expected_hash
    assert pair(BLOCK_KEYS(jnp.asarray([expected_hash], jnp.uint32), 0)[0]) == expected_key


# ---- what makes a difference ---------------------------------------------------------------------------------------


def test_whatever_differs_makes_another_hash():
    prompts = [
        ([1, 2, 3], {}),
        ([2, 1, 3], {}),  # another order
        ([1, 3, 2], {}),
        ([3, 2, 1], {}),
        ([1, 2, 4], {}),  # another token
        ([1, 2], {}),  # a token less
        ([1, 2, 3, 0], {}),  # a token more, even token 0
        ([0, 1, 2, 3], {}),
        ([0], {}),
        ([], {}),
        ([1, 2, 3], {"adapter": 1}),
        ([1, 2, 3], {"salt": 1}),
        ([1, 2, 3], {"epoch": 1}),
        ([1, 2, 3], {"adapter": 1, "salt": 1}),
        ([1, 2, 3], {"adapter": 2}),
        ([1, 2, 3], {"adapter": -1}),
        ([1, 2, 3], {"salt": 2**31 - 1}),
        ([1, 2, 3], {"kv_format": "int8"}),
        ([1, 2, 3], {"kv_format": "f8"}),
    ]
    hashes = [prompt_hash(tokens, **identity) for tokens, identity in prompts]
    for lane in range(2):
        assert len({h[lane] for h in hashes}) == len(prompts)


def test_a_repeated_token_adds_something_else_at_every_position():
    added = np.asarray(TERMS(jnp.full(1000, 7, jnp.int32), jnp.arange(1000, dtype=jnp.int32)))
    assert all(len(set(added[:, lane].tolist())) == 1000 for lane in range(2))


def test_groups_of_layers_have_keys_of_their_own():
    hashes = PREFIX_HASHES(jnp.arange(64, dtype=jnp.int32), start(), 16)
    keys = {pair(key) for group in range(5) for key in BLOCK_KEYS(hashes, group)}
    assert len(keys) == 20


def test_the_constant_key_tells_nothing_apart():
    hashes = PREFIX_HASHES(jnp.arange(64, dtype=jnp.int32), start(), 16)
    assert {pair(key) for group in (0, 1) for key in constant_keys(hashes, group)} == {(0, 0)}


def test_mixing_loses_nothing_and_spreads_every_bit():
    inverses = pow(0x735A2D97, -1, WORD), pow(0x21F0AAAD, -1, WORD)

    def unmix(x: int) -> int:
        x ^= x >> 15 ^ x >> 30
        x = x * inverses[0] % WORD
        x ^= x >> 15 ^ x >> 30
        x = x * inverses[1] % WORD
        return x ^ x >> 16

    values = np.random.default_rng(0).integers(0, WORD, 2000, np.uint32)
    mixed = np.asarray(mix(jnp.asarray(values)))
    assert [unmix(int(m)) for m in mixed] == values.tolist()
    for bit in range(32):
        other = np.asarray(mix(jnp.asarray(values ^ np.uint32(1 << bit))))
        flipped = np.unpackbits((mixed ^ other).view(np.uint8)).reshape(-1, 32).mean(axis=0)
        assert abs(flipped - 0.5).max() < 0.09  # 0.5 +- 8 standard deviations


# ---- prompts of any length -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("block_size", [1, 3, 16])
def test_all_prefixes_at_once_equal_extending_token_by_token(block_size):
    tokens = np.random.default_rng(1).integers(0, 128_000, 50).astype(np.int32)
    hashes = np.asarray(PREFIX_HASHES(ints(tokens), start(salt=3), block_size))
    assert hashes.shape == (50 // block_size, 2)  # what does not fill a block has no key
    added = np.asarray(TERMS(ints(tokens), jnp.arange(50, dtype=jnp.int32)))
    running, one_by_one = np.asarray(start(salt=3)), []
    for position in range(50):
        running = running + added[position]
        if (position + 1) % block_size == 0:
            one_by_one.append(running)
    np.testing.assert_array_equal(hashes, one_by_one)


def test_the_hash_of_a_length_ignores_what_comes_after_it():
    tokens = ints(np.random.default_rng(2).integers(0, 128_000, 20))
    hashes = PREFIX_HASHES(tokens, start(), 1)
    for length in (0, 1, 7, 20):
        of_length = HASH_OF_LENGTH(tokens.at[length:].set(-5), jnp.int32(length), start())
        assert pair(of_length) == (pair(hashes[length - 1]) if length else pair(start()))


# ---- spread --------------------------------------------------------------------------------------------------------


def natural_prompts(rng: np.random.Generator) -> list[np.ndarray]:
    """Token ids as tokenisers give them: few frequent ones, runs of one token, counting up, and shared beginnings."""
    frequent = np.minimum(rng.zipf(1.3, (40, 8192)), 128_000).astype(np.int32)
    frequent[:20, :1024] = frequent[0, :1024]
    runs = np.repeat(np.arange(8, dtype=np.int32)[:, None], 8192, axis=1)
    counting = np.arange(8192, dtype=np.int32)[None, :] + np.arange(8, dtype=np.int32)[:, None]
    return [*frequent, *runs, *counting]


def test_blocks_of_natural_prompts_spread_evenly_over_buckets_and_tags():
    keys = [
        np.asarray(BLOCK_KEYS(PREFIX_HASHES(ints(prompt), start(), 16), 0))
        for prompt in natural_prompts(np.random.default_rng(3))
    ]
    keys = np.unique(np.concatenate(keys), axis=0)
    assert keys.shape[0] == 56 * 512 - 19 * 64  # blocks that differ have keys that differ; equal ones are equal
    buckets = 2**12
    load = keys.shape[0] / buckets
    both = np.asarray(hash_table._buckets(jnp.asarray(keys), buckets))
    for which in range(2):
        counts = np.bincount(both[:, which], minlength=buckets)
        # Poisson: the variance equals the mean, and 6.7 keys a bucket practically never become 26.
        assert 0.9 < counts.var() / load < 1.1
        assert counts.max() < 26
    pairs = np.bincount(both[:, 0] // 64 * 64 + both[:, 1] // 64, minlength=64 * 64)
    assert 0.9 < pairs.var() / load < 1.1  # the second bucket does not follow from the first
    tags = np.asarray(hash_table.tags(jnp.asarray(keys)))
    assert keys.shape[0] - len(set(tags.tolist())) <= 3  # 0.09 expected among 2**32
    for low_bits in range(1, 9):  # and any of its bits would do to choose a place
        counts = np.bincount(tags & (2**low_bits - 1), minlength=2**low_bits)
        assert abs(counts - counts.mean()).max() < 6 * np.sqrt(counts.mean())
