"""Calls of the TPU's attention kernels in its interpreter, small and yet of several fetches and steps.

Races between DMAs and loads show only to the race detector, a wait that comes too late only where DMAs run at once, and
what was never written only where memory starts as NaN. Each call has a limit, as a wait in vain never ends.
"""

import contextlib
import faulthandler
import functools
import io

from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.paged_attention.shapes import AttentionCase
from tests.pallas_kernels.attention_oracle import make_problem

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
    """The context of a call whose results are read within it."""
    printed = io.StringIO()
    faulthandler.dump_traceback_later(LIMIT_S, exit=True)
    try:
        with pltpu.force_tpu_interpret_mode(MODES[mode]), contextlib.redirect_stdout(printed):
            yield
    finally:
        faulthandler.cancel_dump_traceback_later()
    # Older releases of jax print what they find, newer ones raise it.
    assert "RACE DETECTED" not in printed.getvalue(), printed.getvalue()


def make_case(name, **changes):
    sizes = {"q_heads": 8, "kv_heads": 2, "head_dim": 128, "block_size": 16, "blocks_per_seq": 20}
    sizes |= {"tokens": 6, "seqs": 8, "max_q_len": 1, "batches": {}}
    return AttentionCase(name=name, **(sizes | changes))


def make_chunks(name, **changes):
    return make_case(name, tokens=32, max_q_len=32, **changes)


# Decode rows of up to three fetches of two steps each, and chunks; every option once.
DECODE = ((1, 1), (1, 300), (1, 0), (1, 128), (1, 129), (1, 33))
CHUNKS = ((9, 30), (1, 300), (0, 0), (17, 140), (3, 3))
CASES = {
    case.name: (case, CHUNKS if case.max_q_len > 1 else DECODE)
    for case in (
        make_case("decode"),
        make_case("decode_window", window=40, soft_cap=5.0, return_lse=True),
        make_case("decode_group_of_5", q_heads=5, kv_heads=1, block_size=24, sinks=True),
        make_case("decode_3_kv_heads", q_heads=6, kv_heads=3, head_dim=64, block_size=8, blocks_per_seq=40),
        make_case("decode_e4m3", kv_dtype="float8_e4m3fn", q_dtype="bfloat16", scales="head"),
        make_case("decode_int8_new", kv_dtype="int8", scales="token", reads_new=True, sinks=True, return_lse=True),
        make_chunks("chunks"),
        make_chunks("chunks_window", window=25, sinks=True, return_lse=True),
        make_chunks("chunks_e5m2_new", kv_dtype="float8_e5m2", scales="token", reads_new=True),
        make_case("decode_e5m2", kv_dtype="float8_e5m2", q_dtype="bfloat16"),
        make_chunks("chunks_bf16", q_dtype="bfloat16", kv_dtype="bfloat16"),
    )
}


@functools.cache
def posed(name):
    """A case's problem and its answer."""
    problem = make_problem(*CASES[name], list(CASES).index(name))
    return problem, problem.expected()
