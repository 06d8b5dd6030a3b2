"""The block manager in plain Python: what each operation does to each block, one block after another.

This is the specification in code, so it is written to be read: lists, loops, searches from the start, no arrays, no
hashes. A prefix is known by its tokens and by the content before it, never by a number computed from them.
"""

import math
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field

from tests.paxkv.oracles.common import DOUBLE_FREE, LATER, NEVER, OK, OUT_OF_BLOCKS, OUT_OF_RANGE

COPIES_PENDING = 6
SAME_KEY_CAPACITY = 16  # blocks under one hash key: two buckets of eight


@dataclass(frozen=True)
class Knobs:
    """What is fixed for the life of a memory."""

    rows: int
    max_len: int
    block_size: int
    num_blocks: int
    watermark_blocks: int = 0
    free_order: str = "recent_first"  # or "fifo"
    lookahead: int = 0  # slots kept beyond the tokens stored
    sliding: int | None = None  # a token attends to this many tokens, itself included
    chunked: int | None = None  # a token attends to its own chunk of so many tokens
    cache: bool = True
    duplicates: str = "keep"  # or "merge"
    eviction: str = "lru"  # or "lfu", "fifo", "priority"
    hash: str = "mixed"  # or "constant": every key collides


@dataclass(frozen=True, eq=False)
class Content:
    """What a full block holds. It is the same content only as long as a block holds it: once gone, never back."""

    parent: "Content | None"
    tokens: tuple[int, ...]
    identity: tuple[int, int, int]  # adapter, salt, weight epoch

    def path(self) -> tuple:
        """Everything that a key and value in this block depend on."""
        before = self.parent.path() if self.parent else (self.identity,)
        return (*before, self.tokens)


@dataclass
class Block:
    tables: int = 0  # table entries that name it
    pins: int = 0
    copies: int = 0  # ends of pending copies
    content: Content | None = None
    uses: int = 0  # times it was published or hit
    published: int = 0  # when it was published
    priority: int = 0  # of the request that published or hit it last

    @property
    def references(self) -> int:
        return self.tables + self.pins + self.copies


@dataclass
class Row:
    promised: int
    identity: tuple[int, int, int]
    priority: int
    length: int = 0
    table: list[int | None] = field(default_factory=list)  # None where the block left the window
    tokens: list[int] = field(default_factory=list)  # as far as they are known here
    chain: list[Content] = field(default_factory=list)  # of its full blocks, as far as they were published
    publishes: bool = True


@dataclass
class Request:
    """The prompt as a cache sees it."""

    tokens: list[int]
    adapter: int = 0
    salt: int = 0
    resumed: bool = False
    lookup: bool = True
    priority: int = 0


@dataclass
class Statistics:
    queries: int = 0
    hits: int = 0
    resumed_queries: int = 0
    resumed_hits: int = 0
    unpublished: int = 0
    evictions: int = 0


def first_of(copies: list[int], depth: int) -> int:
    """The choice among copies of one content when nobody has a better idea."""
    return copies[0]


class BlockManager:
    def __init__(self, knobs: Knobs):
        self.knobs = knobs
        self.blocks = [Block() for _ in range(knobs.num_blocks)]
        self.free: deque[int] = deque(range(knobs.num_blocks))
        self.rows: list[Row | None] = [None] * knobs.rows
        self.copies: list[tuple[int, int]] = []  # source, destination
        self.epoch = 0
        self.publications = 0
        self.statistics = Statistics()
        self.faults: set[int] = set()
        self.fault_row = knobs.rows

    # ---- small questions -------------------------------------------------------------------------------------------

    def blocks_for(self, tokens: int) -> int:
        return math.ceil(tokens / self.knobs.block_size)

    def length(self, row: int) -> int:
        state = self.rows[row]
        return state.length if state else 0

    def table(self, row: int) -> list[int | None]:
        state = self.rows[row]
        return state.table if state else []

    def is_live(self, row: int) -> bool:
        return self.rows[row] is not None

    def skipped(self, length: int) -> int:
        """Of `length` stored tokens, how many the next token does not attend to."""
        if self.knobs.sliding is not None:
            return max(0, length - self.knobs.sliding + 1)
        if self.knobs.chunked is not None:
            return length // self.knobs.chunked * self.knobs.chunked
        return 0

    def holders(self, content: Content) -> list[int]:
        return [b for b, block in enumerate(self.blocks) if block.content is content]

    def find(self, parent: Content | None, tokens: list[int], identity: tuple[int, int, int]) -> Content | None:
        """The content that a block would have with these tokens, if any block has it."""
        for block in self.blocks:
            content = block.content
            if content and (content.parent, content.tokens, content.identity) == (parent, tuple(tokens), identity):
                return content
        return None

    def span(self, tokens: list[int], index: int) -> list[int]:
        """The tokens of the logical block `index`."""
        return tokens[index * self.knobs.block_size : (index + 1) * self.knobs.block_size]

    def fault(self, outcome: int, row: int) -> int:
        self.faults.add(outcome)
        if self.fault_row == self.knobs.rows:
            self.fault_row = row
        return outcome

    # ---- the queue of free blocks ----------------------------------------------------------------------------------

    def next_to_take(self) -> int:
        policy = self.knobs.eviction
        if policy == "lru":
            return self.free[0]
        for block in self.free:
            if self.blocks[block].content is None:
                return block
        rank = {"lfu": "uses", "fifo": "published", "priority": "priority"}[policy]
        return min(self.free, key=lambda block: getattr(self.blocks[block], rank))  # the first of the lowest

    def take(self) -> int:
        block = self.next_to_take()
        self.free.remove(block)
        if self.blocks[block].content:
            self.blocks[block].content = None
            self.statistics.evictions += 1
        return block

    def touch(self, block: int, priority: int) -> None:
        """A hit: the block leaves the queue, wherever it stands."""
        if block in self.free:
            self.free.remove(block)
        self.blocks[block].uses += 1
        self.blocks[block].priority = priority

    def set_free(self, blocks: list[int]) -> None:
        """Those that nobody refers to any more join the queue, in this order, at one end or the other."""
        free = [b for b in blocks if self.blocks[b].references == 0]
        if self.knobs.free_order == "fifo":
            self.free.extend(free)
            return
        self.free.extend(b for b in free if self.blocks[b].content)
        self.free.extendleft(b for b in reversed(free) if not self.blocks[b].content)

    # ---- requests come and go --------------------------------------------------------------------------------------

    def lookup(self, request: Request, known: int, choose: Callable = first_of) -> tuple[list[int], list[Content]]:
        """Blocks with the first tokens of a request, never the last token, up to the first one that is missing."""
        hits, chain = [], []
        if not (self.knobs.cache and request.lookup):
            return hits, chain
        identity = (request.adapter, request.salt, self.epoch)
        for index in range((known - 1) // self.knobs.block_size):
            content = self.find(chain[-1] if chain else None, self.span(request.tokens, index), identity)
            if content is None:
                break
            hits.append(choose(self.holders(content), index))
            chain.append(content)
        return hits, chain

    def owed(self) -> int:
        """Blocks that were promised to the rows and that they have not taken."""
        return sum(max(0, self.blocks_for(row.promised) - len(row.table)) for row in self.rows if row)

    def admit(
        self,
        known: int,
        prompt: int,
        final: int,
        request: Request | None = None,
        choose: Callable = first_of,
    ) -> tuple[int, int]:
        request = request or Request([], lookup=False)
        most = max(known, final)
        if most > self.knobs.max_len or self.blocks_for(most) > self.knobs.num_blocks:
            return self.knobs.rows, NEVER
        hits, chain = self.lookup(request, known, choose)
        need = self.blocks_for(known) - len(hits) + sum(1 for block in hits if block in self.free)
        watermark = self.knobs.watermark_blocks if any(self.rows) else 0
        if None not in self.rows or need + self.owed() + watermark > len(self.free):
            return self.knobs.rows, LATER

        row = self.rows.index(None)
        length = len(hits) * self.knobs.block_size
        self.rows[row] = Row(
            promised=known,
            identity=(request.adapter, request.salt, self.epoch),
            priority=request.priority,
            length=length,
            table=list(hits),
            tokens=list(request.tokens[:length]),
            chain=chain,
        )
        for block in hits:
            self.touch(block, request.priority)
            self.blocks[block].tables += 1
        self.count_query(request, known, length)
        return row, OK

    def count_query(self, request: Request, known: int, hit: int) -> None:
        if not (self.knobs.cache and request.lookup):
            return
        if request.resumed:
            self.statistics.resumed_queries += known
            self.statistics.resumed_hits += hit
        else:
            self.statistics.queries += known
            self.statistics.hits += hit

    def release(self, mask: list[bool]) -> None:
        for row in range(self.knobs.rows):
            if not mask[row]:
                continue
            if not self.is_live(row):
                self.fault(DOUBLE_FREE, row)
                continue
            blocks = [block for block in reversed(self.table(row)) if block is not None]
            self.rows[row] = None
            for block in blocks:
                self.blocks[block].tables -= 1
            self.set_free(blocks)

    # ---- growth ----------------------------------------------------------------------------------------------------

    def leaving(self, row: int) -> list[int]:
        """Blocks of a row that its next token does not attend to, last one first."""
        gone = self.skipped(self.length(row)) // self.knobs.block_size
        return [block for block in reversed(self.table(row)[:gone]) if block is not None]

    def growth(self, row: int, new_length: int) -> int:
        room = min(new_length + self.knobs.lookahead, self.knobs.max_len)
        return max(0, self.blocks_for(room) - len(self.table(row)))

    def half_full(self, row: int) -> int | None:
        """The block that the next token of a row is written to, if it holds tokens already."""
        length = self.length(row)
        return self.table(row)[length // self.knobs.block_size] if length % self.knobs.block_size else None

    def copying_rows(self, growing: list[int]) -> list[int]:
        """Rows that must not write to their last block: others read it, or may come to.

        If all who share a block write to it now, the last of them keeps it. Nobody writes to a block with content.
        """
        copying = []
        for row in growing:
            block = self.half_full(row)
            if block is None:
                continue
            writers = [r for r in growing if self.half_full(r) == block]
            others = self.blocks[block].references - len(writers)
            keeps = row == writers[-1] and others == 0 and self.blocks[block].content is None
            if not keeps:
                copying.append(row)
        return copying

    def append(self, counts: list[int], max_new_tokens: int) -> int:
        if self.copies and any(counts):
            return self.fault(COPIES_PENDING, next(row for row, count in enumerate(counts) if count))
        for row, count in enumerate(counts):
            too_long = count > (self.knobs.max_len - self.length(row) if self.is_live(row) else 0)
            if not 0 <= count <= max_new_tokens or too_long:
                return self.fault(OUT_OF_RANGE, row)

        growing = [row for row, count in enumerate(counts) if count > 0]
        copying = self.copying_rows(growing)
        leaving = {row: self.leaving(row) for row in growing}
        gone = Counter(block for blocks in leaving.values() for block in blocks)
        room = len(self.free) + sum(1 for block, times in gone.items() if times == self.blocks[block].references)
        if len(copying) + sum(self.growth(row, self.length(row) + counts[row]) for row in growing) > room:
            return self.fault(OUT_OF_BLOCKS, growing[0])

        for row, blocks in leaving.items():
            self.rows[row].table = [None if block in blocks else block for block in self.table(row)]
            for block in blocks:
                self.blocks[block].tables -= 1
            self.set_free(blocks)
        for row in growing:
            if row in copying:
                self.copy(row)
            for _ in range(self.growth(row, self.length(row) + counts[row])):
                block = self.take()
                self.blocks[block].tables += 1
                self.rows[row].table.append(block)
        for row in growing:
            self.rows[row].length += counts[row]
        return OK

    def copy(self, row: int) -> None:
        """The row goes on in a block of its own. Neither end may be taken or written until the data was copied."""
        source, destination = self.half_full(row), self.take()
        self.rows[row].table[self.length(row) // self.knobs.block_size] = destination
        self.blocks[source].tables -= 1
        self.blocks[destination].tables += 1
        for block in (source, destination):
            self.blocks[block].copies += 1
        self.copies.append((source, destination))

    def copies_done(self) -> None:
        ends = [block for pair in self.copies for block in pair]
        self.copies = []
        for block in ends:
            self.blocks[block].copies -= 1
        self.set_free(list(dict.fromkeys(ends)))

    # ---- contents --------------------------------------------------------------------------------------------------

    def publish(self, tokens: list[list[int]]) -> None:
        """Row by row, the newest tokens that were appended; every block that is full now gets a content."""
        for row, new in enumerate(tokens):
            if not new:
                continue
            state = self.rows[row]
            state.tokens += new
            given_up = []
            while state.publishes and len(state.chain) < len(state.tokens) // self.knobs.block_size:
                given_up += self.publish_next(state)
            self.set_free(given_up[::-1])

    def publish_next(self, row: Row) -> list[int]:
        """Publishes one more block of a row; returns the block that it does not need any more."""
        index = len(row.chain)
        own = row.table[index]
        parent = row.chain[-1] if row.chain else None
        span = self.span(row.tokens, index)
        content = self.find(parent, span, row.identity)
        if own is not None and self.blocks[own].content:
            row.chain.append(self.blocks[own].content)
            return []
        if content and self.knobs.duplicates == "merge":
            kept = self.holders(content)[0]
            self.touch(kept, row.priority)
            self.blocks[kept].tables += 1
            self.blocks[own].tables -= 1
            row.table[index] = kept
            row.chain.append(content)
            return [own]
        if self.knobs.hash == "constant" and sum(1 for b in self.blocks if b.content) >= SAME_KEY_CAPACITY:
            row.publishes = False
            self.statistics.unpublished += 1
            return []
        content = content or Content(parent, tuple(span), row.identity)
        row.chain.append(content)
        if own is not None:
            self.publications += 1
            block = self.blocks[own]
            block.content, block.uses, block.published, block.priority = content, 1, self.publications, row.priority
        return []

    def evict(self, ids: list[int]) -> None:
        """Forgets what these blocks hold, wherever they are."""
        for block in ids:
            if 0 <= block < self.knobs.num_blocks:
                self.blocks[block].content = None

    def bump_epoch(self) -> None:
        """The weights changed: nothing that is cached now fits a request that comes later."""
        self.epoch += 1

    def reset_cache(self) -> bool:
        if any(block.references for block in self.blocks):
            return False
        for block in self.blocks:
            block.content = None
        return True

    # ---- sharing ---------------------------------------------------------------------------------------------------

    def fork(self, row: int, length: int) -> tuple[int, int]:
        """Another row with the first `length` tokens of this one, in the same blocks."""
        none = self.knobs.rows
        if not (0 <= row < none and self.is_live(row) and 0 <= length <= self.length(row)):
            return none, self.fault(OUT_OF_RANGE, row)
        if None not in self.rows:
            return none, LATER
        child, parent = self.rows.index(None), self.rows[row]
        self.rows[child] = Row(
            promised=length,
            identity=parent.identity,
            priority=parent.priority,
            length=length,
            table=parent.table[: self.blocks_for(length)],
            tokens=parent.tokens[:length],
            chain=parent.chain[: length // self.knobs.block_size],
            publishes=parent.publishes,
        )
        for block in self.table(child):
            if block is not None:
                self.blocks[block].tables += 1
        return child, OK

    def pin(self, ids: list[int]) -> int:
        """One more reference to each block, so that it stays; only what is held or cached is worth a pin."""
        for block in ids:
            if not 0 <= block < self.knobs.num_blocks:
                return self.fault(OUT_OF_RANGE, self.knobs.rows)
            if self.blocks[block].references == 0 and self.blocks[block].content is None:
                return self.fault(OUT_OF_RANGE, self.knobs.rows)
        for block in ids:
            if block in self.free:
                self.free.remove(block)
            self.blocks[block].pins += 1
        return OK

    def unpin(self, ids: list[int]) -> int:
        for block, times in Counter(ids).items():
            if not 0 <= block < self.knobs.num_blocks:
                return self.fault(OUT_OF_RANGE, self.knobs.rows)
            if self.blocks[block].pins < times:
                return self.fault(DOUBLE_FREE, self.knobs.rows)
        for block in ids:
            self.blocks[block].pins -= 1
        self.set_free(list(dict.fromkeys(reversed(ids))))
        return OK

    # ---- what can be seen ------------------------------------------------------------------------------------------

    def violations(self) -> list[str]:
        """What must always hold; the names of what does not."""
        broken = []
        entries = Counter(block for row in self.rows if row for block in row.table if block is not None)
        ends = Counter(block for pair in self.copies for block in pair)
        if len(set(self.free)) != len(self.free):
            broken.append("a block is in the queue twice")
        for b, block in enumerate(self.blocks):
            if block.tables != entries[b] or block.copies != ends[b]:
                broken.append(f"block {b} has {block.references} references that nobody holds, or too few")
            if (block.references == 0) != (b in self.free):
                broken.append(f"block {b} is free and held, or neither")
        for r, row in enumerate(self.rows):
            if row is None:
                continue
            if len(row.table) < self.blocks_for(row.length):
                broken.append(f"row {r} holds tokens in no block")
            held = [block for block in row.table if block is not None]
            if len(set(held)) != len(held):
                broken.append(f"row {r} names a block twice")
            for index, block in enumerate(held):
                if self.blocks[block].tables > 1 and row.table.index(block) >= self.blocks_for(row.length):
                    broken.append(f"row {r} shares block {block}, where it has no tokens yet (entry {index})")
            for block, content in zip(row.table, row.chain, strict=False):
                if block is not None and self.blocks[block].content not in (None, content):
                    broken.append(f"block {block} of row {r} holds other tokens than the row")
        return broken
