"""Attention of a ragged batch over keys and values that lie in blocks."""

from pallas_kernels.paged_attention.api import paged_attention

__all__ = ["paged_attention"]
