"""Writing keys and values on a GPU: one program per token, into the pools as they lie."""

from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu
from jaxtyping import Array, Int32, Shaped

from pallas_kernels._triton_attention import check_offsets


@jax.jit(static_argnames="interpret")
def kv_write(
    pools: tuple[Shaped[Array, "slots ..."], ...],
    rows: tuple[Shaped[Array, "tokens ..."], ...],
    slots: Int32[Array, " tokens"],
    *,
    interpret: bool = False,
) -> tuple[Shaped[Array, "slots ..."], ...]:
    """See `pallas_kernels.kv_write.kv_write`: bits of `rows` into `slots` of `pools`, those past the end nowhere.

    Raises:
      ValueError: a pool is of a size whose offsets the backend would compute wrongly.
    """
    for pool in pools:
        check_offsets("a pool", pool)
    tokens = slots.shape[0]
    if tokens == 0:
        return pools
    flat_pools, flat_rows = (
        tuple(as_bits(array).reshape(array.shape[0], -1) for array in part) for part in (pools, rows)
    )
    written = pl.pallas_call(
        write_kernel,
        grid=(tokens,),
        out_shape=tuple(jax.ShapeDtypeStruct(pool.shape, pool.dtype) for pool in flat_pools),
        input_output_aliases={i: i for i in range(len(pools))},
        compiler_params=plgpu.CompilerParams(num_warps=4, num_stages=1),
        interpret=interpret,
        name="kv_write",
    )(flat_pools, flat_rows, slots)
    return tuple(
        jax.lax.bitcast_convert_type(bits.reshape(pool.shape), pool.dtype)
        for bits, pool in zip(written, pools, strict=True)
    )


def write_kernel(pools: Any, rows: Any, slots: Any, *written: Any) -> None:
    """Stores one token's rows in its slot."""
    token = pl.program_id(0)
    slot = slots[token]
    for row, pool in zip(rows, written, strict=True):
        num_slots, width = pool.shape
        lanes = jnp.arange(pl.next_power_of_2(width), dtype=jnp.int32)
        real = lanes < width
        values = plgpu.load(row.at[token, lanes], mask=real, other=jnp.zeros((), row.dtype))
        plgpu.store(pool.at[slot, lanes], values, mask=real & (slot < num_slots))
    del pools  # aliased by what is written


def as_bits(array: Shaped[Array, "*shape"]) -> Shaped[Array, "*shape"]:
    """The array as unsigned integers: no float is touched on its way, whatever NaN it is."""
    return jax.lax.bitcast_convert_type(array, jnp.dtype(f"uint{8 * array.dtype.itemsize}"))
