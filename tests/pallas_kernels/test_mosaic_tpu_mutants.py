"""Wrong kernels for TPUs that the comparison with float64 must not let through, nor the interpreter's checks.

None of them waits for what nobody sends, as that never ends.
"""

import dataclasses
import types
from collections.abc import Mapping

import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import _mosaic_tpu as kernel
from pallas_kernels import _mosaic_tpu_batch as batch
from pallas_kernels.contiguous_attention import mosaic_tpu as contiguous
from pallas_kernels.paged_attention import mosaic_tpu as paged
from tests.pallas_kernels.attention_oracle import assert_matches
from tests.pallas_kernels.mistakes import with_mistake
from tests.pallas_kernels.mosaic_calls import CASES, interpreted, posed

NOTICED = "times the tolerance|not finite|is not 0|logarithm|Out-of-bounds|RACE DETECTED"


@dataclasses.dataclass(frozen=True)
class Mutant:
    """A mistake, and the call that shows it.

    Attributes:
      name: what is wrong.
      changes: what the source says, and what it is made to say.
      case: the call.
      module: where the mistake is.
      mode: the interpreter's.
      memory: the attention that is called, over blocks or over ranges.
    """

    name: str
    changes: Mapping[str, str]
    case: str = "decode"
    module: types.ModuleType = kernel
    mode: str = "eager"
    memory: types.ModuleType = paged


def attend(memory, case, mode):
    """Compares with the answer; around the checks of an operation, so that tables still hold ids out of range."""
    problem, expected = posed(case)
    arguments = {"scale": CASES[case][0].head_dim ** -0.5}
    if memory.__name__ == paged.__name__:
        call, arguments = memory.paged_attention_interpreted, arguments | problem.paged()
    else:
        call, arguments = memory.contiguous_attention_interpreted, arguments | problem.contiguous()
    with interpreted(mode):
        out, lse = call(**arguments)
        nothing = np.isneginf(expected.lse)  # rows that the kernel leaves undefined
        out = jnp.where(nothing[:, :, None], 0, out)
        assert_matches(out if lse is None else (out, jnp.where(nothing, -jnp.inf, lse)), expected)


# What every full run tries, and what is left to `pytest -m soak`.
FIRST = (
    Mutant("drops the newest", {"jnp.minimum(position + 1, end)": "jnp.minimum(position, end)"}),
    Mutant("mean of values", {"LANES] - top)": "LANES] * 1e-30)"}),
    Mutant("ignores the queries", {"q[0, head_set].astype": "(q[0, head_set] * 0).astype"}),
    Mutant(
        "window not applied inside a tile",
        {"jnp.maximum(position - ((plan.window or 1) - 1), low) if plan.window else low": "low"},
        "chunks_window",
    ),
    Mutant("one position too many", {"jnp.minimum(position + 1, end)": "jnp.minimum(position + 2, end + 1)"}),
    Mutant(
        "no scale of keys of a head", {"heads = heads * jnp.broadcast_to": "jnp.broadcast_to"}, "decode_e4m3", batch
    ),
    Mutant(
        "no scale of values of a head",
        {"out * jnp.broadcast_to(v_scale, (kv_heads,))[None, :, None, None]": "out"},
        "decode_e4m3",
        batch,
    ),
    Mutant("no rescale of the sum", {"weighted[head_set] * rescale[:, :1]": "weighted[head_set]"}),
    Mutant("fetches into the buffer that is attended", {"1 - side": "side"}),
    Mutant(
        "reads a block for every slot of a fetch",
        {"jnp.minimum(ends[t] - fetch * plan.fetch_slots, plan.fetch_slots)": "jnp.int32(plan.fetch_slots)"},
    ),
    Mutant("swaps KV heads", {"own_head = (lane & (heads - 1))": "own_head = (~lane & (heads - 1))"}),
    Mutant("keys for values", {"((k, k_buffer), (v, v_buffer))": "((v, k_buffer), (k, v_buffer))"}),
    Mutant("neighbour's table", {"cut.seq_ids * table": "(cut.seq_ids + 1) * table"}, module=batch),
    Mutant("no sink", {"if sinks is not None": "if False"}, case="decode_group_of_5", module=batch),
)
MORE = (
    Mutant("fetches into the buffer that is attended, but later", {"1 - side": "side"}, mode="races"),
    Mutant("does not wait", {"        wait(fetch, side)\n": ""}, mode="races"),
    Mutant("reads one block too many", {"slots + (plan.block_size - 1)": "slots + (2 * plan.block_size - 1)"}),
    Mutant("no rescale of the denominator", {"denominator[head_set] * rescale,": "denominator[head_set],"}),
    Mutant("heads of all", {"None if plan.apart else own_head": "None if plan.apart else lane >= 0"}),
    Mutant("unread values stay", {"        clear_unread(side, fetch, steps)\n": ""}),
    Mutant("neighbour's blocks", {"table[entry + i]": "table[entry + i + 1]"}),
    Mutant("the next fetch reads this tile's", {"first_blocks[t] +": "first_blocks[tile] +"}),
    Mutant("every fetch is the first", {"first_blocks[t] + fetch": "first_blocks[t] + 0 * fetch"}),
    Mutant(
        "no lower bound",
        {"within &= lane >= since - i * LANES": "within &= lane >= -i * LANES"},
        case="decode_window",
    ),
    Mutant("no soft cap", {"jnp.tanh(part)": "part"}, case="decode_window"),
    Mutant("logarithm to base 2", {"[..., 0] / LOG2_E": "[..., 0]"}, case="decode_window", module=batch),
    Mutant("no scale of a key", {"part * slot_scale(0, i)": "part"}, "decode_int8_new"),
    Mutant(
        "no scale of a value", {"weight * slot_scale(1, i) if plan.scaled else weight": "weight"}, "decode_int8_new"
    ),
    Mutant("scales of keys for values", {"slot_scale(1, i)": "slot_scale(0, i)"}, "decode_int8_new"),
    Mutant("scales of neighbours", {"at[block_ids].get": "at[block_ids + 1].get"}, "decode_int8_new", batch),
    Mutant(
        "sink in each memory", {"    if sinks is not None:\n": "    for _ in range(2):\n"}, "decode_int8_new", batch
    ),
    Mutant("no rescale where memories join", {"(x[0] * share ": "(x[0] "}, "decode_int8_new", batch),
    Mutant(
        "memories joined without the new one", {"out, lse = join((out, lse), new)": "pass"}, "decode_int8_new", batch
    ),
    Mutant(
        "whole steps past a query's own position",
        {"queries[tile] + 1 - fetch": "queries[tile] + 1 + plan.step_slots - fetch"},
        "chunks",
    ),
    Mutant("queries of one position", {"(row & (plan.q_tile - 1))": "(row & 0)"}, "chunks"),
    Mutant("one KV head for all", {"plan.kv_heads + head, count": "plan.kv_heads, count"}, "chunks"),
    Mutant("window of one more", {"((plan.window or 1) - 1)": "plan.window"}, "chunks_window"),
    Mutant(
        "ranges read from their block on",
        {"base = skipped * plan.block_size - lead": "base = skipped * plan.block_size"},
        module=batch,
        memory=contiguous,
    ),
    Mutant("ranges read one block further", {"pl.ds(first, count)": "pl.ds(first + 1, count)"}, memory=contiguous),
)


@pytest.mark.parametrize(
    "mutant",
    [
        *(pytest.param(mutant, id=mutant.name, marks=pytest.mark.slow) for mutant in FIRST),
        *(pytest.param(mutant, id=mutant.name, marks=pytest.mark.soak) for mutant in MORE),
    ],
)
def test_a_mistake_in_the_kernel_is_noticed(mutant, monkeypatch):
    reached = (mutant.memory,) if mutant.module is batch else (batch, mutant.memory)
    memory = with_mistake(monkeypatch, (mutant.module, *reached), mutant.changes)
    with pytest.raises((AssertionError, RuntimeError), match=NOTICED):
        attend(memory, mutant.case, mutant.mode)


@pytest.mark.soak
@pytest.mark.parametrize(
    ("memory", "case", "mode"),
    sorted({(mutant.memory, mutant.case, mutant.mode) for mutant in (*FIRST, *MORE)}, key=str),
    ids=lambda value: getattr(value, "__package__", value),
)
def test_the_kernel_as_it_stands_passes_where_mistakes_are_noticed(memory, case, mode, monkeypatch):
    attend(with_mistake(monkeypatch, (kernel, batch, memory), {}), case, mode)
