"""Named cases: those of paged attention, each sequence in a range of `blocks_per_seq * block_size` slots.

The two operations differ by where a position lies, so they are tested and measured on the same work.
"""

from pallas_kernels.paged_attention.shapes import CASES, AttentionCase

__all__ = ["CASES", "AttentionCase"]
