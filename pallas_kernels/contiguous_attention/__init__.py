"""Attention of a ragged batch over keys and values that lie in one range per sequence."""

from pallas_kernels.contiguous_attention.api import contiguous_attention

__all__ = ["contiguous_attention"]
