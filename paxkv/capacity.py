"""How much fits: blocks, tokens and requests in a memory budget, and what is wasted. Exact, without floats.

Counts are Python ints, ratios are `fractions.Fraction`. A concurrency is returned as the exact ratio; its
`math.floor` is the number of whole requests. Where every request needs the same whole blocks, rounding the pool
down to blocks first changes nothing: floor(floor(a / b) / c) = floor(a / (b * c)) for whole b and c.
"""

import dataclasses
from collections.abc import Iterable, Sequence
from fractions import Fraction

import jax.numpy as jnp

from paxkv.model_shapes import KVShape, model_shape
from paxkv.page_groups import PageGroups
from paxkv.sizes import parse_fraction, parse_size, require_int
from paxkv.windows import Group, num_places

__all__ = [
    "BlockPlan",
    "KVShape",
    "PageGroups",
    "Waste",
    "blocks_for",
    "entry_shape",
    "expected_blocks",
    "expected_concurrency",
    "grouped_concurrency",
    "kv_budget",
    "model_shape",
    "packed_requests",
    "paged_concurrency",
    "parse_fraction",
    "parse_size",
    "plan_blocks",
    "pool_concurrency",
    "request_blocks",
    "reserved_concurrency",
    "slack_slots",
    "tokens_in",
    "waste_by_kind",
]


@dataclasses.dataclass(frozen=True)
class BlockPlan:
    """A pool of blocks on one device, next to the bytes it was planned for."""

    num_blocks: int
    block_size: int  # tokens
    block_bytes: int
    budget_bytes: int

    @property
    def num_slots(self) -> int:
        """Tokens that the pool can hold."""
        return self.num_blocks * self.block_size

    @property
    def kv_bytes(self) -> int:
        """Bytes that the pool takes."""
        return self.num_blocks * self.block_bytes

    @property
    def excess_bytes(self) -> int:
        """Bytes by which the pool exceeds its budget; above 0 only where the number of blocks was forced."""
        return max(0, self.kv_bytes - self.budget_bytes)


def kv_budget(memory_bytes: int, memory_fraction: str | int | Fraction = 1, non_kv_bytes: int = 0) -> int:
    """Bytes for keys and values: `floor(memory_bytes * memory_fraction) - non_kv_bytes`.

    Args:
        memory_bytes: memory of one device.
        memory_fraction: share of it the server may use, as decimal text or a `Fraction`; floats are refused.
        non_kv_bytes: weights and activations, which come out of that share.

    Raises:
        ValueError: an argument is out of range, or nothing is left.
    """
    require_int("memory_bytes", memory_bytes)
    require_int("non_kv_bytes", non_kv_bytes, minimum=0)
    usable_bytes = memory_bytes * parse_fraction(memory_fraction, "memory_fraction") // 1
    if non_kv_bytes >= usable_bytes:
        raise ValueError(
            f"non_kv_bytes must be less than the {usable_bytes} usable bytes, got {non_kv_bytes}; "
            f"use more memory, a larger memory_fraction or smaller weights"
        )
    return usable_bytes - non_kv_bytes


def plan_blocks(
    shape: KVShape, block_size: int, budget_bytes: int, num_blocks_override: int | None = None
) -> BlockPlan:
    """Whole blocks that fit the budget, rounded down.

    Args:
        shape: keys and values of the model on one device.
        block_size: tokens per block.
        budget_bytes: bytes of that device for keys and values; see `kv_budget`.
        num_blocks_override: take this many blocks instead; the plan's `excess_bytes` tells whether they fit.

    Raises:
        ValueError: an argument is out of range, or not one block fits and none is forced.
    """
    block_bytes = shape.block_bytes(block_size)
    num_blocks = require_int("budget_bytes", budget_bytes) // block_bytes
    if num_blocks_override is not None:
        num_blocks = require_int("num_blocks_override", num_blocks_override)
    if num_blocks == 0:
        raise ValueError(
            f"budget_bytes must hold a block of {block_bytes} bytes, got {budget_bytes}; "
            f"use more memory or a smaller block_size"
        )
    return BlockPlan(num_blocks=num_blocks, block_size=block_size, block_bytes=block_bytes, budget_bytes=budget_bytes)


def tokens_in(shape: KVShape, kv_bytes: int) -> int:
    """Tokens that fit `kv_bytes` laid end to end, rounded down; scales kept per block are not counted."""
    return require_int("kv_bytes", kv_bytes) // shape.token_bytes


def blocks_for(tokens: int, block_size: int) -> int:
    """Blocks that hold `tokens` tokens: rounded up, 0 for none."""
    return -(-require_int("tokens", tokens, minimum=0) // require_int("block_size", block_size))


def slack_slots(tokens: int, block_size: int) -> int:
    """Slots of a sequence's last block that its `tokens` tokens leave empty: 0 to block_size - 1."""
    return blocks_for(tokens, block_size) * block_size - tokens


def expected_blocks(mean_tokens: int | Fraction, block_size: int) -> Fraction:
    """Mean blocks of sequences with `mean_tokens` tokens on average.

    Assumes that the last block is as likely to be filled to one level as to another, so that it has
    (block_size - 1) / 2 empty slots on average. Sequences of one fixed length need `blocks_for` instead.
    """
    require_int("block_size", block_size)
    if not isinstance(mean_tokens, Fraction):
        require_int("mean_tokens", mean_tokens)
    if mean_tokens <= 0:
        raise ValueError(f"mean_tokens must be positive, got {mean_tokens}; give a mean sequence length")
    return (mean_tokens + Fraction(block_size - 1, 2)) / block_size


def paged_concurrency(shape: KVShape, kv_bytes: int, tokens: int, block_size: int) -> Fraction:
    """Requests of `tokens` tokens each that `kv_bytes` hold, each in whole blocks."""
    num_blocks = blocks_for(require_int("tokens", tokens), block_size)
    return Fraction(require_int("kv_bytes", kv_bytes), num_blocks * shape.block_bytes(block_size))


def expected_concurrency(shape: KVShape, kv_bytes: int, mean_tokens: int | Fraction, block_size: int) -> Fraction:
    """Requests of `mean_tokens` tokens on average that `kv_bytes` hold, as `expected_blocks` counts.

    The pool is rounded down to whole blocks first: a request's mean need is no whole number, so that flooring
    only at the end could count one too many.
    """
    num_blocks = require_int("kv_bytes", kv_bytes) // shape.block_bytes(block_size)
    return num_blocks / expected_blocks(mean_tokens, block_size)


def request_blocks(groups: Sequence[Group], tokens: int, max_chunk: int | None = None) -> int:
    """Most blocks that a request of `tokens` tokens comes to hold at once, over all groups of layers.

    Args:
        groups: of layers that see the same tokens; see `windows.Group`.
        tokens: that the request has stored at its end.
        max_chunk: most tokens that it stores in a step, which are in flight while blocks leave the window; None for
            any number.
    """
    require_int("tokens", tokens)
    chunk = tokens if max_chunk is None else require_int("max_chunk", max_chunk)
    return sum(int(group.most_blocks(jnp.int32(tokens), chunk)) for group in groups)


def pool_concurrency(num_blocks: int, groups: Sequence[Group], tokens: int, max_chunk: int | None = None) -> Fraction:
    """Requests of `tokens` tokens each that a pool of `num_blocks` blocks holds at once; see `request_blocks`."""
    return Fraction(require_int("num_blocks", num_blocks), request_blocks(groups, tokens, max_chunk))


def entry_shape(shape: KVShape, groups: Sequence[Group]) -> KVShape:
    """What a block holds under these groups: keys and values of as many layers as the largest group has.

    Args:
        shape: keys and values of the whole model.
        groups: of its layers; see `windows.group_layers`. None at all leave the shape as it is.

    Raises:
        ValueError: some layers are stored otherwise than others, though layers of several groups share blocks.
    """
    places = num_places(groups, shape.layers) if groups else shape.layers
    if places < shape.layers and shape.precise_layers:
        raise ValueError(
            f"precise_layers: expected 0, as layers share blocks under {len(groups)} groups, got {shape.precise_layers}"
        )
    return dataclasses.replace(shape, layers=places)


def grouped_concurrency(
    shape: KVShape, kv_bytes: int, groups: Sequence[Group], tokens: int, max_chunk: int | None = None
) -> Fraction:
    """Requests of `tokens` tokens each that `kv_bytes` hold if blocks that have left a window are taken back.

    Args:
        shape: keys and values of the whole model.
        kv_bytes: for keys and values.
        groups: of its layers, whose blocks hold equally many tokens; see `windows.group_layers`.
        tokens: that a request has stored at its end.
        max_chunk: as for `request_blocks`.
    """
    block_bytes = entry_shape(shape, groups).block_bytes(groups[0].block_size)
    return Fraction(require_int("kv_bytes", kv_bytes), request_blocks(groups, tokens, max_chunk) * block_bytes)


def reserved_concurrency(shape: KVShape, kv_bytes: int, max_tokens: int) -> Fraction:
    """Requests that `kv_bytes` hold when each reserves `max_tokens` slots, whatever it uses."""
    request_bytes = require_int("max_tokens", max_tokens) * shape.token_bytes
    return Fraction(require_int("kv_bytes", kv_bytes), request_bytes)


def packed_requests(sizes: Iterable[int], pool: int) -> int:
    """Requests that a pool holds at once when they are let in by their order, up to the first that does not fit.

    Args:
        sizes: of each request in order, in the unit of `pool`: blocks, page groups or slots. Not read beyond the first
            that does not fit.
        pool: all there is.
    """
    left, requests = require_int("pool", pool, minimum=0), 0
    for size in sizes:
        left -= require_int("sizes", size)
        if left < 0:
            break
        requests += 1
    return requests


@dataclasses.dataclass(frozen=True)
class Waste:
    """Where a pool goes, as exact shares of it that add up to 1."""

    stored: Fraction  # holds a token now
    reservation: Fraction  # empty, and a request that holds it will fill it
    internal: Fraction  # empty, and the request that holds it never fills it
    external: Fraction  # held by no request


def waste_by_kind(*, stored: int, final: int, allocated: int, pool: int | None = None) -> Waste:
    """Splits a pool by what its space is doing, in the terms of the PagedAttention paper (arXiv 2309.06180).

    All four are in one unit, slots or bytes, summed over the running requests.

    Args:
        stored: written so far.
        final: written once every request has ended.
        allocated: handed to requests.
        pool: all there is; `allocated` unless given.

    Raises:
        ValueError: unless stored <= final <= allocated <= pool, and pool is positive.
    """
    pool = allocated if pool is None else pool
    sizes = {"stored": stored, "final": final, "allocated": allocated, "pool": pool}
    for name, size in sizes.items():
        require_int(name, size, minimum=1 if name == "pool" else 0)
    if not stored <= final <= allocated <= pool:
        raise ValueError(f"stored <= final <= allocated <= pool must hold, got {sizes}; count all four in one unit")
    return Waste(
        stored=Fraction(stored, pool),
        reservation=Fraction(final - stored, pool),
        internal=Fraction(allocated - final, pool),
        external=Fraction(pool - allocated, pool),
    )
