"""Copies and fills of blocks against plain NumPy, bit for bit, and what their compiled programs need."""

import functools
import inspect
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pallas_kernels.block_copy import block_copy, block_copy_between, fill_blocks, reference
from pallas_kernels.block_copy.api import COPY_BACKENDS, FILL_BACKENDS
from pallas_kernels.block_copy.shapes import CASES, CopyCase
from tests.pallas_kernels.copy_oracle import (
    assert_same_bits,
    check_copies,
    check_fills,
    copied,
    filled,
    random_bits,
    random_numbers,
)
from tests.pallas_kernels.ways import ways

SMALL = tuple(case for case in CASES if not case.offline)
DTYPES = ("float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2", "int8")


def raw_operations():
    """The reference as it is now, traced anew: by functions of their own, as programs are cached by function."""
    between, fill = map(inspect.unwrap, (reference.block_copy_between, reference.fill_blocks))
    copies = jax.jit(
        lambda pool, src, dst, block_size: between(pool, pool, src, dst, block_size=block_size),
        static_argnames="block_size",
    )
    copies_between = jax.jit(lambda *of, block_size: between(*of, block_size=block_size), static_argnames="block_size")
    fills = jax.jit(lambda *of, block_size: fill(*of, block_size=block_size), static_argnames="block_size")
    return (
        copies,
        copies_between,
        lambda pool, ids, value, **size: fills(pool, ids, jnp.asarray(value, pool.dtype), **size),
    )


def check(operations, case, pool_of=random_bits):
    """Everything that `operations` (copy, copy_between, fill) promise, of one case."""
    *copies, fill = operations
    check_copies(*copies, case, pool_of)
    check_fills(fill, case, pool_of)


@pytest.mark.parametrize("way", ways(COPY_BACKENDS))
@pytest.mark.parametrize("case", SMALL, ids=lambda case: case.name)
def test_copies_the_named_blocks_and_no_other_bit(case, way):
    operations = (functools.partial(operation, backend=way.backend) for operation in (block_copy, block_copy_between))
    with way.open():
        check_copies(*operations, case)


@pytest.mark.parametrize("way", ways(FILL_BACKENDS))
@pytest.mark.parametrize("case", SMALL, ids=lambda case: case.name)
def test_fills_the_named_blocks_and_no_other_bit(case, way):
    with way.open():
        check_fills(functools.partial(fill_blocks, backend=way.backend), case)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float8_e4m3fn"])
def test_the_form_of_other_platforms_does_the_same(dtype, monkeypatch):
    """On numbers: a CPU that runs it widens the narrow floats, which may change the bits of a NaN."""
    monkeypatch.setattr(jax.lax, "platform_dependent", lambda *args, cpu, default: default(*args))
    check(raw_operations(), CopyCase("", 17, 3, 0, (2, 5), dtype), random_numbers)


SHAPES = [
    CopyCase("", num_blocks, block_size, pairs, item, dtype)
    for num_blocks, block_size, pairs, item, dtype in (
        (1, 4, 1, (1, 2), "float32"),
        (2, 1, 3, (), "int8"),
        (5, 3, 6, (2, 3), "bfloat16"),
        (5, 3, 6, (2, 3), "float32"),
        (7, 5, 9, (3,), "float8_e4m3fn"),
        (9, 7, 4, (1, 1), "float16"),
    )
]


@settings(max_examples=80)
@given(st.data())
def test_any_list_of_pairs_is_copied_at_once(data):
    case = data.draw(st.sampled_from(SHAPES))
    ids = st.integers(-2, case.num_blocks + 2)
    lists = st.lists(ids, min_size=case.pairs, max_size=case.pairs).map(lambda ids: np.array(ids, np.int32))
    src, dst = data.draw(lists), data.draw(lists)
    rng = np.random.default_rng(data.draw(st.integers(0, 3)))
    pool, other = random_bits(rng, case, case.num_blocks), random_bits(rng, case, case.num_blocks + 1)
    pairs = jnp.asarray(src), jnp.asarray(dst)
    out = block_copy(jnp.asarray(pool), *pairs, block_size=case.block_size)
    assert_same_bits(out, copied(pool, pool, src, dst, case.block_size))
    out = block_copy_between(jnp.asarray(other), jnp.asarray(pool), *pairs, block_size=case.block_size)
    assert_same_bits(out, copied(other, pool, src, dst, case.block_size))
    out = fill_blocks(jnp.asarray(pool), pairs[0], 0, block_size=case.block_size)
    assert_same_bits(out, filled(pool, src, 0, case.block_size))


def test_a_list_without_places_changes_nothing():
    case, nobody = SMALL[1], jnp.zeros(0, jnp.int32)
    pool = random_bits(np.random.default_rng(0), case, case.num_blocks)
    of = {"block_size": case.block_size}
    assert_same_bits(block_copy(jnp.asarray(pool), nobody, nobody, **of), pool)
    assert_same_bits(block_copy_between(jnp.asarray(pool), jnp.asarray(pool), nobody, nobody, **of), pool)
    assert_same_bits(fill_blocks(jnp.asarray(pool), nobody, 0, **of), pool)


NUM_BLOCKS, BLOCK_SIZE, PAIRS = 512, 16, 8


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("operation", ["copy", "between", "fill"])
def test_a_donated_pool_is_neither_copied_nor_widened(operation, dtype):
    """Inside a scan, as an engine does it: temporaries hold the list's blocks and a few numbers of each slot."""

    def step(pool, other, src, dst):
        if operation == "copy":
            return block_copy(pool, src, dst, block_size=BLOCK_SIZE)
        if operation == "between":
            return block_copy_between(other, pool, src, dst, block_size=BLOCK_SIZE)
        return fill_blocks(pool, dst, 0, block_size=BLOCK_SIZE)

    def steps(pool, *of):
        return jax.lax.scan(lambda pool, _: (step(pool, *of), None), pool, length=3)[0]

    pool = jax.ShapeDtypeStruct((NUM_BLOCKS * BLOCK_SIZE, 2, 64), dtype)
    ids = jax.ShapeDtypeStruct((PAIRS,), "int32")
    compiled = jax.jit(steps, donate_argnums=0).lower(pool, pool, ids, ids).compile()
    memory, pool_bytes = compiled.memory_analysis(), pool.size * pool.dtype.itemsize
    assert memory.alias_size_in_bytes == pool_bytes
    assert memory.temp_size_in_bytes < pool_bytes / 16
    assert not re.search(
        rf"\[({NUM_BLOCKS},{BLOCK_SIZE}|{NUM_BLOCKS * BLOCK_SIZE}),2,64\]\S* copy\(", compiled.as_text()
    )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("operation", ["between", "fill"])
def test_a_list_without_a_real_id_moves_no_data(operation, dtype):
    """The pool goes nowhere but into one conditional, of which one branch does nothing."""
    pool, ids = jnp.zeros((12, 2, 8), dtype), jnp.zeros(4, jnp.int32)
    if operation == "between":
        function, args, pools = reference.block_copy_between, (pool, pool, ids, ids), (0, 1)
    else:
        function, args, pools = reference.fill_blocks, (pool, ids, jnp.zeros((), dtype)), (0,)
    jaxpr = jax.make_jaxpr(lambda *args: inspect.unwrap(function)(*args, block_size=3))(*args).jaxpr
    held = {jaxpr.invars[i] for i in pools}
    users = [eqn for eqn in jaxpr.eqns if any(var in held for var in eqn.invars if var in jaxpr.invars)]
    assert [eqn.primitive.name for eqn in users] == ["cond"]
    assert [] in [list(branch.jaxpr.eqns) for branch in users[0].params["branches"]]


# ---- wrong arguments -------------------------------------------------------------------------------------------


def array(*shape, dtype=jnp.float32):
    return jnp.zeros(shape, dtype)


IDS = array(2, dtype=jnp.int32)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"block_size": 0}, r"block_size must be at least 1, got 0"),
        ({"block_size": 5}, r"pool must be of whole blocks of 5 slots, got 12 slots"),
        ({"pool": array(0, 2, 8)}, r"pool must be \[slots, ...\] with no empty axis, got shape \(0, 2, 8\)"),
        ({"pool": array()}, r"pool must be \[slots, ...\] with no empty axis, got shape \(\)"),
        ({"pool": array(4, 2, dtype="bool")}, "pool must be of integers or floats, got bool"),
        ({"pool": array(4, 2, dtype="complex64")}, "pool must be of integers or floats, got complex64"),
        ({"src": array(2)}, r"src must be of dtype int32, got float32"),
        ({"dst": array(2, 1, dtype=jnp.int32)}, r"dst must be a list of block ids, got shape \(2, 1\)"),
        ({"dst": array(3, dtype=jnp.int32)}, r"dst must be of src's length 2, got 3"),
    ],
)
def test_a_wrong_argument_is_named_with_what_was_expected(change, message):
    with pytest.raises(ValueError, match=message):
        inspect.unwrap(block_copy)(**({"pool": array(12, 2, 8), "src": IDS, "dst": IDS, "block_size": 4} | change))


@pytest.mark.parametrize(
    ("other", "message"),
    [
        (array(8, 2, 4), r"dst_pool must be of src_pool's shape after the slots \(2, 8\), got \(2, 4\)"),
        (array(8, 2, 8, dtype=jnp.float16), r"dst_pool must be of src_pool's dtype float32, got float16"),
        (array(9, 2, 8), r"dst_pool must be of whole blocks of 4 slots, got 9 slots"),
    ],
)
def test_pools_that_differ_in_more_than_slots_are_refused(other, message):
    with pytest.raises(ValueError, match=message):
        inspect.unwrap(block_copy_between)(array(12, 2, 8), other, IDS, IDS, block_size=4)


@pytest.mark.parametrize(
    ("dtype", "value"),
    [
        ("int8", math.nan),
        ("int8", 128),
        ("int8", 0.5),
        ("float16", 1e5),
        ("bfloat16", 0.1),
        ("float8_e4m3fn", math.inf),
    ],
)
def test_a_value_that_the_pool_cannot_hold_is_refused(dtype, value):
    with pytest.raises(ValueError, match=rf"value must be a number that {dtype} holds exactly, got {value}"):
        fill_blocks(array(12, 2, 8, dtype=dtype), IDS, value, block_size=4)


def test_an_unknown_backend_is_refused():
    for call in (
        lambda: block_copy(array(4), IDS, IDS, block_size=1, backend="none"),
        lambda: block_copy_between(array(4), array(4), IDS, IDS, block_size=1, backend="none"),
        lambda: fill_blocks(array(4), IDS, 0, block_size=1, backend="none"),
    ):
        with pytest.raises(NotImplementedError, match="has no backend 'none'"):
            call()


# ---- mutants: what `check` would let pass, it does not test -------------------------------------------------------

MUTANTS = []


def mutant(*dtypes):
    def register(apply):
        MUTANTS.extend(pytest.param(dtype, apply, id=f"{apply.__name__}-{dtype}") for dtype in dtypes)
        return apply

    return register


@mutant("float32")
def takes_negative_ids_from_the_end(patch):
    patch.setattr(reference, "_is_block", lambda ids, num_blocks: ids < num_blocks)


@mutant("float32")
def reads_the_last_block_for_the_sentinel(patch):
    patch.setattr(reference, "_is_block", lambda ids, num_blocks: (ids >= 0) & (ids <= num_blocks))


@mutant("float32", "bfloat16")
def forgets_the_last_block(patch):
    patch.setattr(reference, "_is_block", lambda ids, num_blocks: (ids >= 0) & (ids < num_blocks - 1))


@mutant("float32", "bfloat16")
def lets_the_first_of_a_destination_win(patch):
    store = reference._store
    patch.setattr(reference, "_store", lambda pool, bits, dst: store(pool, bits[::-1], dst[::-1]))


@mutant("float32", "bfloat16")
def copies_all_slots_of_a_block_but_one(patch):
    read = reference._read
    patch.setattr(reference, "_read", lambda *of: read(*of).at[:, -1].set(0))


@mutant("float32", "bfloat16")
def reads_the_next_block(patch):
    read = reference._read
    patch.setattr(reference, "_read", lambda pool, src, size: read(pool, src + 1, size))


@mutant("float32")
def writes_each_pair_before_the_next_is_read(patch):
    whole = inspect.unwrap(reference.block_copy_between)

    def copy(src_pool, dst_pool, src, dst, *, block_size):
        out = dst_pool
        for i in range(src.size):
            now = out if src_pool is dst_pool else src_pool
            out = whole(now, out, src[i : i + 1], dst[i : i + 1], block_size=block_size)
        return out

    patch.setattr(reference, "block_copy_between", copy)


@mutant("float32")
def takes_the_other_pools_sentinel(patch):
    whole = inspect.unwrap(reference.block_copy_between)

    def copy(src_pool, dst_pool, src, dst, *, block_size):
        few = min(src_pool.shape[0], dst_pool.shape[0]) // block_size
        return whole(src_pool, dst_pool, src, jnp.where(dst < few, dst, 2**30), block_size=block_size)

    patch.setattr(reference, "block_copy_between", copy)


@mutant("bfloat16", "float8_e5m2")
def compares_numbers_instead_of_bits(patch):
    def choose(where, bits, pool):
        wide = jax.lax.bitcast_convert_type(bits, pool.dtype).astype(jnp.float32)
        where = where.reshape(-1, *(1,) * (pool.ndim - 1))
        return jnp.where(where, wide, pool.astype(jnp.float32)).astype(pool.dtype)

    patch.setattr(reference, "_choose", choose)


@mutant("float32")
def empties_the_pool_when_nothing_is_asked(patch):
    patch.setattr(reference, "_keep", jnp.zeros_like)


@mutant("float32")
def stops_to_fill_at_the_first_hole(patch):
    whole = inspect.unwrap(reference.fill_blocks)

    def fill(pool, ids, value, *, block_size):
        reached = jnp.cumprod(ids < pool.shape[0] // block_size) > 0
        return whole(pool, jnp.where(reached, ids, 2**30), value, block_size=block_size)

    patch.setattr(reference, "fill_blocks", fill)


@mutant("float32", "bfloat16")
def fills_with_zeros_only(patch):
    whole = inspect.unwrap(reference.fill_blocks)
    patch.setattr(reference, "fill_blocks", lambda pool, ids, value, **size: whole(pool, ids, 0 * value, **size))


def mutant_case(dtype):
    return CopyCase("", 17, 3, 0, (2, 5), dtype)


@pytest.mark.parametrize("dtype", sorted({param.values[0] for param in MUTANTS}))
def test_the_reference_passes_what_the_mutants_must_fail(dtype):
    check(raw_operations(), mutant_case(dtype))


@pytest.mark.parametrize(("dtype", "apply"), MUTANTS)
def test_a_mutant_is_noticed(dtype, apply, monkeypatch):
    apply(monkeypatch)
    with pytest.raises(AssertionError):
        check(raw_operations(), mutant_case(dtype))
