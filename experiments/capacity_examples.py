"""Quantities of KV cache capacity that a worked example can expect, and the exact check of each.

Everything is exact arithmetic, so an expectation either holds or does not; each quantity says which way it rounds.
"""

import dataclasses
import math
from collections.abc import Callable, Iterable, Mapping
from fractions import Fraction
from typing import NamedTuple

from experiments.errors import UserError, did_you_mean
from paxkv import capacity
from paxkv.sizes import require_int


@dataclasses.dataclass(frozen=True)
class Example:
    """Inputs, and what must come out. Only the inputs that the expected quantities need are given.

    Exact values are whole numbers, or text that holds a decimal ("34.56") or a ratio ("28672/3").
    """

    name: str
    expect: dict[str, int | str]  # quantity: its exact value
    printed: dict[str, str] = dataclasses.field(default_factory=dict)  # quantity: what sources print instead
    model: str | None = None  # a published shape; or else layers, kv_heads and head_dim
    layers: int | None = None
    kv_heads: int | None = None
    head_dim: int | None = None
    element_bytes: int | str = 2  # 2 for bf16, 1 for fp8 or int8, "1/2" for 4 bits
    scale_bytes_per_token_head: int = 0
    scale_bytes_per_block_head: int = 0
    tensor_parallel: int = 1
    memory: int | str | None = None  # for keys and values on one device, with its unit
    num_blocks: int | None = None  # the pool in blocks, instead of memory
    block_size: int | None = None
    tokens: int | None = None  # of a request when it ends
    mean_tokens: int | None = None  # the same on average
    max_tokens: int | None = None  # reserved for a request, or the length of its row
    page: int | str | None = None  # size of a page, with its unit
    rows: int | None = None

    def __post_init__(self) -> None:
        if not self.expect:
            raise ValueError(f"expect of example {self.name!r} must name a quantity, got none; give its right value")
        for quantity in self.expect:
            if quantity not in QUANTITIES:
                near = did_you_mean(quantity, QUANTITIES)
                raise ValueError(f"example {self.name!r} expects an unknown quantity {quantity!r}{near}")
        if unchecked := sorted(self.printed.keys() - self.expect.keys()):
            raise ValueError(
                f"printed of example {self.name!r} must be about what it expects, got {unchecked}; expect them too"
            )


class Row(NamedTuple):
    """One quantity of one example, checked."""

    example: str
    input: str
    quantity: str
    expected: Fraction
    got: Fraction
    rounding: str
    printed: str  # by sources, where it differs; empty otherwise

    @property
    def ok(self) -> bool:
        """Whether the expectation holds, exactly."""
        return self.got == self.expected


def worked_examples(examples: Iterable[Example]) -> list[Row]:
    """Computes and checks every expected quantity of every example, in order.

    Raises:
      UserError: an input that a quantity needs is missing or wrong; names the example and the input.
    """
    return [_row(example, quantity) for example in examples for quantity in example.expect]


def _row(example: Example, name: str) -> Row:
    quantity = QUANTITIES[name]
    try:
        expected, got = Fraction(example.expect[name]), Fraction(quantity.compute(example))
    except (ValueError, ZeroDivisionError) as error:
        raise UserError(f"example {example.name!r}, {name}: {error}") from error
    return Row(
        example=example.name,
        input=_describe(example),
        quantity=name,
        expected=expected,
        got=got,
        rounding=quantity.rounding,
        printed=example.printed.get(name, ""),
    )


def _describe(example: Example) -> str:
    """The inputs of an example in words, those at their default left out."""
    hidden = ("name", "expect", "printed", "model")
    given = [example.model] if example.model else []
    for field in dataclasses.fields(Example):
        value = getattr(example, field.name)
        if field.name not in hidden and value != field.default:
            given.append(f"{field.name} {value}")
    return ", ".join(given)


def _need(example: Example, name: str) -> int:
    """The named input, which is positive; a size in bytes."""
    value = getattr(example, name)
    if value is None:
        raise ValueError(f"{name} must be given for this quantity, got none; add it to the example")
    return require_int(name, capacity.parse_size(value, name) if isinstance(value, str) else value)


def _shape(example: Example) -> capacity.KVShape:
    if example.model is None:
        shape = capacity.KVShape(
            layers=_need(example, "layers"), kv_heads=_need(example, "kv_heads"), head_dim=_need(example, "head_dim")
        )
    else:
        if (example.layers, example.kv_heads, example.head_dim) != (None, None, None):
            raise ValueError("model must not come with layers, kv_heads or head_dim, got both; give one of them")
        shape = capacity.model_shape(example.model)
    element_bytes = Fraction(example.element_bytes)
    return dataclasses.replace(
        shape,
        element_bytes=element_bytes.numerator if element_bytes.denominator == 1 else element_bytes,
        scale_bytes_per_token_head=example.scale_bytes_per_token_head,
        scale_bytes_per_block_head=example.scale_bytes_per_block_head,
        tensor_parallel=example.tensor_parallel,
    )


def _kv_bytes(example: Example) -> int:
    if example.num_blocks is None:
        return _need(example, "memory")
    if example.memory is not None:
        raise ValueError("num_blocks must not come with memory, got both; give one of them")
    return _need(example, "num_blocks") * _block_bytes(example)


def _block_bytes(example: Example) -> int:
    return _shape(example).block_bytes(_need(example, "block_size"))


def _plan(example: Example) -> capacity.BlockPlan:
    return capacity.plan_blocks(_shape(example), _need(example, "block_size"), _kv_bytes(example))


def _paged(example: Example) -> Fraction:
    tokens, block_size = _need(example, "tokens"), _need(example, "block_size")
    return capacity.paged_concurrency(_shape(example), _kv_bytes(example), tokens, block_size)


def _expected(example: Example) -> Fraction:
    mean_tokens, block_size = _need(example, "mean_tokens"), _need(example, "block_size")
    return capacity.expected_concurrency(_shape(example), _kv_bytes(example), mean_tokens, block_size)


def _reserved(example: Example) -> Fraction:
    return capacity.reserved_concurrency(_shape(example), _kv_bytes(example), _need(example, "max_tokens"))


def _reservation_bytes(example: Example) -> int:
    return _need(example, "max_tokens") * _shape(example).token_bytes


def _request_waste(example: Example) -> capacity.Waste:
    """Of one request that reserved its maximum, when it ends."""
    tokens = _need(example, "tokens")
    return capacity.waste_by_kind(stored=tokens, final=tokens, allocated=_need(example, "max_tokens"))


def _unreserved(example: Example) -> Fraction:
    """Share of the memory that is too small for one more reservation."""
    allocated = math.floor(_reserved(example)) * _reservation_bytes(example)
    return capacity.waste_by_kind(stored=0, final=0, allocated=allocated, pool=_kv_bytes(example)).external


def _blocks(example: Example) -> int:
    return capacity.blocks_for(_need(example, "tokens"), _need(example, "block_size"))


def _slack(example: Example) -> int:
    return capacity.slack_slots(_need(example, "tokens"), _need(example, "block_size"))


def _pages(example: Example) -> capacity.PageGroups:
    return capacity.PageGroups(_shape(example), _need(example, "page"))


def _virtual_bytes(example: Example) -> int:
    return _pages(example).virtual_bytes(_need(example, "rows"), _need(example, "max_tokens"))


class Quantity(NamedTuple):
    """Something an example can expect."""

    meaning: str
    rounding: str
    compute: Callable[[Example], int | Fraction]


QUANTITIES: Mapping[str, Quantity] = {
    "bytes_per_token": Quantity(
        "bytes of a token's keys and values over all layers", "exact", lambda e: _shape(e).token_bytes
    ),
    "bytes_per_block": Quantity("bytes of a block over all layers, with its scales", "exact", _block_bytes),
    "tokens": Quantity("tokens that fit end to end", "floor", lambda e: capacity.tokens_in(_shape(e), _kv_bytes(e))),
    "tokens_exact": Quantity(
        "tokens that fit, last fraction included", "exact", lambda e: Fraction(_kv_bytes(e), _shape(e).token_bytes)
    ),
    "num_blocks": Quantity("blocks that fit", "floor", lambda e: _plan(e).num_blocks),
    "pool_tokens": Quantity("slots of the blocks that fit", "floor to whole blocks", lambda e: _plan(e).num_slots),
    "blocks_per_request": Quantity("blocks of one request", "ceil", _blocks),
    "slack_slots": Quantity("empty slots in the last block of a request", "exact", _slack),
    "paged_requests": Quantity("requests that fit, in whole blocks each", "floor", lambda e: math.floor(_paged(e))),
    "paged_requests_exact": Quantity("requests that fit, last fraction included", "exact", _paged),
    "expected_requests": Quantity(
        "requests that fit when lengths vary around a mean", "floor", lambda e: math.floor(_expected(e))
    ),
    "reserved_requests": Quantity(
        "requests that fit when each reserves the maximum", "floor", lambda e: math.floor(_reserved(e))
    ),
    "reserved_requests_exact": Quantity("reserving requests that fit, last fraction included", "exact", _reserved),
    "paged_over_reserved": Quantity(
        "paged per reserving request, last fractions included", "exact", lambda e: _paged(e) / _reserved(e)
    ),
    "reservation_bytes": Quantity("bytes that one request reserves", "exact", _reservation_bytes),
    "internal_waste": Quantity(
        "share of a reservation that is never used", "exact", lambda e: _request_waste(e).internal
    ),
    "external_waste": Quantity("share of memory too small for one more reservation", "exact", _unreserved),
    "tokens_per_page": Quantity("whole tokens in a page", "floor", lambda e: _pages(e).tokens_per_page),
    "page_group_bytes": Quantity("bytes of one page in each tensor", "exact", lambda e: _pages(e).group_bytes),
    "worst_waste_bytes": Quantity(
        "most bytes that a request maps and does not use", "exact", lambda e: _pages(e).worst_waste_bytes
    ),
    "row_stride_bytes": Quantity(
        "virtual bytes from row to row of one tensor",
        "ceil to whole pages",
        lambda e: _pages(e).row_stride_bytes(_need(e, "max_tokens")),
    ),
    "virtual_bytes": Quantity("virtual bytes of all tensors", "ceil to whole pages", _virtual_bytes),
}
