"""What is read back of what was stored, against arithmetic in float64, and the mistakes that must show."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from paxkv.attend import MemoryAttend
from paxkv.calibration import Calibration
from paxkv.forward import Reader, begin
from paxkv.init_cache import init_kv_cache
from paxkv.kv_cache import (
    AttentionSpec,
    KVCache,
    LayerCache,
    copy_blocks,
    copy_blocks_between,
    with_blocks,
)
from paxkv.kv_format import KVFormat, TensorFormat, scheme
from paxkv.kv_store import Places, rotate, store
from paxkv.paged import Paged
from paxkv.prefix_cache import PrefixCache
from paxkv.reserved import Reserved

Q_HEADS, HEADS, WIDTH, BLOCK = 4, 2, 8, 4
MEMORY = Paged(rows=2, max_len=32, block_size=BLOCK, num_blocks=12)
RANGES = Reserved(rows=2, max_len=32, num_slots=64, policy="max")
LARGEST = {"e4m3": 448.0, "e5m2": 57344.0, "int8": 127.0, "int4": 7.0}
NUMPY = {"e4m3": ml_dtypes.float8_e4m3fn, "e5m2": ml_dtypes.float8_e5m2}
TOKENS = 22


@functools.cache
def inputs():
    """Keys are larger than values, and one channel of them larger still, as in trained models."""
    rng = np.random.default_rng(0)
    q, k, v = (rng.normal(size=(TOKENS, heads, WIDTH)) for heads in (Q_HEADS, HEADS, HEADS))
    k[:, :, 3] *= 4
    return [jnp.asarray(x, jnp.float32) for x in (q, 1.5 * k, v / 2)]


def calibration():
    amax = [
        np.asarray(jnp.max(jnp.abs(x.astype(jnp.bfloat16).astype(jnp.float32)), axis=0))[None] for x in inputs()[1:]
    ]
    return Calibration(*amax, TOKENS, rotated=False)


def new_cache(fmt, memory=MEMORY):
    amax = dataclasses.replace(calibration(), skipped_tokens=fmt.precise_tokens)
    return init_kv_cache(1, memory.num_slots, HEADS, WIDTH, fmt, block_size=BLOCK, rows=memory.rows, calibration=amax)


@jax.jit(static_argnames="spec")
def attend_in(attend, q, k, v, layer, spec):
    return attend(q, k, v, layer, spec)


@functools.cache
def appending(memory):
    return jax.jit(memory.append, static_argnames="max_new_tokens")


@jax.jit(static_argnames="fmt")
def store_at(fmt, layer, k, v, slots):
    return store(fmt, layer, k, v, Places(slots, MEMORY.rows, BLOCK))


def filled(fmt, chunks=(TOKENS,)):
    """The layer after all tokens were stored in the first slots, chunk by chunk."""
    layer, done = new_cache(fmt).layers[0], 0
    for count in chunks:
        slots = done + jnp.arange(count, dtype=jnp.int32)
        layer = store_at(fmt, layer, *(x[done : done + count] for x in inputs()[1:]), slots)
        done += count
    return layer


def run(fmt, change=lambda layer: layer):
    """The output of the last token, which reads what was stored of all others; `change` meddles with that."""
    last = TOKENS - 1
    reader = Reader(MEMORY, None, fmt)
    state, _, _ = begin(reader, MEMORY.init(), last, TOKENS)
    for count in (last, 1):
        state, _ = appending(MEMORY)(state, jnp.array([count, 0], jnp.int32), max_new_tokens=count)
    slots = MEMORY.slots(state, jnp.zeros(TOKENS, jnp.int32), jnp.arange(TOKENS, dtype=jnp.int32))
    q, k, v = inputs()
    layer = store_at(fmt, new_cache(fmt).layers[0], k[:last], v[:last], slots[:last])
    attend = MemoryAttend(state, (slots[last:],), jnp.array([0, 1, 1], jnp.int32), MEMORY, fmt, 1)
    return np.asarray(attend_in(attend, q[last:], k[last:], v[last:], change(layer), AttentionSpec())[0])


def bits(layer):
    return [np.asarray(a).reshape(-1).view(np.uint8) for a in jax.tree.leaves((layer.k, layer.v))]


def relative(a, b):
    return np.linalg.norm(a - b) / np.linalg.norm(b)


@functools.cache
def exact():
    return run(scheme("f32"))


def rounded(x, element):
    """The nearest stored value, in float64: clipped first."""
    x = np.clip(x, -LARGEST[element], LARGEST[element])
    return np.rint(x) if element.startswith("int") else x.astype(NUMPY[element]).astype(np.float64)


def largest_of_blocks(size):
    """The largest number of each token's block: [tokens, heads]."""
    blocks = np.split(size, range(BLOCK, TOKENS, BLOCK))
    return np.concatenate([np.broadcast_to(block.max((0, 2)), (len(block), HEADS)) for block in blocks])


def expected_reading(x, element, granularity):
    """What is read back of `x`, from the definition: bfloat16 first, then divided, clipped, rounded, multiplied."""
    x = np.asarray(x.astype(jnp.bfloat16)).astype(np.float64)
    size = np.abs(x)
    blocks = np.concatenate(
        [np.broadcast_to(b.max((0, 2)), (len(b), HEADS)) for b in np.split(size, range(BLOCK, TOKENS, BLOCK))]
    )
    scale = {
        "none": np.float64(LARGEST[element]),
        "layer": size.max(),
        "head": size.max((0, 2))[:, None],
        "channel": size.max(0),
        "block_head": blocks[..., None],
        "token_head": size.max(2)[..., None],
    }[granularity] / LARGEST[element]
    return rounded(x / scale, element) * scale


def read_back(layer):
    """Keys and values of the first tokens as attention sees them."""
    pools = []
    for pool in (layer.k, layer.v):
        data = np.asarray(pool.data)
        if data.dtype == np.uint8:
            low, high = (data << 4).view(np.int8) >> 4, data.view(np.int8) >> 4
            data = np.concatenate([low, high], axis=-1)
        data = data.astype(np.float64)
        if pool.scales is not None:
            scales = np.asarray(pool.scales).astype(np.float64)
            data *= np.repeat(scales, len(data) // len(scales), axis=0)[..., None]
        if pool.factor is not None:
            factor = np.asarray(pool.factor, np.float64)
            data *= factor[:, None] if factor.ndim == 1 else factor
        pools.append(data[:TOKENS])
    return pools


@pytest.mark.parametrize(
    "name",
    [
        *(f"e4m3_{g}" for g in ("none", "layer", "head", "block_head", "token_head")),
        *(f"int8_{g}" for g in ("layer", "head", "block_head", "token_head")),
        "e5m2_none",
        "e4m3_channel_k",
        "int8_channel_k",
        "int4_token_head",
        "int4_block_head",
    ],
)
def test_what_is_read_back_is_what_the_definition_says(name):
    fmt = scheme(name)
    layer = filled(fmt)
    for x, tensor, found in zip(inputs()[1:], (fmt.k, fmt.v), read_back(layer), strict=True):
        if not tensor.quantised:
            np.testing.assert_array_equal(found, np.asarray(x.astype(jnp.bfloat16), np.float64))
            continue
        # A quotient that lies between two values may be rounded to either: a step of a few numbers in a hundred.
        expected = expected_reading(x, tensor.element, tensor.granularity)
        step = np.abs(expected) * {"e4m3": 2**-3, "e5m2": 2**-2}.get(tensor.element, 0)
        step += np.abs(x).max() / LARGEST[tensor.element]
        assert (np.abs(found - expected) <= step + 1e-9).all()
        assert (np.abs(found - expected) > 1e-5 * np.abs(x).max()).mean() < 0.01


FREE_OF_CHUNKS = ["bf16", "e4m3_none", "e4m3_head", "int8_channel_k", "e4m3_token_head", "int4_token_head"]


@pytest.mark.parametrize("name", FREE_OF_CHUNKS)
def test_chunks_of_any_size_store_the_same_bits(name):
    layer = filled(scheme(name))
    for chunks in ((1,) * TOKENS, (7, 7, 7, 1)):
        assert all(map(np.array_equal, bits(layer), bits(filled(scheme(name), chunks))))


@pytest.mark.parametrize("element", ["e4m3", "int8", "int4"])
def test_a_block_whose_scale_grows_is_quantised_anew(element):
    """Within two roundings of what storing it at once gives; a scale that is merely raised reads twice too large."""
    fmt = scheme(f"{element}_block_head")
    at_once, by_token = filled(fmt), filled(fmt, (1,) * TOKENS)
    for x, once, grown in zip(inputs()[1:], read_back(at_once), read_back(by_token), strict=True):
        room = largest_of_blocks(np.abs(np.asarray(x)))[..., None]
        step = {"e4m3": 1 / 14, "int8": 1 / 127, "int4": 1 / 7}[element] * room
        assert (np.abs(once - grown) <= 1.01 * step).all()
    np.testing.assert_array_equal(at_once.k.scales, by_token.k.scales)


def test_scales_of_the_first_write_stay_and_what_exceeds_them_is_clipped_and_counted():
    for granularity in ("layer", "head", "block_head"):
        tensor = TensorFormat("e4m3", granularity, calibration="first_write")
        fmt = KVFormat(tensor, tensor)
        layer = filled(fmt, (1, TOKENS - 1))
        first = np.abs(np.asarray(inputs()[1][0].astype(jnp.bfloat16), np.float64))
        scale = np.asarray(layer.k.scales[0] if granularity == "block_head" else layer.k.factor)
        np.testing.assert_allclose(scale, (first.max() if granularity == "layer" else first.max(1)) / 448, rtol=1e-6)
        assert int(layer.clipped[0]) > 0
        found = np.abs(read_back(layer)[0][:BLOCK])
        assert found.max() <= first.max() * (1 + 1e-6)


def test_padding_takes_no_part_in_scales_of_the_first_write():
    fmt = scheme("int8_head:first_write")
    k, v = (x[:4].at[2:].multiply(100) for x in inputs()[1:])
    slots = jnp.array([0, 1, MEMORY.num_slots, MEMORY.num_slots], jnp.int32)
    layer = store(fmt, new_cache(fmt).layers[0], k, v, Places(slots, 2, BLOCK))
    largest = np.abs(np.asarray(k[:2].astype(jnp.bfloat16), np.float64)).max((0, 2))
    np.testing.assert_allclose(layer.k.factor, largest / 127, rtol=1e-6)


@pytest.mark.parametrize("scale_type", ["bf16", "pow2"])
@pytest.mark.parametrize("granularity", ["layer", "head", "block_head", "token_head"])
def test_coarser_scales_are_rounded_up_and_clip_nothing(granularity, scale_type):
    tensor = TensorFormat("int8", granularity, scale_type)
    layer = filled(KVFormat(tensor, tensor))
    assert int(layer.clipped[0]) == 0
    pools = (layer.k, filled(scheme(f"int8_{granularity}")).k)
    wide, narrow = (np.asarray(p.factor if p.scales is None else p.scales).astype(np.float64) for p in pools)
    used = narrow != 1
    assert (wide >= narrow)[used].all()
    assert (wide <= narrow * (2 if scale_type == "pow2" else 1.01))[used].all()
    assert scale_type == "bf16" or (np.exp2(np.round(np.log2(wide))) == wide).all()
    for x, found in zip(inputs()[1:], read_back(layer), strict=True):
        assert relative(found, np.asarray(x)) < 0.04


def stored(values, fmt):
    """One token of the values, through `store`: what the pool then holds, and how many were clipped."""
    x = jnp.asarray(values, jnp.float32).reshape(1, 1, -1)
    cache = init_kv_cache(1, 4, 1, x.shape[2], fmt, block_size=2, calibration=None).layers[0]
    layer = store(fmt, cache, x, jnp.zeros_like(x), Places(jnp.zeros(1, jnp.int32), 1, 2))
    return np.asarray(layer.k.data[0, 0]), layer


def test_values_saturate_and_a_raw_cast_would_not():
    found, layer = stored([464, 465, 1e4, -np.inf, 0, -0.0, 2.0**-9, 2.0**-11], scheme("e4m3_none"))
    # bfloat16 first: 465 becomes 464, which is half a step past the largest; only what lies beyond counts as clipped.
    np.testing.assert_array_equal(found.astype(np.float64), [448, 448, 448, -448, 0, 0, 2.0**-9, 0])
    np.testing.assert_array_equal(np.signbit(found.astype(np.float32)), [0, 0, 0, 1, 0, 1, 0, 0])
    assert int(layer.clipped[0]) == 2
    assert np.isnan(np.float32(465).astype(ml_dtypes.float8_e4m3fn))
    found, layer = stored([70000, -1, np.inf, 1], scheme("f16"))
    np.testing.assert_array_equal(found.astype(np.float64), [65504, -1, 65504, 1])
    assert int(layer.clipped[0]) == 2


def test_values_are_rounded_to_bfloat16_first():
    """The one order of two roundings: straight to e4m3 this would be 1.125."""
    found, _ = stored([1 + 1 / 16 + 2**-12, 1], scheme("e4m3_none"))
    np.testing.assert_array_equal(found.astype(np.float64), [1, 1])
    assert float(np.float32(1 + 1 / 16 + 2**-12).astype(ml_dtypes.float8_e4m3fn)) == 1.125


@pytest.mark.parametrize("granularity", ["token_head", "block_head"])
@pytest.mark.parametrize("element", ["e4m3", "int8", "int4"])
def test_rows_of_zeros_and_one_huge_outlier(element, granularity):
    name = f"{element}_{granularity}"
    _, layer = stored([0, -0.0, 0, 0], scheme(name))
    np.testing.assert_array_equal(read_first(layer), 0)
    assert np.isfinite(np.asarray(layer.k.scales, np.float32)).all()
    _, layer = stored([1e30, 1, -2, 3], scheme(name))
    np.testing.assert_allclose(read_first(layer), [1e30, 0, 0, 0], rtol=1e-2, atol=1e27)
    assert int(layer.clipped[0]) == 0
    _, layer = stored([-5, 5, 2.5, 0], scheme(name))
    reading = read_first(layer)
    assert reading[0] == -reading[1] == pytest.approx(-5, rel=1e-6)  # symmetric: -128 is never used


def read_first(layer):
    pool = layer.k
    data = np.asarray(pool.data[:1])
    if data.dtype == np.uint8:
        data = np.concatenate([(data << 4).view(np.int8) >> 4, data.view(np.int8) >> 4], axis=-1)
    return data[0, 0].astype(np.float64) * float(pool.scales[0, 0])


def test_rotation_is_orthonormal_and_undone_by_itself():
    q, k, _ = inputs()
    np.testing.assert_allclose(rotate(rotate(k)), k, atol=1e-5)
    scores = np.einsum("qhd,khd->hqk", q[:, :HEADS], k)
    np.testing.assert_allclose(np.einsum("qhd,khd->hqk", rotate(q)[:, :HEADS], rotate(k)), scores, rtol=1e-4, atol=1e-3)
    plain, turned = (run(KVFormat(TensorFormat("f32"), TensorFormat("f32"), rotate=r)) for r in (False, True))
    np.testing.assert_allclose(turned, plain, atol=1e-5)


def scaled(layer, which, factor):
    """The layer with the scales of its keys or values multiplied."""
    pool = getattr(layer, which)
    kept = {name: getattr(pool, name) for name in ("factor", "scales") if getattr(pool, name) is not None}
    changed = {name: scale * jnp.asarray(factor, scale.dtype) for name, scale in kept.items()}
    return dataclasses.replace(layer, **{which: dataclasses.replace(pool, **changed)})


def mistakes(layer):
    """A cache as classic mistakes would leave it before a decode step reads it."""
    k, v = layer.k, layer.v
    yield (
        "K and V scales swapped",
        LayerCache(
            dataclasses.replace(k, factor=v.factor, scales=v.scales),
            dataclasses.replace(v, factor=k.factor, scales=k.scales),
            layer.clipped,
        ),
    )
    for which in "kv":
        pool = getattr(layer, which)
        size = next(scale for scale in (pool.factor, pool.scales) if scale is not None)
        yield f"{which} not descaled", scaled(layer, which, 1 / jnp.maximum(size, 1e-9))
    yield "K read with twice its scale", scaled(layer, "k", 2)
    yield "V read with twice its scale", scaled(layer, "v", 2)
    if k.scales is not None:
        first_half = jnp.arange(k.scales.shape[0]) < k.scales.shape[0] // 4
        twice = dataclasses.replace(k, scales=jnp.where(first_half[:, None], 2 * k.scales, k.scales))
        yield "the first blocks read with twice their scale", dataclasses.replace(layer, k=twice)
        cache = KVCache((layer,))
        ids = jnp.arange(MEMORY.num_blocks, dtype=jnp.int32)
        elsewhere = copy_blocks(cache, (ids + 1) % 12, ids, BLOCK).layers[0]
        yield "scales of another block, as after a copy or a hit without them", _data_of(layer, elsewhere)
        host = copy_blocks_between(cache, with_blocks(cache, 12, BLOCK), ids, ids, BLOCK)
        back = copy_blocks_between(host, with_blocks(cache, 12, BLOCK), ids, ids, BLOCK).layers[0]
        assert all(map(np.array_equal, bits(back), bits(layer)))
        yield "scales lost on swap", _data_of(layer, with_blocks(cache, 12, BLOCK).layers[0])


def _data_of(layer, other):
    """The data of one layer under the scales of another."""
    k, v = (dataclasses.replace(getattr(other, n), data=getattr(layer, n).data) for n in "kv")
    return LayerCache(k, v, layer.clipped)


def dense(q, k, v):
    """Causal attention in float64."""
    scores = np.einsum("qhgd,khd->hgqk", q.reshape(TOKENS, HEADS, -1, WIDTH), k) / np.sqrt(WIDTH)
    scores = np.where(np.tri(TOKENS, dtype=bool), scores, -np.inf)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    return np.einsum("hgqk,khd->qhgd", weights / weights.sum(-1, keepdims=True), v).reshape(q.shape)


def read_through_memory(fmt, memory, chunk=2):
    """The output of every token of the second row, read chunk by chunk, and the layer in the end."""
    reader = Reader(memory, None, fmt)
    state, _, _ = begin(reader, memory.init(), 3, 3)
    state, _, _ = begin(reader, state, TOKENS, TOKENS)
    layer, outs = new_cache(fmt, memory).layers[0], []
    for done in range(0, TOKENS, chunk):
        state, _ = appending(memory)(state, jnp.array([0, chunk], jnp.int32), max_new_tokens=TOKENS)
        positions = jnp.arange(done, done + chunk, dtype=jnp.int32)
        slots = memory.slots(state, jnp.ones(chunk, jnp.int32), positions)
        attend = MemoryAttend(state, (slots,), jnp.array([0, 0, chunk], jnp.int32), memory, fmt, chunk)
        part = (x[done : done + chunk] for x in inputs())
        out, layer = attend_in(attend, *part, layer, AttentionSpec())
        outs.append(np.asarray(out))
    return np.concatenate(outs), layer


def last_again(fmt, layer, memory):
    """The output of the last token once more, from a layer that holds it already."""
    reader = Reader(memory, None, fmt)
    state, _, _ = begin(reader, memory.init(), 3, 3)
    state, _, _ = begin(reader, state, TOKENS, TOKENS)
    for count in (TOKENS - 1, 1):
        state, _ = appending(memory)(state, jnp.array([0, count], jnp.int32), max_new_tokens=TOKENS)
    nowhere = jnp.full(1, memory.num_slots, jnp.int32)
    attend = MemoryAttend(state, (nowhere,), jnp.array([0, 0, 1], jnp.int32), memory, fmt, 1)
    return np.asarray(attend_in(attend, *(x[-1:] for x in inputs()), layer, AttentionSpec())[0])


@pytest.mark.parametrize(
    ("name", "memory"),
    [
        pytest.param("int4_token_head:first3", MEMORY, id="token_head"),
        pytest.param("e5m2_block_head:first5:rotated", MEMORY, id="block_head"),
        pytest.param("e4m3_channel+int8_head:first4", RANGES, id="channel"),
        pytest.param("e4m3_layer:first6", MEMORY, id="layer", marks=pytest.mark.soak),
        pytest.param("int4_token_head:first3", RANGES, id="ranges", marks=pytest.mark.soak),
    ],
)
def test_first_tokens_are_read_as_they_are_and_the_others_as_they_are_stored(name, memory):
    fmt = scheme(name)
    kept = fmt.precise_tokens
    out, layer = read_through_memory(fmt, memory)
    kept = fmt.precise_tokens
    q, k, v = (np.asarray(x, np.float64) for x in inputs())
    # Who sees none but first tokens sees them in bfloat16: against what the format does to the others.
    exact = dense(q, *(x.astype(ml_dtypes.bfloat16).astype(np.float64) for x in (k, v)))
    coarse, _ = read_through_memory(dataclasses.replace(fmt, precise_tokens=0), memory)
    assert relative(out[:kept], exact[:kept]) < (0.004 if fmt.rotate or "channel" in name else 1e-6)
    assert relative(coarse[:kept], exact[:kept]) > 0.01
    assert relative(out[kept:], exact[kept:]) < relative(coarse[kept:], exact[kept:])
    assert np.asarray(layer.k.first[0]).any() == np.False_  # the other row's
    for which in "kv":
        lost = dataclasses.replace(getattr(layer, which), first=jnp.zeros_like(layer.k.first))
        wrong = dataclasses.replace(layer, **{which: lost})
        assert relative(last_again(fmt, wrong, memory), out[-1:]) > 0.05
    np.testing.assert_allclose(last_again(fmt, layer, memory), out[-1:], atol=1e-6)


def test_no_token_is_kept_as_one_of_another_row_nor_one_that_only_pads():
    fmt, (q, k, v) = scheme("int4_token_head:first3"), inputs()
    reader, layer = Reader(MEMORY, None, fmt), new_cache(fmt).layers[0]
    state, _, _ = begin(reader, MEMORY.init(), 7, 7)
    state, _, _ = begin(reader, state, 2, 2)
    # Two tokens of the second row; then seven of the first and what fills up.
    for counts, own, padding in (([0, 2], slice(10, 12), 0), ([7, 0], slice(0, 9), 2)):
        state, _ = appending(MEMORY)(state, jnp.array(counts, jnp.int32), max_new_tokens=7)
        row = jnp.array([0] * counts[0] + [1] * counts[1] + [2] * padding, jnp.int32)
        slots = MEMORY.slots(state, row, jnp.arange(len(row), dtype=jnp.int32))
        cu_lens = jnp.array([0, counts[0], sum(counts)], jnp.int32)
        attend = MemoryAttend(state, (slots,), cu_lens, MEMORY, fmt, 7)
        _, layer = attend_in(attend, q[own], k[own], v[own], layer, AttentionSpec())
    for pool, x in ((layer.k, k), (layer.v, v)):
        np.testing.assert_array_equal(pool.first[0], x[:3].astype(jnp.bfloat16))
        np.testing.assert_array_equal(pool.first[1, :2], x[10:12].astype(jnp.bfloat16))
        assert not np.asarray(pool.first[1, 2]).any()


def test_first_tokens_neither_raise_a_scale_nor_count_as_clipped():
    huge = [x.at[:3].mul(1000) for x in inputs()[1:]]
    slots = jnp.arange(TOKENS, dtype=jnp.int32)
    first = jnp.where(slots < 3, 3 + slots, 6)  # of the second row
    for name, where in (("int8_head:first_write", "factor"), ("e4m3_block_head", "scales")):
        plain, kept = (scheme(f"{name}{end}") for end in ("", ":first3"))
        layer = store(kept, new_cache(kept).layers[0], *huge, Places(slots, 2, BLOCK, first=first))
        others = [x.at[:3].set(0) for x in huge]
        expected = store(plain, new_cache(plain).layers[0], *others, Places(slots, 2, BLOCK))
        np.testing.assert_array_equal(getattr(layer.k, where), getattr(expected.k, where))
        np.testing.assert_array_equal(layer.v.first[1], huge[1][:3].astype(jnp.bfloat16))
        assert int(layer.clipped[0]) == 0
    static = scheme("e4m3_layer:first3")
    layer = store(static, new_cache(static).layers[0], *huge, Places(slots, 2, BLOCK, first=first))
    assert int(layer.clipped[0]) == 0


def test_rows_that_share_blocks_cannot_keep_first_tokens():
    fmt = scheme("e4m3_layer:first4")
    for change, what in (
        ({"cache": PrefixCache(kv_format=fmt.name)}, "a prefix cache"),
        ({"forks": True}, "forks"),
        ({"host_blocks": 4}, "swap space"),
    ):
        with pytest.raises(ValueError, match=f"expected precise_tokens=0 with {what}"):
            Reader(dataclasses.replace(MEMORY, **change), None, fmt)


@pytest.mark.parametrize("name", ["e4m3_layer", "e4m3_head", "int8_token_head", "e4m3_block_head"])
def test_every_classic_mistake_is_larger_than_the_format_s_own_error(name):
    fmt = scheme(name)
    right = run(fmt)
    own, seen = relative(right, exact()), []

    def watch(layer):
        seen.append(layer)
        return layer

    run(fmt, watch)
    for what, wrong in mistakes(seen[0]):
        error = relative(run(fmt, lambda _, wrong=wrong: wrong), right)
        assert error > max(2 * own, 0.1), (what, error, own)
