"""Admission to paged memory: what of a prompt is cached, and how a new row takes it over."""

import dataclasses
from typing import TYPE_CHECKING, NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Int32, UInt32

from paxkv import chains, prefix_cache
from paxkv.block_pool import is_free, retain
from paxkv.block_tables import begin_row
from paxkv.cache_stats import MissedBlocks, count_admission
from paxkv.chain_hash import prefix_hashes, seed
from paxkv.memory import Content
from paxkv.paged_state import PagedState, required
from paxkv.prefix_cache import Found, PrefixCache

if TYPE_CHECKING:
    from paxkv.paged import Paged


class Hit(NamedTuple):
    """The longest beginning of a prompt that every group of layers has cached."""

    tokens: Int32[Array, ""]
    blocks: tuple[Int32[Array, " n"], ...]  # by group; the sentinel beyond the hit, and before the window
    first: Int32[Array, " groups"]  # blocks at the beginning that have left the window
    end: Int32[Array, " groups"]
    contents: Int32[Array, " groups"]  # of the last block
    free: Int32[Array, ""]  # blocks of the hit that nobody refers to now, so that they count as available
    hash_: UInt32[Array, " 2"]  # of the tokens
    missed: MissedBlocks  # of the first group


def identity_of(content: Content, epoch: Int32[Array, ""]) -> Int32[Array, " 3"]:
    """What must agree, beside the tokens, for keys and values to be the same."""
    return jnp.stack([content.adapter, content.salt, epoch])


def no_hit(groups: int) -> Hit:
    """Nothing is cached, and nothing was asked."""
    nothing = jnp.zeros(0, jnp.bool)
    zeros = jnp.zeros(groups, jnp.int32)
    return Hit(
        tokens=jnp.int32(0),
        blocks=tuple(jnp.zeros(0, jnp.int32) for _ in range(groups)),
        first=zeros,
        end=zeros,
        contents=zeros,
        free=jnp.int32(0),
        hash_=jnp.zeros(2, jnp.uint32),
        missed=MissedBlocks(nothing, nothing, nothing),
    )


def look_up(memory: "Paged", state: PagedState, content: Content, known_tokens: Int32[Array, ""]) -> Hit:
    """What of a prompt's first `known_tokens - 1` tokens is cached: the last one must be computed in any case."""
    config = required(memory.cache)
    contents = required(state.contents)
    groups, none = memory.layer_groups, memory.num_blocks
    widest = max(group.block_size for group in groups)
    if content.tokens.shape[0] < widest:  # nothing can be hit, but what follows has a block to look at
        content = content._replace(tokens=jnp.pad(content.tokens, (0, widest - content.tokens.shape[0])))
    start = seed(content.adapter, content.salt, state.epoch, config.kv_format)
    most = jnp.where(content.lookup, jnp.maximum(known_tokens - 1, 0), 0)

    hashes, found = [], []
    for g, group in enumerate(groups):
        size = group.block_size
        count = content.tokens.shape[0] // size
        hashes.append(prefix_hashes(content.tokens, start, size))
        found.append(
            prefix_cache.find(
                contents,
                config.keys(hashes[g], g),
                content.tokens[: count * size].reshape(count, size),
                identity_of(content, state.epoch),
                chains.root_of(g),
                jnp.minimum(most // size, count),
            )
        )
    tokens = _longest(memory, found, most)

    blocks, last, firsts, ends, free = [], [], [], [], jnp.int32(0)
    for g, group in enumerate(groups):
        size = group.block_size
        end, first = tokens // size, group.out_of_view(tokens) // size
        column = jnp.arange(found[g].blocks.shape[0], dtype=jnp.int32)
        ids = jnp.where((column >= first) & (column < end), found[g].blocks, none)
        free += jnp.sum(is_free(state.pool, ids), dtype=jnp.int32)
        before = found[g].contents.at[jnp.maximum(end - 1, 0)].get(mode="fill", fill_value=0)
        # Under a chunk the hit may lie wholly outside the view: what follows continues nothing that is known.
        last.append(jnp.where(end == 0, chains.root_of(g), jnp.where(end > first, before, prefix_cache.DETACHED)))
        blocks.append(ids)
        firsts.append(first)
        ends.append(end)
    end = ends[0]
    at_end = hashes[0].at[jnp.maximum(end - 1, 0)].get(mode="fill", fill_value=0)
    return Hit(
        tokens=tokens,
        blocks=tuple(blocks),
        first=jnp.stack(firsts),
        end=jnp.stack(ends),
        contents=jnp.stack(last),
        free=free,
        hash_=jnp.where(end > 0, at_end, start),
        missed=_missed(config, contents, hashes[0], start, found[0]),
    )


def _longest(memory: "Paged", found: list[Found], most: Int32[Array, ""]) -> Int32[Array, ""]:
    """The longest prefix, in tokens, after which every group can go on."""
    groups = memory.layer_groups
    if len(groups) == 1 and groups[0].sees_all:
        return found[0].hits * groups[0].block_size
    aligned = memory.alignment
    counts = min(f.blocks.shape[0] * g.block_size for f, g in zip(found, groups, strict=True)) // aligned + 1
    lengths = jnp.arange(counts, dtype=jnp.int32) * aligned
    good = lengths <= most
    for f, group in zip(found, groups, strict=True):
        good &= group.can_continue(f.present, f.linked, f.hits)[lengths // group.block_size]
    return jnp.max(jnp.where(good, lengths, 0))


def _missed(
    config: PrefixCache,
    contents: prefix_cache.Contents,
    hashes: UInt32[Array, "n 2"],
    start: UInt32[Array, " 2"],
    found: Found,
) -> MissedBlocks:
    if not config.explain:
        unknown = jnp.zeros_like(found.present)
        return MissedBlocks(found.present, unknown, unknown)
    return MissedBlocks(
        cached=found.present,
        was_cached=prefix_cache.remembers(contents.evicted_tags, config.keys(hashes, 0)),
        known=prefix_cache.remembers(contents.known_tags, config.keys(hashes - start[None, :], 0)),
    )


def adopt(
    memory: "Paged", state: PagedState, row: Int32[Array, ""], content: Content, tokens: Int32[Array, ""], hit: Hit
) -> PagedState:
    """Lets `row` begin with what was hit, and counts it; nothing happens if `row` is out of range."""
    config = required(memory.cache)
    contents, pool, none = required(state.contents), state.pool, memory.num_blocks
    ok = row < memory.rows
    tables = []
    for g, table in enumerate(state.tables):
        ids = jnp.where(ok, hit.blocks[g], none)
        pool = retain(pool, ids, distinct=True)
        contents = prefix_cache.touch(config, contents, ids, content.priority)
        tables.append(begin_row(table, row, ids, hit.first[g], hit.end[g], none))
    chain = chains.start_chain(
        required(state.chains),
        row,
        content.tokens,
        hit.tokens,
        hit.hash_,
        hit.contents,
        identity_of(content, state.epoch),
        content.priority,
    )
    stats = count_admission(
        required(state.stats),
        tokens,
        hit.tokens,
        content.resumed,
        memory.layer_groups[0].block_size,
        hit.missed,
        ok & content.lookup,
        groups=len(memory.layer_groups),
    )
    return dataclasses.replace(state, pool=pool, tables=tuple(tables), contents=contents, chains=chain, stats=stats)
