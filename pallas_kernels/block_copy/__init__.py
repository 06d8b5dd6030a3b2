"""Whole blocks copied within a pool, copied between two, and filled with one value."""

from pallas_kernels.block_copy.api import block_copy, block_copy_between, fill_blocks

__all__ = ["block_copy", "block_copy_between", "fill_blocks"]
