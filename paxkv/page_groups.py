"""Arithmetic of vAttention-style memory (arXiv 2405.04437): virtual ranges that are backed group by group.

Keys and values of each layer are tensors of their own, with one contiguous virtual range per row. A page
group is one physical page in each of these tensors: the unit in which memory is mapped.
"""

import dataclasses
import math
from collections.abc import Iterable

from paxkv.model_shapes import KVShape
from paxkv.sizes import require_int


@dataclasses.dataclass(frozen=True)
class PageGroups:
    """Page groups of a model on one device.

    Raises:
        ValueError: the page size is not positive, or the shape keeps scales per block, which pages have not.
    """

    shape: KVShape
    page_bytes: int
    sliced: bool = False  # all layers share a tensor ("tensor slicing"): 2 tensors rather than 2 per layer

    def __post_init__(self) -> None:
        require_int("page_bytes", self.page_bytes)
        block_scales = (self.shape.scale_bytes_per_block_head, self.shape.v_scale_bytes_per_block_head)
        if any(block_scales):
            raise ValueError(
                f"shape must keep no scales per block, got {max(filter(None, block_scales))} bytes per "
                f"head; a contiguous range has no blocks, so use scale_bytes_per_token_head"
            )

    @property
    def num_tensors(self) -> int:
        """Tensors that hold keys or values."""
        return 2 if self.sliced else 2 * self.shape.layers

    @property
    def group_bytes(self) -> int:
        """Bytes of one page group, over all tensors."""
        return self.num_tensors * self.page_bytes

    @property
    def tokens_per_page(self) -> int:
        """Whole tokens in a page, rounded down: vAttention's "block size".

        Do not divide a length by it: where a token does not divide the page, tokens straddle pages.
        `groups_for` counts in bytes.

        Raises:
            ValueError: a page is smaller than a token.
        """
        if self.page_bytes < self._token_bytes:
            raise ValueError(
                f"page_bytes must hold a token of {self._token_bytes} bytes, got {self.page_bytes}; use a larger page"
            )
        return self.page_bytes // self._token_bytes

    @property
    def worst_waste_bytes(self) -> int:
        """Most bytes that a row can have mapped and not used: just under `group_bytes`, which sources give.

        The last page of a tensor is never empty, and the least it holds over all lengths is the greatest
        common divisor of token and page.
        """
        return self.num_tensors * (self.page_bytes - math.gcd(self._token_bytes, self.page_bytes))

    def groups_for(self, tokens: int) -> int:
        """Page groups that back `tokens` tokens of a row: rounded up from bytes, 0 for none."""
        require_int("tokens", tokens, minimum=0)
        return -(-tokens * self._token_bytes // self.page_bytes)

    def map_ns(self, call_ns: int) -> int:
        """Nanoseconds to map one page group: a driver call for each of its pages, one after another.

        Args:
            call_ns: nanoseconds to map one page and make it accessible.
        """
        return self.num_tensors * require_int("call_ns", call_ns)

    def row_stride_bytes(self, max_tokens: int) -> int:
        """Virtual bytes from one row to the next in one tensor, rounded up to pages: rows share none."""
        return self.groups_for(require_int("max_tokens", max_tokens)) * self.page_bytes

    def virtual_bytes(self, rows: int, max_tokens: int) -> int:
        """Virtual bytes over all tensors for `rows` rows of up to `max_tokens` tokens."""
        return self.num_tensors * require_int("rows", rows) * self.row_stride_bytes(max_tokens)

    @property
    def _token_bytes(self) -> int:
        return self.shape.tensor_token_bytes * (self.shape.layers if self.sliced else 1)


def held_pages(block_ids: Iterable[int], blocks_per_page: int) -> int:
    """Pages that must stay mapped while these blocks are kept: one goes back only when all its blocks are free.

    Args:
        block_ids: kept blocks, which lie page by page in the order of their ids.
        blocks_per_page: blocks of a page.
    """
    require_int("blocks_per_page", blocks_per_page)
    return len({require_int("block_ids", block, minimum=0) // blocks_per_page for block in block_ids})
