"""Wrong writes and copies, in every backend, that the comparison with plain Python must not let through."""

import contextlib
import dataclasses
import functools
import types
from collections.abc import Callable, Mapping

import pytest

from pallas_kernels.block_copy import api as copy_api
from pallas_kernels.block_copy import mosaic_tpu as copy_mosaic_tpu
from pallas_kernels.block_copy import reference as copy_reference
from pallas_kernels.block_copy import triton as copy_triton
from pallas_kernels.block_copy.shapes import CopyCase
from pallas_kernels.kv_write import api as write_api
from pallas_kernels.kv_write import mosaic_tpu as write_mosaic_tpu
from pallas_kernels.kv_write import quantise
from pallas_kernels.kv_write import reference as write_reference
from pallas_kernels.kv_write import triton as write_triton
from pallas_kernels.kv_write.shapes import WriteCase
from tests.pallas_kernels.copy_oracle import check_copies
from tests.pallas_kernels.mistakes import with_mistake
from tests.pallas_kernels.mosaic_calls import interpreted
from tests.pallas_kernels.write_oracle import check_plain, check_quantised

pytestmark = pytest.mark.slow

FLOAT32 = WriteCase("float32", 96, 24, 2, 32, "float32", "float32")
BFLOAT16 = WriteCase("bfloat16", 96, 24, 2, 32, "bfloat16", "bfloat16")
E4M3 = WriteCase("e4m3 by layer", 96, 24, 2, 32, "float8_e4m3fn", "float32", "layer")
INT8 = WriteCase("int8 by head", 96, 24, 2, 32, "int8", "float32", "head")
TOKEN = WriteCase("int8 by token", 96, 24, 2, 32, "int8", "float32", "token")
SMALL = CopyCase("small blocks", 17, 3, 0, (2, 5), "float32")
LARGE = CopyCase("large blocks", 10, 16, 0, (4, 40), "float32")


@dataclasses.dataclass(frozen=True)
class Mutant:
    """A mistake, and what shows it.

    Attributes:
      name: what is wrong.
      module: where.
      changes: what the source says, and what it is made to say.
      backend: the backend that is called.
      case: what it is called with.
      mode: of the TPU's interpreter.
    """

    name: str
    module: types.ModuleType
    changes: Mapping[str, str]
    backend: str
    case: WriteCase | CopyCase
    mode: str = "eager"


def check(api: types.ModuleType, backend: str, case: WriteCase | CopyCase, mode: str) -> None:
    """Everything that an operation promises, of one case in one backend."""
    # The TPU's interpreter would take over every kernel that is traced in its context.
    with interpreted(mode) if backend.startswith("mosaic") else contextlib.nullcontext():
        if isinstance(case, CopyCase):
            operations = (functools.partial(copy, backend=backend) for copy in (api.block_copy, api.block_copy_between))
            check_copies(*operations, case)
        else:
            compare: Callable = check_plain if case.scales == "none" else check_quantised
            compare(functools.partial(api.kv_write, backend=backend), case)


def in_all(name, module, changes, case, backends=("xla", "triton_interpret", "mosaic_tpu_interpret")):
    return [Mutant(name, module, changes, backend, case) for backend in backends]


def of_tpu(name, module, changes, case, mode="eager"):
    return Mutant(name, module, changes, "mosaic_tpu_interpret", case, mode)


def of_gpu(name, module, changes, case):
    return Mutant(name, module, changes, "triton_interpret", case)


WRITES = (
    Mutant("no clip before the cast", quantise, {"jnp.clip(scaled, -bound, bound)": "scaled"}, "xla", E4M3),
    Mutant("clip past the largest", quantise, {"-bound, bound": "-bound - 1, bound"}, "xla", INT8),
    Mutant(
        "rounds towards zero",
        quantise,
        {"jax.lax.round(scaled, jax.lax.RoundingMethod.TO_NEAREST_EVEN)": "scaled"},
        "xla",
        INT8,
    ),
    Mutant(
        "not divided by the scale",
        quantise,
        {"new.astype(jnp.float32) / scale": "new.astype(jnp.float32) * scale"},
        "xla",
        INT8,
    ),
    Mutant(
        "clipped values not counted",
        quantise,
        {"~(jnp.abs(scaled) <= clip_limit(dtype))": "jnp.isnan(scaled)"},
        "xla",
        E4M3,
    ),
    Mutant(
        "what rounds to the largest counted as clipped",
        quantise,
        {"return min(top + half_step": "return min(top - half_step"},
        "xla",
        E4M3,
    ),
    Mutant(
        "one scale for all heads of a token",
        quantise,
        {"jnp.max(jnp.abs(new), axis=2)": "jnp.max(jnp.abs(new)) * jnp.ones(new.shape[:2])"},
        "xla",
        TOKEN,
    ),
    Mutant("scale of keys for values", write_api, {"v_pool.dtype, v_scale": "v_pool.dtype, k_scale"}, "xla", INT8),
    Mutant("clipped values not counted", write_api, {"k.clipped + v.clipped": "k.clipped"}, "xla", E4M3),
    Mutant(
        "clipped values counted of tokens not stored",
        write_api,
        {"jnp.where(stores, k.clipped + v.clipped, 0)": "k.clipped + v.clipped"},
        "xla",
        E4M3,
    ),
    Mutant(
        "negative slots not counted", write_api, {"~stores & (slots != num_slots)": "slots > num_slots"}, "xla", FLOAT32
    ),
    Mutant("padding counted", write_api, {"~stores & (slots != num_slots)": "~stores"}, "xla", FLOAT32),
    *in_all(
        "out of range in the last slot",
        write_api,
        {"jnp.where(stores, slots, num_slots)": "jnp.clip(slots, 0, num_slots - 1)"},
        FLOAT32,
    ),
    *in_all(
        "negative slots from the end",
        write_api,
        {
            "(slots >= 0) &": "",
            "jnp.where(stores, slots, num_slots)": "jnp.where(stores, slots % num_slots, num_slots)",
        },
        FLOAT32,
    ),
    *in_all(
        "values where keys go",
        write_api,
        {"(k_new.astype(k_pool.dtype), v_new": "(v_new.astype(k_pool.dtype), v_new"},
        FLOAT32,
    ),
    Mutant(
        "past the end in the last slot",
        write_reference,
        {'set(new, mode="drop")': 'set(new, mode="clip")'},
        "xla",
        FLOAT32,
    ),
    Mutant(
        "past the end in the last slot, as bits",
        write_reference,
        {"at[slots].set(jnp": "at[jnp.minimum(slots, pool.shape[0] - 1)].set(jnp"},
        "xla",
        BFLOAT16,
    ),
    Mutant(
        "first token stored nowhere",
        write_reference,
        {"expand_dims(writer < tokens,": "expand_dims((writer > 0) & (writer < tokens),"},
        "xla",
        BFLOAT16,
    ),
    Mutant("one token too few", write_reference, {"[slots].set(new,": "[slots[:-1]].set(new[:-1],"}, "xla", FLOAT32),
    of_gpu(
        "past the end in the last slot",
        write_triton,
        {
            "pool.at[slot, lanes]": "pool.at[jnp.minimum(slot, num_slots - 1), lanes]",
            "real & (slot < num_slots)": "real",
        },
        FLOAT32,
    ),
    of_gpu("keys in both pools", write_triton, {"row.at[token, lanes]": "rows[0].at[token, lanes]"}, FLOAT32),
    of_gpu("all of a row but one", write_triton, {"real = lanes < width": "real = lanes < width - 1"}, FLOAT32),
    of_gpu("one token too few", write_triton, {"grid=(tokens,)": "grid=(tokens - 1,)"}, FLOAT32),
    of_gpu(
        "scales not written",
        write_triton,
        {"zip(rows, written, strict=True)": "zip(rows[:2], written[:2], strict=True)"},
        TOKEN,
    ),
    of_tpu(
        "past the end in the last slot",
        write_mosaic_tpu,
        {
            "slots[token] < pools[0].shape[0]": "slots[token] >= 0",
            "pool.at[slots[token]]": "pool.at[jax.numpy.minimum(slots[token], pool.shape[0] - 1)]",
        },
        FLOAT32,
    ),
    of_tpu("past the end", write_mosaic_tpu, {"slots[token] < pools": "slots[token] <= pools"}, FLOAT32),
    of_tpu(
        "values where keys go",
        write_mosaic_tpu,
        {"zip(rows, pools, strict=True)": "zip(rows[::-1], pools, strict=True)"},
        FLOAT32,
    ),
    of_tpu(
        "one token too few", write_mosaic_tpu, {"(0, slots.shape[0], of_token": "(1, slots.shape[0], of_token"}, FLOAT32
    ),
    of_tpu("does not wait", write_mosaic_tpu, {"    each_copy(lambda copy: copy.wait())\n": ""}, FLOAT32, "races"),
    of_tpu("scales not written", write_mosaic_tpu, {'.at[slots].set(rows[i], mode="drop")': ""}, TOKEN),
)
COPIES = (
    Mutant(
        "sources for destinations",
        copy_reference,
        {"_read(src_pool, src, block_size), dst)": "_read(src_pool, dst, block_size), src)"},
        "xla",
        SMALL,
    ),
    Mutant(
        "one pair too few",
        copy_reference,
        {"dst = jnp.where(real, dst, num_blocks)": "dst = jnp.where(real, dst, num_blocks).at[-1].set(num_blocks)"},
        "xla",
        SMALL,
    ),
    of_gpu("sources for destinations", copy_triton, {"dst_blocks, src, dst)": "dst_blocks, dst, src)"}, SMALL),
    of_gpu(
        "reads what is overwritten",
        copy_triton,
        {
            "_copy(read, pool, jnp.where(real, places, -1), dst": "_copy(pool, pool, src, dst",
            "load(src_blocks": "load(copied",
        },
        SMALL,
    ),
    of_gpu(
        "the first of a destination wins",
        copy_triton,
        {"places[None] > places[:, None]": "places[None] < places[:, None]"},
        SMALL,
    ),
    of_gpu("what is no pair wins", copy_triton, {"later = real[None] &": "later ="}, SMALL),
    of_gpu("negative ids from the end", copy_triton, {"(ids >= 0) & (ids < num_blocks)": "ids < num_blocks"}, SMALL),
    of_gpu("the last block for the sentinel", copy_triton, {"(ids < num_blocks)": "(ids <= num_blocks)"}, SMALL),
    of_gpu("no last block", copy_triton, {"(ids < num_blocks)": "(ids < num_blocks - 1)"}, SMALL),
    of_gpu("one pair too few", copy_triton, {"grid=(src.shape[0],": "grid=(src.shape[0] - 1,"}, SMALL),
    of_gpu("all of a block but one", copy_triton, {"lanes < copied.shape[1]": "lanes < copied.shape[1] - 1"}, SMALL),
    of_gpu("the first piece of a block only", copy_triton, {"pl.program_id(1) * piece": "0 * piece"}, LARGE),
    of_gpu("whole pieces only", copy_triton, {"pl.cdiv(width, piece)": "width // piece"}, LARGE),
    of_tpu(
        "sources for destinations",
        copy_mosaic_tpu,
        {"src_blocks.at[src[i]], dst_blocks.at[dst[i]]": "src_blocks.at[dst[i]], dst_blocks.at[src[i]]"},
        SMALL,
    ),
    of_tpu(
        "reads what is overwritten",
        copy_mosaic_tpu,
        {
            "_copy(read, pool, places, dst": "_copy(pool, pool, src, dst",
            "src_blocks.at[src[i]]": "dst_blocks.at[src[i]]",
        },
        SMALL,
    ),
    of_tpu(
        "the first of a destination wins",
        copy_mosaic_tpu,
        {"~jnp.tri(": "jnp.tri(", ", dtype=bool)": ", k=-1, dtype=bool)"},
        SMALL,
    ),
    of_tpu(
        "several into a destination at once", copy_mosaic_tpu, {"real & _is_last(dst, real)": "real"}, SMALL, "races"
    ),
    of_tpu("what is no pair wins", copy_mosaic_tpu, {"& real[None] &": "&"}, SMALL),
    of_tpu("negative ids", copy_mosaic_tpu, {"(src >= 0) &": "", "(dst >= 0) &": ""}, SMALL),
    of_tpu("the sentinel", copy_mosaic_tpu, {"dst < num_blocks": "dst <= num_blocks"}, SMALL),
    of_tpu("no last block", copy_mosaic_tpu, {"dst < num_blocks": "dst < num_blocks - 1"}, SMALL),
    of_tpu("one pair too few", copy_mosaic_tpu, {"(0, src.shape[0], of_pair": "(1, src.shape[0], of_pair"}, SMALL),
    of_tpu("does not wait", copy_mosaic_tpu, {"    each_copy(lambda copy: copy.wait())\n": ""}, SMALL, "races"),
)
ALL = (*WRITES, *COPIES)


def reached(mutant):
    """The modules through which a caller gets to a mistake, and the operation's door."""
    api = copy_api if isinstance(mutant.case, CopyCase) else write_api
    return (api,) if mutant.module is api else (mutant.module, api)


@pytest.mark.parametrize("mutant", ALL, ids=lambda mutant: f"{mutant.module.__name__}-{mutant.name}-{mutant.backend}")
def test_a_mistake_is_noticed(mutant, monkeypatch):
    api = with_mistake(monkeypatch, reached(mutant), mutant.changes)
    with pytest.raises((AssertionError, RuntimeError)):
        check(api, mutant.backend, mutant.case, mutant.mode)


@pytest.mark.parametrize(
    ("backend", "case", "mode"),
    sorted({(mutant.backend, mutant.case, mutant.mode) for mutant in ALL}, key=str),
    ids=lambda value: getattr(value, "name", value),
)
def test_what_is_right_passes_where_mistakes_are_noticed(backend, case, mode):
    check(copy_api if isinstance(case, CopyCase) else write_api, backend, case, mode)
