"""The knobs of a memory, and the one function that makes a memory of them."""

import dataclasses
from collections.abc import Sequence
from typing import Any, Literal, get_args

from paxkv.capacity import entry_shape
from paxkv.contiguous import VAttention
from paxkv.memory import KVMemory
from paxkv.model_shapes import KVShape
from paxkv.page_groups import PageGroups
from paxkv.paged import FreeOrder, Paged
from paxkv.prefix_cache import Duplicates, Eviction, PrefixCache, Publish
from paxkv.reserved import Reserved
from paxkv.sizes import parse_fraction, parse_size, require_int
from paxkv.windows import group_layers

MemoryKind = Literal["paged", "vattention", "reserved_max", "reserved_pow2", "reserved_oracle"]


@dataclasses.dataclass(frozen=True)
class MemoryConfig:
    """One way to hand out the KV cache. A knob that its kind does not have must keep its default.

    Attributes:
      kind: which memory.
      block_size: paged: tokens in a block.
      num_blocks: paged: this many blocks instead of what the budget pays for; None for the budget.
      free_order: paged: `recent_first` takes the block that was freed last, and cached ones after all others; `fifo`
        takes the one that has been free for longest.
      lookahead: paged: slots that a growing sequence gets beyond the tokens of a step.
      free_windows: paged: take back the blocks that have left the window of all layers that shared them, if the model
        has layers with one.
      forks: paged: let sequences of one prompt share its blocks; samples and beams need it.
      swap_space: paged: size of the pool on the host to which the scheduler may swap, such as "4 GiB".
      prefix_caching: paged: find the keys and values of prompts that begin alike.
      publish: paged with prefix caching: let blocks be hit as soon as they are scheduled, or once they are computed.
      duplicates: paged with prefix caching: keep equal blocks, or merge them.
      eviction: paged with prefix caching: which cached block goes first: `lru`, `lfu`, `fifo` or `priority`.
      explain_misses: paged with prefix caching: also count why tokens were not hit.
      watermark: paged, vattention: share of the memory kept back from admissions while anything runs, as decimal text.
      page: vattention: size of a physical page, such as "64 KiB" or "2 MiB".
      lookahead_steps: vattention: how many steps ahead the background maps; 0 for no mapping in the background.
      background_groups: vattention: most page groups that a step maps ahead of need.
      deferred_reclaim: vattention: leave the groups of an ended request mapped for the next one.
      min_block: reserved: smallest range of the buddy allocator in tokens, a power of two.
    """

    kind: MemoryKind = "paged"
    block_size: int = 16
    num_blocks: int | None = None
    free_order: FreeOrder = "recent_first"
    lookahead: int = 0
    free_windows: bool = True
    forks: bool = False
    swap_space: str = "0 GiB"
    prefix_caching: bool = False
    publish: Publish = "on_schedule"
    duplicates: Duplicates = "keep"
    eviction: Eviction = "lru"
    explain_misses: bool = False
    watermark: str = "0"
    page: str = "2 MiB"
    lookahead_steps: int = 10
    background_groups: int = 2
    deferred_reclaim: bool = True
    min_block: int = 1


_CACHE_KNOBS = ("publish", "duplicates", "eviction", "explain_misses")
_KNOBS: dict[str, tuple[str, ...]] = {
    "paged": (
        "block_size",
        "num_blocks",
        "watermark",
        "free_order",
        "lookahead",
        "free_windows",
        "forks",
        "swap_space",
        "prefix_caching",
        *_CACHE_KNOBS,
    ),
    "vattention": ("page", "watermark", "lookahead_steps", "background_groups", "deferred_reclaim"),
    "reserved_max": ("min_block",),
    "reserved_pow2": ("min_block",),
    "reserved_oracle": ("min_block",),
}


def make_memory(
    config: MemoryConfig,
    shape: KVShape,
    budget_bytes: int,
    rows: int,
    max_len: int,
    *,
    kv_format: str = "f32",
    windows: Sequence[int | None] = (),
    max_chunk: int | None = None,
) -> KVMemory[Any]:
    """The memory that `budget_bytes` pay for.

    Args:
      config: which memory, and its knobs.
      shape: keys and values of the model on one device.
      budget_bytes: bytes for keys and values, of which what each row keeps beside the blocks is taken first. What does
        not fill a whole unit of the memory is left unused.
      rows: most sequences in flight.
      max_len: most tokens of one sequence.
      kv_format: name of the format in which keys and values are stored; a prefix cache never hits those of another.
      windows: of each layer, the tokens that it sees; None for all. Empty if all layers see all.
      max_chunk: most tokens that a sequence computes in a step, which bounds what it holds under a window.

    Raises:
      ValueError: a knob is out of range or belongs to another kind, or the budget does not pay for one unit.
    """
    _refuse_foreign_knobs(config)
    budget_bytes -= rows * shape.row_bytes
    match config.kind:
        case "paged":
            groups = group_layers(windows, require_int("block_size", config.block_size)) if config.free_windows else ()
            block_bytes = entry_shape(shape, groups).block_bytes(config.block_size)
            num_blocks = config.num_blocks
            if num_blocks is None:
                num_blocks = _units("block", budget_bytes, block_bytes)
            return Paged(
                rows=rows,
                max_len=max_len,
                block_size=config.block_size,
                num_blocks=num_blocks,
                watermark_blocks=_watermark(config, num_blocks),
                free_order=config.free_order,
                cache=_prefix_cache(config, kv_format),
                lookahead=config.lookahead,
                forks=config.forks,
                groups=groups,
                max_chunk=max_chunk if groups else None,
                host_blocks=parse_size(config.swap_space, "swap_space") // block_bytes,
            )
        case "vattention":
            pages = PageGroups(shape, parse_size(config.page, "page"))
            num_groups = _units("page group", budget_bytes, pages.group_bytes)
            return VAttention(
                rows=rows,
                max_len=max_len,
                num_groups=num_groups,
                page_bytes=pages.page_bytes,
                token_bytes=shape.tensor_token_bytes,
                buffers=pages.num_tensors,
                lookahead_steps=config.lookahead_steps,
                background_groups=config.background_groups,
                deferred_reclaim=config.deferred_reclaim,
                watermark_groups=_watermark(config, num_groups),
            )
        case "reserved_max" | "reserved_pow2" | "reserved_oracle":
            min_block = require_int("min_block", config.min_block)
            leaves = _units("smallest range", budget_bytes, shape.token_bytes * min_block)
            return Reserved(
                rows=rows,
                max_len=max_len,
                num_slots=leaves * min_block,
                policy=config.kind.removeprefix("reserved_"),  # pyright: ignore[reportArgumentType]
                min_block=min_block,
            )
    raise ValueError(f"kind: expected one of {', '.join(get_args(MemoryKind))}, got {config.kind!r}")


def _prefix_cache(config: MemoryConfig, kv_format: str) -> PrefixCache | None:
    if config.prefix_caching:
        return PrefixCache(
            publish=config.publish,
            duplicates=config.duplicates,
            eviction=config.eviction,
            kv_format=kv_format,
            explain=config.explain_misses,
        )
    default = MemoryConfig()
    for name in _CACHE_KNOBS:
        if getattr(config, name) != getattr(default, name):
            raise ValueError(
                f"{name}: expected its default without a prefix cache, got {getattr(config, name)!r}; set "
                "prefix_caching: true"
            )
    return None


def _units(name: str, budget_bytes: int, unit_bytes: int) -> int:
    if budget_bytes < unit_bytes:
        raise ValueError(
            f"budget_bytes: expected at least {unit_bytes}, one {name}, got {budget_bytes}; use more memory, or make "
            f"the {name} smaller"
        )
    return budget_bytes // unit_bytes


def _watermark(config: MemoryConfig, num_units: int) -> int:
    """Units kept back, rounded down as vLLM does."""
    if config.watermark == "0":
        return 0
    return int(parse_fraction(config.watermark, "watermark") * num_units)


def _refuse_foreign_knobs(config: MemoryConfig) -> None:
    """A knob that does nothing would make two configs that differ mean the same."""
    default = MemoryConfig()
    for field in dataclasses.fields(config):
        changed = getattr(config, field.name) != getattr(default, field.name)
        if field.name != "kind" and changed and field.name not in _KNOBS.get(config.kind, (field.name,)):
            raise ValueError(
                f"{field.name}: expected its default for memory of kind {config.kind!r}, which has no such knob, got "
                f"{getattr(config, field.name)!r}; {config.kind} has {', '.join(_KNOBS[config.kind])}"
            )
