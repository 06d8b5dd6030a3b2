"""What the XLA backend does besides the right thing: work that follows the lengths, and no copy of the cache."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import _stream
from pallas_kernels.kv_write import kv_write
from pallas_kernels.paged_attention import paged_attention
from tests.pallas_kernels.attention_oracle import attend


@pytest.mark.parametrize(
    ("window", "q_lens", "kv_tiles", "visited"),
    [
        (None, [1, 0, 0], [0, 0, 0], []),
        # Rows of 16 tiles or more go by themselves, 16 at a time while there are as many.
        (None, [1, 1, 1], [35, 16, 2], [0, 1, 15, 15, 31, 32, 33, 34]),
        (None, [1, 0, 0], [1, 0, 0], [0]),
        (None, [1, 0, 0], [1.01, 0, 0], [0, 1]),
        # Two decode rows share their steps, so the longer one decides; the chunk of 9 queries goes by itself.
        (None, [1, 1, 9], [0.01, 2, 0.1], [0, 0, 1]),
        # The window ends where the row does, and takes as many steps as it has tiles.
        (2, [1, 0, 0], [40, 0, 0], [38, 39]),
    ],
)
def test_work_follows_the_lengths_and_the_window_and_not_the_capacity(window, q_lens, kv_tiles, visited):
    tile, tokens, steps = _stream.KV_TILE, 16, []
    pool = jnp.zeros((50 * tile, 1, 8), jnp.float32)

    def slots_of(seq_ids, positions):
        jax.debug.callback(lambda positions: steps.append(int(positions.max()) // tile), positions)
        return positions

    @jax.jit
    def attend_all(kv_lens, cu_q_lens):
        return _stream.stream_attention(
            jnp.ones((tokens, 1, 8), jnp.float32),
            _stream.Source(pool, pool, None, None, slots_of, len(pool)),
            kv_lens,
            cu_q_lens,
            k_new=None,
            v_new=None,
            sinks=None,
            scale=1.0,
            window=window and window * tile,
            soft_cap=None,
            return_lse=False,
            max_q_len=tokens,
        )

    kv_lens = np.ceil(np.array(kv_tiles) * tile).astype(np.int32)
    out, _ = attend_all(jnp.asarray(kv_lens), jnp.asarray([0, *np.cumsum(q_lens)], jnp.int32))
    out.block_until_ready()
    jax.effects_barrier()
    assert sorted(steps) == visited


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_donated_cache_is_written_and_read_without_a_copy_of_it_or_of_the_table(dtype):
    seqs, blocks_per_seq, block_size, kv_heads, head_dim = 32, 256, 16, 2, 32
    heads = (kv_heads, head_dim)

    def step(k, v, k_new, v_new, slots, q, block_tables, kv_lens, cu_q_lens):
        k, v, *_ = kv_write(k, v, k_new, v_new, slots)
        blocks = (pool.reshape(-1, block_size, *heads) for pool in (k, v))
        return k, v, paged_attention(q, *blocks, block_tables, kv_lens, cu_q_lens, max_q_len=1)

    def floats(*sizes):
        return jax.ShapeDtypeStruct(sizes, dtype)

    def ints(*sizes):
        return jax.ShapeDtypeStruct(sizes, "int32")

    pool, new = floats(seqs * blocks_per_seq * block_size, *heads), floats(seqs, *heads)
    queries = floats(seqs, 2 * kv_heads, head_dim)
    lengths = (ints(seqs, blocks_per_seq), ints(seqs), ints(seqs + 1))
    compiled = jax.jit(step, donate_argnums=(0, 1)).lower(pool, pool, new, new, ints(seqs), queries, *lengths).compile()
    memory, pool_bytes = compiled.memory_analysis(), pool.size * pool.dtype.itemsize
    assert memory.alias_size_in_bytes == 2 * pool_bytes
    # Each table row is full, so the gathered table would be another copy of the pool.
    assert memory.temp_size_in_bytes < pool_bytes / 4


@pytest.mark.parametrize("window", [None, 4, 30])
@pytest.mark.parametrize("new", [False, True], ids=["stored", "new"])
@pytest.mark.parametrize("first_tokens", [1, 5, 150])
def test_first_positions_are_read_from_beside_the_cache(first_tokens, new, window):
    """Slots of theirs hold NaN, as do those of this call's tokens where they come from beside the cache, too."""
    rng = np.random.default_rng(first_tokens)
    kv_lens, q_lens, block_size, heads, width = [200, 3, 7, 160, 0], [1, 3, 5, 30, 0], 8, 2, 16
    tokens, seqs = sum(q_lens) + 2, len(kv_lens)
    keys, values = ([rng.normal(size=(n, heads, width)) for n in kv_lens] for _ in range(2))
    q = rng.normal(size=(tokens, 4, width)).astype(np.float32)
    cu_q_lens = np.concatenate([[0], np.cumsum(q_lens)]).astype(np.int32)
    table = rng.permutation(seqs * 25).reshape(seqs, 25).astype(np.int32)
    pools = np.full((2, seqs * 25 * block_size, heads, width), np.nan, np.float32)
    firsts = np.full((2, seqs, first_tokens, heads, width), np.nan, np.float32)
    news = np.full((2, tokens, heads, width), np.nan, np.float32)
    for s, (n, m) in enumerate(zip(kv_lens, q_lens, strict=True)):
        for p in range(n):
            where = (slice(None), s, p) if p < first_tokens else None
            item = np.stack([keys[s][p], values[s][p]])
            if new and p >= n - m:
                news[:, cu_q_lens[s] + p - (n - m)] = item
            elif where is not None:
                firsts[where] = item
            else:
                pools[:, table[s, p // block_size] * block_size + p % block_size] = item
    k, v = (jnp.asarray(pool.reshape(-1, block_size, heads, width)) for pool in pools)
    arguments = dict(zip(("k_first", "v_first"), map(jnp.asarray, firsts), strict=True))
    if new:
        arguments |= dict(zip(("k_new", "v_new"), map(jnp.asarray, news), strict=True))
    lengths = (jnp.asarray(table), jnp.asarray(kv_lens, jnp.int32), jnp.asarray(cu_q_lens))
    out = paged_attention(jnp.asarray(q), k, v, *lengths, window=window, max_q_len=30, backend="xla", **arguments)
    expected = attend(q, keys, values, kv_lens, cu_q_lens, window=window).out
    np.testing.assert_allclose(out, expected, atol=2e-6)
    with pytest.raises(NotImplementedError, match="k_first: the backend 'triton_interpret' has none; use 'xla'"):
        paged_attention(jnp.asarray(q), k, v, *lengths, backend="triton_interpret", **arguments)
