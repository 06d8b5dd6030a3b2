"""The state of paged memory."""

import dataclasses
import typing
from typing import TypeVar

import jax

from paxkv.block_pool import BlockPool
from paxkv.block_tables import BlockTable
from paxkv.cache_stats import CacheStats
from paxkv.chains import Chains
from paxkv.memory import Limits
from paxkv.prefix_cache import Contents
from paxkv.seqs import Seqs
from paxkv.sharing import Copies
from paxkv.swap_state import SwapState


@typing.no_type_check
@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class PagedState:
    """Who owns which block, and what the blocks hold."""

    seqs: Seqs
    pool: BlockPool
    tables: tuple[BlockTable, ...]  # one for each group of layers
    limits: Limits
    epoch: jax.Array  # i32[]; of the weights
    contents: Contents | None = None  # with a prefix cache
    chains: Chains | None = None  # with a prefix cache
    stats: CacheStats | None = None  # with a prefix cache
    pins: jax.Array | None = None  # i32[num_blocks]; references that pins hold; with a prefix cache
    copies: Copies | None = None  # with forks
    swap: SwapState | None = None  # with host blocks


Part = TypeVar("Part")


def required(part: Part | None) -> Part:
    """A part of the state that only some memories have.

    Raises:
      ValueError: this one has not.
    """
    if part is None:
        raise ValueError(
            "state: this needs memory with a prefix cache, forks or host blocks, got one without; see the attributes "
            "cache, forks and host_blocks of Paged"
        )
    return part
