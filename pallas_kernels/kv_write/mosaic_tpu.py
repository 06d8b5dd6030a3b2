"""Writing keys and values on a TPU: one DMA for each token and pool, from where it lies to its slot."""

# ruff: noqa: ANN001, ANN002, ANN202 (what a kernel is handed are refs, for which there is no public type)

import functools

import jax
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Int32, Shaped

WORD_BYTES = 4  # of the elements that lie above one another, of neighbouring heads or of neighbouring slots


@jax.jit(static_argnames=("interpret",))
def kv_write(
    pools: tuple[Shaped[Array, "slots ..."], ...],
    rows: tuple[Shaped[Array, "tokens ..."], ...],
    slots: Int32[Array, " tokens"],
    *,
    interpret: bool | pltpu.InterpretParams = False,
) -> tuple[Shaped[Array, "slots ..."], ...]:
    """See `pallas_kernels.kv_write.kv_write`: bits of `rows` into `slots` of `pools`, those past the end nowhere.

    Scales, `[slots, kv_heads]`, are scattered by XLA: one of their rows is less than the tile that a DMA can move.

    Raises:
      NotImplementedError: heads are so few and narrow that slots share a 32-bit word, which no DMA can take apart; for
        this kernel XLA would lay out the whole pool anew in every call.
    """
    wide = [i for i, pool in enumerate(pools) if pool.ndim > 2]
    for pool in (pools[i] for i in wide):
        if pool.shape[1] * pool.dtype.itemsize < WORD_BYTES and not interpret:
            raise NotImplementedError(
                f"pools: the mosaic_tpu kernel writes slots of whole 32-bit words, of at least "
                f"{WORD_BYTES // pool.dtype.itemsize} heads of {pool.dtype.name}, got {pool.shape[1]}; use 'xla'"
            )
    written = {i: pools[i].at[slots].set(rows[i], mode="drop") for i in range(len(pools)) if i not in wide}
    in_hbm = pl.BlockSpec(memory_space=pltpu.HBM)
    stored = pl.pallas_call(
        functools.partial(_write, len(wide)),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=(),
            in_specs=[in_hbm] * (2 * len(wide)),
            out_specs=[in_hbm] * len(wide),
            scratch_shapes=[pltpu.SemaphoreType.DMA],
        ),
        out_shape=[jax.ShapeDtypeStruct(pools[i].shape, pools[i].dtype) for i in wide],
        input_output_aliases={1 + n: n for n in range(len(wide))},
        interpret=interpret,
        name="kv_write",
    )(slots, *(pools[i] for i in wide), *(rows[i] for i in wide))
    written |= dict(zip(wide, stored, strict=True))
    return tuple(written[i] for i in range(len(pools)))


def _write(num_pools: int, slots, *refs):
    """All copies are under way before the first is waited for."""
    rows, pools, done = refs[num_pools : 2 * num_pools], refs[2 * num_pools : 3 * num_pools], refs[-1]

    def each_copy(act):
        def of_token(token, _):
            @pl.when(slots[token] < pools[0].shape[0])
            def _():
                for new, pool in zip(rows, pools, strict=True):
                    act(pltpu.make_async_copy(new.at[token], pool.at[slots[token]], done))

        lax.fori_loop(0, slots.shape[0], of_token, None)

    each_copy(lambda copy: copy.start())
    each_copy(lambda copy: copy.wait())


kv_write_interpreted = functools.partial(kv_write, interpret=pltpu.InterpretParams())
