"""What follows from the size of a page alone: tokens, bytes, waste, driver calls and stranded pages of vAttention."""

import dataclasses
import itertools
import math
from collections.abc import Mapping
from typing import Any

from paxkv.capacity import PageGroups, model_shape, parse_size
from paxkv.page_groups import held_pages
from paxkv.sizes import require_int

GLOSSARY: Mapping[str, str] = {
    "block_size": "Tokens of one tensor, keys or values of a layer, that a page holds: what a block is to a paged "
    "memory.",
    "page_group_bytes": "Bytes mapped at a time on each device: a page in every tensor.",
    "worst_waste_bytes": "Most bytes that a request has mapped and does not use: a page group less one token where "
    "tokens fill pages.",
    "map_ms": "Time to map one page group, a driver call for each of its pages, one after another.",
    "supply_gb_per_s": "Bytes that one device can map in a second, in GB (1e9).",
    "row_stride_bytes": "Virtual bytes of one request in one tensor.",
    "virtual_bytes": "Virtual bytes of all requests in all tensors.",
    "virtual_tb": "virtual_bytes in TB (1e12).",
    "kept_blocks": "Blocks of a prefix cache that stay, one of so many.",
    "held_pages": "Pages that must stay mapped for them: a page goes back only when all its blocks are free.",
    "times_fewest": "held_pages over the pages that the same blocks would fill side by side.",
}
"""What each metric means, in a sentence."""


@dataclasses.dataclass(frozen=True)
class Virtual:
    """A server whose virtual memory is counted.

    Attributes:
      model: whose keys and values are stored.
      tensor_parallel: devices that share them.
      page: bytes of a page, with their unit.
      rows: requests at once.
      max_tokens: of a request.
    """

    model: str
    tensor_parallel: int
    page: str
    rows: int
    max_tokens: int


@dataclasses.dataclass(frozen=True)
class Kept:
    """Blocks that a prefix cache keeps while all others of its pages are freed.

    Attributes:
      blocks: of the cache.
      kept: of those.
      blocks_per_page: blocks of a page.
      strides: from one kept block to the next, a row of the table each.
    """

    blocks: int
    kept: int
    blocks_per_page: int
    strides: tuple[int, ...]

    def __post_init__(self) -> None:
        require_int("kept", self.kept)
        require_int("blocks_per_page", self.blocks_per_page)
        for stride in self.strides:
            last = (self.kept - 1) * require_int("strides", stride)
            if last >= self.blocks:
                raise ValueError(f"strides: expected at most {self.blocks} blocks, but {stride} reaches block {last}")


def page_sizes(
    models: Mapping[str, tuple[int, ...]],
    element_bytes: tuple[int, ...],
    pages: tuple[str, ...],
    map_call_us: Mapping[str, float],
) -> dict[str, dict[str, Any]]:
    """A result for every model, degree of tensor parallelism, page and element: see `case_name`.

    Args:
      models: degrees of tensor parallelism by model.
      element_bytes: bytes of an element of keys and values.
      pages: bytes of a page, with their unit.
      map_call_us: microseconds to map a page, by page; a page without has neither `map_ms` nor `supply_gb_per_s`.
    """
    found: dict[str, dict[str, Any]] = {}
    for model, degrees in models.items():
        for degree, page, size in itertools.product(degrees, pages, element_bytes):
            shape = dataclasses.replace(model_shape(model), tensor_parallel=degree, element_bytes=size)
            groups = PageGroups(shape, parse_size(page, "pages"))
            metrics = found[case_name(model, degree, page, size)] = {
                "block_size": groups.tokens_per_page,
                "page_group_bytes": groups.group_bytes,
                "worst_waste_bytes": groups.worst_waste_bytes,
            }
            if page in map_call_us:
                call_ns = round(1000 * map_call_us[page])
                metrics |= {
                    "map_ms": groups.map_ns(call_ns) / 1e6,
                    "supply_gb_per_s": groups.group_bytes / groups.map_ns(call_ns),
                }
    return found


def require_call_us(map_call_us: Mapping[str, float]) -> None:
    """Refuses times to map a page that are no times.

    Raises:
      ValueError: one is less than a nanosecond, or not finite.
    """
    for page, us in map_call_us.items():
        if not 0.001 <= us < math.inf:
            raise ValueError(
                f"map_call_us: expected a finite number, at least a nanosecond (0.001), got {us} for {page}"
            )


def case_name(model: str, tensor_parallel: int, page: str, element_bytes: int) -> str:
    """`Yi-6B/tp2/64KiB`, and `/1B` behind it for elements of another size than two bytes."""
    bytes_of = "" if element_bytes == 2 else f"/{element_bytes}B"
    return f"{model}/tp{tensor_parallel}/{page.replace(' ', '')}{bytes_of}"


def virtual_space(servers: Mapping[str, Virtual]) -> dict[str, dict[str, Any]]:
    """Virtual memory of each server, `virtual/<name>`."""
    found: dict[str, dict[str, Any]] = {}
    for name, server in servers.items():
        shape = dataclasses.replace(model_shape(server.model), tensor_parallel=server.tensor_parallel)
        groups = PageGroups(shape, parse_size(server.page, "page"))
        total = groups.virtual_bytes(server.rows, server.max_tokens)
        found[f"virtual/{name}"] = {
            "row_stride_bytes": groups.row_stride_bytes(server.max_tokens),
            "virtual_bytes": total,
            "virtual_tb": total / 1e12,
        }
    return found


def stranded(kept: Kept) -> dict[str, dict[str, Any]]:
    """Pages that kept blocks hold, by the stride between them: `stride/<stride>`."""
    fewest = math.ceil(kept.kept / kept.blocks_per_page)
    found: dict[str, dict[str, Any]] = {}
    for stride in kept.strides:
        pages = held_pages(range(0, kept.kept * stride, stride), kept.blocks_per_page)
        found[f"stride/{stride}"] = {
            "kept_blocks": kept.kept,
            "held_pages": pages,
            "times_fewest": pages / fewest,
        }
    return found
