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


@pytest.mark.parametrize("window", [None, 3, 37])
@pytest.mark.parametrize("dealt", ["in turn", "at random", "all to one"])
def test_tables_of_some_blocks_each_answer_for_those_and_merge_to_the_whole(dealt, window):
    """Slots that hold no visible position are NaN, in every part; entries past a sequence's end are garbage."""
    rng = np.random.default_rng(3)
    kv_lens, q_lens, size, heads, width, parts = [301, 5, 8, 170, 0, 16], [1, 5, 3, 40, 0, 1], 8, 2, 16, 3
    keys, values = ([rng.normal(size=(n, heads, width)) for n in kv_lens] for _ in range(2))
    q = rng.normal(size=(sum(q_lens) + 1, 4, width)).astype(np.float32)
    cu_q_lens = np.concatenate([[0], np.cumsum(q_lens)]).astype(np.int32)
    columns = -(-max(kv_lens) // size) + 2
    tables = rng.integers(-5, 999, (parts, len(kv_lens), columns)).astype(np.int32)
    order = np.full(tables.shape, 2**31 - 1, np.int32)
    order[:, :, -1] = 10**6  # past the end, as well
    pools = np.full((parts, 2, len(kv_lens) * columns, size, heads, width), np.nan, np.float32)
    for seq, n in enumerate(kv_lens):
        seen_from = 0 if window is None else max(0, n - q_lens[seq] + 1 - window)
        for block in range(-(-n // size)):
            part = {"in turn": block % parts, "at random": rng.integers(parts), "all to one": 1}[dealt]
            column = int(np.sum(order[part, seq] < 10**6))
            tables[part, seq, column], order[part, seq, column] = seq * columns + block, block
            for p in range(max(seen_from, block * size), min(n, (block + 1) * size)):
                pools[part, :, seq * columns + block, p % size] = keys[seq][p], values[seq][p]
    order[order == 10**6] = 2**31 - 1
    lengths = (jnp.asarray(kv_lens, jnp.int32), jnp.asarray(cu_q_lens))
    options = {"window": window, "max_q_len": 40, "return_lse": True, "backend": "xla"}
    found = [
        paged_attention(jnp.asarray(q), *map(jnp.asarray, pool), jnp.asarray(table), *lengths, block_order=o, **options)
        for pool, table, o in zip(pools, tables, map(jnp.asarray, order), strict=True)
    ]
    outs, lses = (np.asarray(x, np.float64) for x in zip(*found, strict=True))
    with np.errstate(invalid="ignore"):
        weights = np.nan_to_num(np.exp(lses - np.logaddexp.reduce(lses)))
    expected = attend(q, keys, values, kv_lens, cu_q_lens, window=window)
    np.testing.assert_allclose((outs * weights[..., None]).sum(0), expected.out, atol=2e-6)
    np.testing.assert_allclose(np.logaddexp.reduce(lses), expected.lse, atol=1e-5)
    arrays = (*map(jnp.asarray, pools[0]), jnp.asarray(tables[0]))
    with pytest.raises(NotImplementedError, match="block_order: the backend 'triton_interpret' has none"):
        paged_attention(
            jnp.asarray(q), *arrays, *lengths, block_order=jnp.asarray(order[0]), backend="triton_interpret"
        )


def test_an_entry_that_is_read_and_no_block_shows():
    pool = jnp.ones((4, 8, 1, 16), jnp.float32)
    q, lengths = jnp.ones((2, 1, 16), jnp.float32), (jnp.array([30, 30], jnp.int32), jnp.array([0, 1, 2], jnp.int32))
    table, order = jnp.array([[0, 9], [0, 9]], jnp.int32), jnp.array([[1, 3], [1, 4]], jnp.int32)
    out = np.asarray(paged_attention(q, pool, pool, table, *lengths, block_order=order, backend="xla"))
    np.testing.assert_array_equal(out[:, 0, 0], [np.nan, 1])
    table, order = jnp.array([[9, 0], [0, 9]], jnp.int32), jnp.array([[1, 3], [1, 5]], jnp.int32)
    out = np.asarray(paged_attention(q, pool, pool, table, *lengths, block_order=order, window=8, backend="xla"))
    np.testing.assert_array_equal(out[:, 0, 0], [1, 0])  # the second sees nothing
    order = jnp.array([[2, 3], [3, 4]], jnp.int32)  # of which a window of 6 at position 29 sees the last alone
    out = np.asarray(paged_attention(q, pool, pool, table, *lengths, block_order=order, window=6, backend="xla"))
    np.testing.assert_array_equal(out[:1, 0, 0], [1])
