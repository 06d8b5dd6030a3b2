"""Named cases: those of paged attention, each sequence in a range of `blocks_per_seq * block_size` slots.

The two operations differ by where a position lies, so they are tested and measured on the same work. Of those that are
compiled for devices that are not there, one block size is enough.
"""

import dataclasses

from pallas_kernels.paged_attention.shapes import CASES as _PAGED
from pallas_kernels.paged_attention.shapes import AttentionCase

__all__ = ["CASES", "AttentionCase"]

_OFFLINE = ("d128_kv8_g4_b16_bf16", "d128_kv8_g4_b16_fp8")
CASES: tuple[AttentionCase, ...] = tuple(
    dataclasses.replace(case, on_demand=case.offline and case.name != _OFFLINE[0])
    for case in _PAGED
    if not case.offline or case.name in _OFFLINE
)
