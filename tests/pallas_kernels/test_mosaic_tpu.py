"""The TPU's kernels in its interpreter, in three modes: what one of them lets pass, another catches.

Races between DMAs and loads show only to the race detector, a wait that comes too late only where DMAs run at once, and
what was never written only where memory starts as NaN. Each call has a limit, as a wait in vain never ends.
"""

import contextlib
import faulthandler
import functools
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels import _mosaic_tpu
from pallas_kernels.block_copy import block_copy, block_copy_between
from pallas_kernels.contiguous_attention import contiguous_attention
from pallas_kernels.kv_write import kv_write
from pallas_kernels.paged_attention import mosaic_tpu, paged_attention
from pallas_kernels.paged_attention.shapes import AttentionCase
from tests.pallas_kernels.attention_oracle import assert_matches, make_problem

MODES = {
    "races": pltpu.InterpretParams(
        detect_races=True, dma_execution_mode="on_wait", uninitialized_memory="nan", out_of_bounds_reads="raise"
    ),
    "eager": pltpu.InterpretParams(dma_execution_mode="eager", uninitialized_memory="nan", out_of_bounds_reads="raise"),
    "zeros": pltpu.InterpretParams(
        dma_execution_mode="on_wait", uninitialized_memory="zero", out_of_bounds_reads="raise"
    ),
}
LIMIT_S = 300.0
BACKEND = "mosaic_tpu_interpret"


@contextlib.contextmanager
def interpreted(mode):
    faulthandler.dump_traceback_later(LIMIT_S, exit=True)
    try:
        with pltpu.force_tpu_interpret_mode(MODES[mode]):
            yield
    finally:
        faulthandler.cancel_dump_traceback_later()


def make_case(name, **changes):
    sizes = {"q_heads": 8, "kv_heads": 2, "head_dim": 128, "block_size": 16, "blocks_per_seq": 20}
    sizes |= {"tokens": 6, "seqs": 8, "max_q_len": 1, "batches": {}}
    return AttentionCase(name=name, **(sizes | changes))


# (mode, case, lengths): decode rows of several fetches and steps, and chunks; every option once.
DECODE = ((1, 1), (1, 300), (1, 0), (1, 128), (1, 129), (1, 33))
CHUNKS = ((9, 30), (1, 300), (0, 0), (17, 140), (3, 3))
CALLS = (
    ("races", make_case("decode"), DECODE),
    ("eager", make_case("decode"), DECODE),
    ("zeros", make_case("decode"), DECODE),
    ("eager", make_case("decode_window", window=40, soft_cap=5.0, return_lse=True), DECODE),
    ("eager", make_case("decode_group_of_5", q_heads=5, kv_heads=1, block_size=24, sinks=True), DECODE),
    (
        "eager",
        make_case("decode_3_kv_heads", q_heads=6, kv_heads=3, head_dim=64, block_size=8, blocks_per_seq=40),
        DECODE,
    ),
    ("eager", make_case("decode_e4m3", kv_dtype="float8_e4m3fn", q_dtype="bfloat16", scales="head"), DECODE),
    ("races", make_case("decode_int8_new", kv_dtype="int8", scales="token", reads_new=True, return_lse=True), DECODE),
    ("races", make_case("chunks", tokens=32, max_q_len=32), CHUNKS),
    (
        "eager",
        make_case("chunks_window", tokens=32, max_q_len=32, window=25, sinks=True, return_lse=True),
        CHUNKS,
    ),
    (
        "eager",
        make_case("chunks_e5m2_new", tokens=32, max_q_len=32, kv_dtype="float8_e5m2", scales="token", reads_new=True),
        CHUNKS,
    ),
    (
        "eager",
        make_case("chunks_bf16", tokens=32, max_q_len=32, q_dtype="bfloat16", kv_dtype="bfloat16"),
        CHUNKS,
    ),
    ("eager", make_case("decode_e5m2", kv_dtype="float8_e5m2", q_dtype="bfloat16"), DECODE),
)
IDS = [f"{case.name}-{mode}" for mode, case, _ in CALLS]


@functools.cache
def posed(index):
    _, case, lengths = CALLS[index]
    problem = make_problem(case, lengths, index)
    return problem, problem.expected()


def calls(indices, quick):
    """These calls; the interpreter takes minutes for those that are not quick."""
    return [pytest.param(i, id=IDS[i], marks=() if i in quick else pytest.mark.soak) for i in indices]


@pytest.mark.parametrize("index", calls(range(len(CALLS)), {0, 1, 2}))
def test_paged_attention_is_softmax_attention(index):
    problem, expected = posed(index)
    with interpreted(CALLS[index][0]):
        assert_matches(paged_attention(**problem.paged(), backend=BACKEND), expected)


@pytest.mark.parametrize("index", calls([0, 3, 7, 8, 9], {0}))
def test_contiguous_attention_is_softmax_attention(index):
    problem, expected = posed(index)
    with interpreted(CALLS[index][0]):
        assert_matches(contiguous_attention(**problem.contiguous(), backend=BACKEND), expected)


OPTIONS = dict.fromkeys(("k_scale", "v_scale", "k_new", "v_new", "sinks", "window", "soft_cap"))
OPTIONS |= {"scale": 128**-0.5, "return_lse": False, "max_q_len": 1}

MUTANTS = {
    "fetches into the buffer that is attended": (
        "start(next_tile, next_fetch, 1 - side",
        "start(next_tile, next_fetch, side",
    ),
    "does not wait": ("        wait(fetch, side)\n", ""),
    "reads one block too many": ("slots + (plan.block_size - 1)", "slots + (2 * plan.block_size - 1)"),
    "no rescale of the sum": ("weighted[head_set] * rescale[:, :1]", "weighted[head_set]"),
    "no rescale of the denominator": ("denominator[head_set] * rescale,", "denominator[head_set],"),
    "one position too many": ("jnp.minimum(position + 1, end)", "jnp.minimum(position + 2, end + 1)"),
    "drops the newest": ("jnp.minimum(position + 1, end)", "jnp.minimum(position, end)"),
    "whole steps past the end": ("queries[tile] + 1 - fetch", "queries[tile] + 1 + plan.step_slots - fetch"),
    "heads of all": ("seen = None if plan.apart else own_head", "seen = None if plan.apart else lane >= 0"),
    "unread values stay": ("        clear_unread(side, fetch, steps)\n", ""),
    "mean of values": (
        "jnp.exp2(logits[:, i * LANES : (i + 1) * LANES] - top)",
        "jnp.exp2((logits[:, i * LANES : (i + 1) * LANES] - top) * 1e-30)",
    ),
    "neighbour's blocks": ("table[entry + i]", "table[entry + i + 1]"),
    "next fetch of the wrong tile": ("jnp.where(last, 0, fetch + 1)", "fetch + 1"),
}


def attend_with(old, new, monkeypatch, mode):
    """The first call, with a kernel whose source says `new` for `old`."""
    source = pathlib.Path(_mosaic_tpu.__file__).read_text()
    assert old in source
    changed = dict(vars(_mosaic_tpu))
    exec(compile(source.replace(old, new), "changed", "exec"), changed)
    monkeypatch.setattr(_mosaic_tpu, "_kernel", changed["_kernel"])
    problem, expected = posed(0)
    jax.clear_caches()
    try:
        with interpreted(mode):
            # Called as it is, so that the table still holds ids that are out of range.
            out, _ = mosaic_tpu.paged_attention_interpreted(**(OPTIONS | problem.paged()))
            assert_matches(out, expected)
    finally:
        jax.clear_caches()


@pytest.mark.soak
@pytest.mark.parametrize("mutant", MUTANTS)
def test_a_mistake_in_the_kernel_is_noticed(mutant, monkeypatch):
    # Wrong numbers, a read or a table entry out of bounds, a race.
    mode = "races" if mutant == "does not wait" else "eager"
    with pytest.raises((AssertionError, IndexError, RuntimeError, jax.errors.JaxRuntimeError)):
        attend_with(*MUTANTS[mutant], monkeypatch, mode)


@pytest.mark.soak
def test_the_kernel_as_it_stands_passes_where_mistakes_are_noticed(monkeypatch):
    attend_with("LOWEST = -1e30", "LOWEST = -1e30", monkeypatch, "eager")


@pytest.mark.parametrize("mode", [pytest.param("races", marks=pytest.mark.soak), "eager", "zeros"])
def test_writes_and_copies_change_no_other_bit(mode):
    rng = np.random.default_rng(0)
    pool = jnp.asarray(rng.standard_normal((64, 8, 128)), jnp.bfloat16)
    new = jnp.asarray(rng.standard_normal((5, 8, 128)), jnp.bfloat16)
    slots = jnp.array([3, 64, 0, 63, 17], jnp.int32)
    src, dst = jnp.array([0, 1, 7, 2, 4, -1, 3], jnp.int32), jnp.array([1, 0, 5, 5, 8, 2, 6], jnp.int32)
    expected = np.array(pool.astype(jnp.float32)).reshape(8, 8, 8, 128)
    copied = expected.copy()
    for i, j in ((0, 1), (1, 0), (2, 5), (3, 6)):
        copied[j] = expected[i]
    stored = np.array(pool.astype(jnp.float32))
    stored[[3, 0, 63, 17]] = np.array(new.astype(jnp.float32))[[0, 2, 3, 4]]
    with interpreted(mode):
        written = kv_write(pool, pool, new, new, slots, backend=BACKEND)
        within = block_copy(pool, src, dst, block_size=8, backend=BACKEND)
        between = block_copy_between(pool, jnp.zeros_like(pool), src, dst, block_size=8, backend=BACKEND)
    np.testing.assert_array_equal(np.asarray(written.k.astype(jnp.float32)), stored)
    np.testing.assert_array_equal(np.asarray(written.v.astype(jnp.float32)), stored)
    np.testing.assert_array_equal(np.asarray(within.astype(jnp.float32)), copied.reshape(pool.shape))
    only = np.zeros_like(copied)
    for i, j in ((0, 1), (1, 0), (2, 5), (3, 6)):
        only[j] = expected[i]
    np.testing.assert_array_equal(np.asarray(between.astype(jnp.float32)), only.reshape(pool.shape))


def test_every_float8_e4m3_has_its_value_as_one_of_the_older_format():
    codes = np.arange(256, dtype=np.uint8)
    stored = np.resize(codes, (32, 128)).view(jnp.float8_e4m3fn)
    plan = _mosaic_tpu.make_plan(
        block_size=16,
        kv_heads=1,
        head_dim=128,
        q_group=1,
        q_tile=1,
        capacity=16,
        kv_itemsize=1,
        sizes=_mosaic_tpu.SMALL_SIZES,
        window=None,
        soft_cap=None,
        from_start=True,
        in_table=True,
        scaled=False,
        unpack=True,
        dtype="bfloat16",
    )

    def kernel(x, o):
        o[...] = _mosaic_tpu.operand(x[...], plan).astype(jnp.float32) * _mosaic_tpu.UNPACK_FACTOR

    with interpreted("eager"):
        wide = pl.pallas_call(kernel, out_shape=jax.ShapeDtypeStruct(stored.shape, jnp.float32))(jnp.asarray(stored))
    expected = np.array(stored.astype(np.float32))
    expected = np.where(np.isnan(expected), np.where(stored.view(np.uint8) < 128, 480, -480), expected)
    np.testing.assert_array_equal(np.asarray(wide), expected)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"q_dtype": "float16", "kv_dtype": "float16"}, "float16"),
        ({"block_size": 4}, "block_size"),
        ({"block_size": 8, "blocks_per_seq": 50_000}, "block_tables"),
    ],
)
def test_what_the_kernel_cannot_do_is_refused_by_name(changes, named):
    case = make_case("refused", **changes)
    shape = (4, case.block_size, case.kv_heads, case.head_dim)
    pool = jnp.zeros(shape, case.kv_dtype)
    arguments = (
        jnp.zeros((6, 8, 128), case.q_dtype),
        pool,
        pool,
        jnp.zeros((6, case.blocks_per_seq), jnp.int32),
        jnp.ones(6, jnp.int32),
        jnp.arange(7, dtype=jnp.int32),
    )
    with pytest.raises(ValueError, match=named):
        paged_attention(*arguments, max_q_len=1, backend="mosaic_tpu")
