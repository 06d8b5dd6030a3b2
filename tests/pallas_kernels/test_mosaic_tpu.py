"""The TPU's kernels in its interpreter, in three modes: what one of them lets pass, another catches."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas as pl

from pallas_kernels import _mosaic_tpu
from pallas_kernels.block_copy import block_copy, block_copy_between
from pallas_kernels.block_copy.shapes import CopyCase
from pallas_kernels.contiguous_attention import contiguous_attention
from pallas_kernels.kv_write import kv_write
from pallas_kernels.kv_write.shapes import WriteCase
from pallas_kernels.paged_attention import paged_attention
from tests.pallas_kernels.attention_oracle import assert_matches
from tests.pallas_kernels.copy_oracle import check_copies
from tests.pallas_kernels.mosaic_calls import BACKEND, interpreted, make_case, posed
from tests.pallas_kernels.write_oracle import check_plain


def calls(quick, soak):
    """Cases and modes, those of `soak` left to `pytest -m soak`."""
    both = [*((call, ()) for call in quick), *((call, pytest.mark.soak) for call in soak)]
    return pytest.mark.parametrize(("name", "mode"), [pytest.param(*call, marks=marks) for call, marks in both])


@calls(
    quick=[("decode", "races"), ("decode", "eager"), ("decode", "zeros")],
    soak=[
        ("decode_window", "eager"),
        ("decode_group_of_5", "eager"),
        ("decode_3_kv_heads", "eager"),
        ("decode_e4m3", "eager"),
        ("decode_e5m2", "eager"),
        ("decode_int8_new", "races"),
        ("chunks", "races"),
        ("chunks_window", "eager"),
        ("chunks_e5m2_new", "eager"),
        ("chunks_bf16", "eager"),
    ],
)
def test_paged_attention_is_softmax_attention(name, mode):
    problem, expected = posed(name)
    with interpreted(mode):
        assert_matches(paged_attention(**problem.paged(), backend=BACKEND), expected)


@calls(
    quick=[("decode", "races")],
    soak=[("decode_window", "eager"), ("decode_int8_new", "races"), ("chunks", "races"), ("chunks_window", "eager")],
)
def test_contiguous_attention_is_softmax_attention(name, mode):
    problem, expected = posed(name)
    with interpreted(mode):
        assert_matches(contiguous_attention(**problem.contiguous(), backend=BACKEND), expected)


@pytest.mark.slow
def test_what_is_not_a_number_shows_in_the_sequence_that_holds_it():
    problem, expected = posed("decode")
    k, v = problem.k_blocks.copy(), problem.v_blocks.copy()
    for seq, position, pool in ((1, 200, k), (4, 128, v)):
        pool[problem.block_tables[seq, position // 16], position % 16] = np.nan
    with interpreted("eager"):
        arguments = problem.paged() | {"k": jnp.asarray(k), "v": jnp.asarray(v)}
        out = np.array(paged_attention(**arguments, backend=BACKEND))
    assert np.isnan(out[[1, 4]]).all()
    out[[1, 4]] = expected.out[[1, 4]]
    assert_matches(jnp.asarray(out), expected)


@pytest.mark.parametrize("mode", ["races", "eager", "zeros"])
def test_writes_and_copies_change_no_other_bit(mode):
    operations = [functools.partial(call, backend=BACKEND) for call in (kv_write, block_copy, block_copy_between)]
    with interpreted(mode):
        check_plain(operations[0], WriteCase("", 96, 12, 8, 128, "bfloat16", "bfloat16"))
        check_copies(*operations[1:], CopyCase("", 17, 8, 0, (8, 128), "bfloat16"))


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
