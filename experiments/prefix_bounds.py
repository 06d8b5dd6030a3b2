"""What any prefix cache can reach on a finished sequence of prompts: everything is kept, or the future is known.

Plain Python over whole prefixes as dictionary keys: nothing here knows of hashes, free lists or policies.
"""

import heapq
import math
from collections.abc import Sequence

from experiments.prefix_prompts import Prompts

Chains = Sequence[Sequence[int]]
"""Per prompt, an id for each of its whole blocks; equal ids exactly where block and all before it are equal."""


def block_chains(prompts: Prompts, block_size: int) -> list[list[int]]:
    """Names the whole blocks of each prompt by what they and all blocks before them hold; ids count from 1."""
    ids: dict[tuple[int, bytes], int] = {}
    chains: list[list[int]] = []
    for tokens in prompts.tokens():
        block = 0
        chain = []
        for start in range(0, len(tokens) - block_size + 1, block_size):
            block = ids.setdefault((block, tokens[start : start + block_size].tobytes()), len(ids) + 1)
            chain.append(block)
        chains.append(chain)
    return chains


def unbounded_hits(chains: Chains, lookups: Sequence[int]) -> list[int]:
    """Blocks of each prompt that a cache which forgets nothing has when the prompt arrives.

    Args:
      chains: the prompts' blocks.
      lookups: blocks of each prompt that are looked up, from its first; the others are stored only.
    """
    stored: set[int] = set()
    hits: list[int] = []
    for chain, looked_up in zip(chains, lookups, strict=True):
        hits.append(next((n for n, block in enumerate(chain[:looked_up]) if block not in stored), looked_up))
        stored.update(chain)
    return hits


def optimal_hits(chains: Chains, lookups: Sequence[int], capacity_blocks: int) -> int:
    """Most blocks that any cache of `capacity_blocks` blocks could hit, were the future known.

    Belady's MIN (IBM Systems Journal 5(2), 1966) with bypass: a block that is needed later than all that is kept is
    not kept at all. It holds for caches that need not keep a prefix to use what follows it and that have no memory in
    use by running requests, so a prefix cache can come close to it but never above. O(n log n) in all blocks asked.

    Args:
      chains: the prompts' blocks, each prompt's in order.
      lookups: blocks of each prompt that are looked up, from its first; the others are stored only.
      capacity_blocks: blocks that the cache holds at a time.
    """
    accesses = [
        (block, n < looked_up)
        for chain, looked_up in zip(chains, lookups, strict=True)
        for n, block in enumerate(chain)
    ]
    next_use: list[float] = [math.inf] * len(accesses)
    later: dict[int, int] = {}
    for time in range(len(accesses) - 1, -1, -1):
        block, counts = accesses[time]
        next_use[time] = later.get(block, math.inf)
        if counts:
            later[block] = time

    kept: dict[int, float] = {}  # block -> when it is looked up next
    farthest: list[tuple[float, int]] = []  # a heap of (-next use, block), outdated entries included
    hits = 0
    for (block, counts), use in zip(accesses, next_use, strict=True):
        hits += counts and block in kept
        if use == math.inf:
            kept.pop(block, None)
            continue
        kept[block] = use
        heapq.heappush(farthest, (-use, block))
        while len(kept) > capacity_blocks:
            use, block = heapq.heappop(farthest)
            if kept.get(block) == -use:
                del kept[block]
    return hits
