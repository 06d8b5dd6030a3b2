"""What the plain-Python block manager keeps: blocks, their queue, what they hold, and what is cached of a prompt.

A prefix is known by its tokens and by the content before it, never by a number computed from them.
"""

import functools
import math
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field

Identity = tuple[int, int, int]  # adapter, salt, weight epoch
Path = tuple  # the identity, then the tokens of block after block


@dataclass(frozen=True)
class Layers:
    """Layers that see the same tokens, and so share a table."""

    block_size: int
    window: int | None = None  # a token sees so many, itself included
    chunk: int | None = None  # a token sees its own chunk of so many

    def out_of_view(self, stored: int) -> int:
        """Of `stored` tokens, how many at the beginning no later token sees."""
        if self.window is not None:
            return max(0, stored - self.window + 1)
        if self.chunk is not None:
            return stored // self.chunk * self.chunk
        return 0

    def blocks_for(self, tokens: int) -> int:
        return math.ceil(tokens / self.block_size)

    def most_blocks(self, tokens: int, max_chunk: int) -> int:
        """Blocks that a sequence of so many tokens can come to hold at once."""
        most = self.blocks_for(tokens)
        if self.window is not None:
            most = min(most, self.blocks_for(min(self.window - 1 + max_chunk, tokens)) + 1)
        if self.chunk is not None:
            straddling = 1 if self.chunk % self.block_size else 0
            most = min(most, self.blocks_for(min(self.chunk + max_chunk, tokens)) + straddling)
        return most


@dataclass(frozen=True)
class Knobs:
    """What is fixed for the life of a memory."""

    rows: int
    max_len: int
    num_blocks: int
    layers: tuple[Layers, ...]
    watermark_blocks: int = 0
    free_order: str = "recent_first"  # or "fifo"
    lookahead: int = 0  # slots kept beyond the tokens stored
    max_chunk: int | None = None
    forks: bool = False
    cache: bool = True
    duplicates: str = "keep"  # or "merge"
    eviction: str = "lru"  # or "lfu", "fifo", "priority"
    collide: bool = False  # every hash key is the same


@dataclass(frozen=True)
class Unseen:
    """Stands for contents that are out of view, where they were not looked at."""

    path: Path


@dataclass(frozen=True, eq=False)
class Content:
    """What a full block holds. Two that look alike are not the same: once gone from all blocks it never comes back."""

    group: int
    parent: "Content | Unseen | None"
    tokens: tuple[int, ...]
    identity: Identity

    @functools.cached_property
    def path(self) -> Path:
        """Everything that the keys and values in the block depend on."""
        before = self.parent.path if self.parent else (self.identity,)
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
    identity: Identity
    priority: int
    length: int
    tables: list[list[int | None]]  # by group; None where a block is out of view
    tokens: list[int]  # as far as they were published
    last: list[Content | Unseen | None]  # by group: the content of the last full block of these tokens
    publishes: list[bool]  # by group


@dataclass(frozen=True)
class Prompt:
    """A request as a cache sees it."""

    tokens: tuple[int, ...]
    adapter: int = 0
    salt: int = 0
    resumed: bool = False
    lookup: bool = True
    priority: int = 0


@dataclass
class Hit:
    """The beginning of a prompt that is cached."""

    length: int = 0
    blocks: list[list[int | None]] = field(default_factory=list)  # by group
    last: list[Content | Unseen | None] = field(default_factory=list)


@dataclass
class Statistics:
    queries: int = 0
    hits: int = 0
    resumed_queries: int = 0
    resumed_hits: int = 0
    below_block: int = 0
    last_token: int = 0
    alignment: int = 0
    hole: int = 0
    evicted: int = 0
    other_key: int = 0
    cold: int = 0
    evictions: int = 0
    unpublished: int = 0
    resets: int = 0


class Blocks:
    """Who has which block, which are free in which order, and what they hold."""

    def __init__(self, knobs: Knobs):
        self.knobs = knobs
        self.blocks = [Block() for _ in range(knobs.num_blocks)]
        self.free: deque[int] = deque(range(knobs.num_blocks))
        self.rows: list[Row | None] = [None] * knobs.rows
        self.copies: dict[tuple[int, int], tuple[int, int]] = {}  # of group and row: source, destination
        self.epoch = 0
        self.publications = 0
        self.once_cached: set[Path] = set()
        self.once_published: set[Path] = set()  # whatever the identity
        self.statistics = Statistics()
        self.faults: set[int] = set()
        self.fault_row = knobs.rows

    # ---- small questions -------------------------------------------------------------------------------------------

    @property
    def groups(self) -> Iterable[tuple[int, Layers]]:
        return enumerate(self.knobs.layers)

    def is_live(self, row: int) -> bool:
        return 0 <= row < self.knobs.rows and self.rows[row] is not None

    def length(self, row: int) -> int:
        state = self.rows[row]
        return state.length if state else 0

    def table(self, row: int, group: int) -> list[int | None]:
        state = self.rows[row]
        return state.tables[group] if state else []

    def waits(self, row: int) -> bool:
        """Whether the data of a block in this row has not been copied yet."""
        return any(row == waiting for _, waiting in self.copies)

    def fault(self, outcome: int, row: int) -> int:
        self.faults.add(outcome)
        if self.fault_row == self.knobs.rows:
            self.fault_row = row
        return outcome

    # ---- the queue of free blocks ----------------------------------------------------------------------------------

    def next_to_take(self) -> int:
        policy = self.knobs.eviction
        if not self.knobs.cache or policy == "lru":
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
            self.forget(block)
            self.statistics.evictions += 1
        return block

    def set_free(self, blocks: list[int]) -> None:
        """Those that nobody refers to any more join the queue, the last of them first if they join its back."""
        listed = [b for place, b in enumerate(blocks) if b not in blocks[place + 1 :]]
        free = [b for b in listed if self.blocks[b].references == 0]
        behind = [b for b in free if self.blocks[b].content or self.knobs.free_order == "fifo"]
        self.free.extend(reversed(behind))
        for block in free:
            if block not in behind:
                self.free.appendleft(block)

    def refer(self, block: int) -> None:
        """One more reference is coming: the block leaves the queue, wherever it stands."""
        if block in self.free:
            self.free.remove(block)

    # ---- contents --------------------------------------------------------------------------------------------------

    def holders(self, content: Content) -> list[int]:
        return [b for b, block in enumerate(self.blocks) if block.content is content]

    def contents(self) -> list[Content]:
        """Each that some block holds."""
        return list({id(block.content): block.content for block in self.blocks if block.content}.values())

    def find(self, group: int, parent: Content | Unseen | None, tokens: list[int], identity: Identity):
        """The content that such a block has, if there is one."""
        for content in self.contents():
            alike = (group, tuple(tokens), identity) == (content.group, content.tokens, content.identity)
            # `Unseen` is compared by what it stands for, a content by being the same.
            if alike and content.parent == parent:
                return content
        return None

    def identity(self, prompt: Prompt) -> Identity:
        return prompt.adapter, prompt.salt, self.epoch

    def forget(self, block: int) -> None:
        if content := self.blocks[block].content:
            self.once_cached.add(content.path)
        self.blocks[block].content = None

    def used(self, block: int, priority: int) -> None:
        self.blocks[block].uses += 1
        self.blocks[block].priority = priority

    # ---- what of a prompt is cached --------------------------------------------------------------------------------

    def spans(self, tokens: Iterable[int], size: int) -> list[list[int]]:
        """The tokens of each full block."""
        tokens = list(tokens)
        return [tokens[i * size : (i + 1) * size] for i in range(len(tokens) // size)]

    def cached(self, prompt: Prompt, group: int) -> list[list[Content]]:
        """For each full block of a prompt, the contents that are what it would hold."""
        by_path: dict[Path, list[Content]] = {}
        for content in self.contents():
            if content.group == group:
                by_path.setdefault(content.path, []).append(content)
        found, path = [], (self.identity(prompt),)
        for span in self.spans(prompt.tokens, self.knobs.layers[group].block_size):
            path = (*path, tuple(span))
            found.append(by_path.get(path, []))
        return found

    def runs(self, group: int, cached: list[list[Content]], length: int) -> list[list[Content]]:
        """All ways to have what the token after `length` sees, each content after the one before it."""
        layers = self.knobs.layers[group]
        first, end = layers.out_of_view(length) // layers.block_size, length // layers.block_size
        runs: list[list[Content]] = [[]]
        for index in range(first, end):
            runs = [
                [*run, content]
                for run in runs
                for content in cached[index]
                if content.parent is (run[-1] if run else content.parent if index else None)
            ]
        return runs

    def hit_lengths(self, prompt: Prompt, known: int) -> list[int]:
        """Every length at which all groups can go on, longest first. The last token is computed in any case."""
        if not (self.knobs.cache and prompt.lookup):
            return [0]
        cached = [self.cached(prompt, group) for group, _ in self.groups]
        aligned = math.lcm(*(layers.block_size for layers in self.knobs.layers))
        lengths = range((known - 1) // aligned * aligned, -1, -aligned)
        return [n for n in lengths if all(self.runs(group, cached[group], n) for group, _ in self.groups)]

    def hit(self, prompt: Prompt, length: int, chosen: list[list[int | None]] | None = None) -> Hit:
        """The first `length` tokens from the cache, in the chosen copies of the blocks if somebody chose."""
        hit = Hit(length)
        for group, layers in self.groups:
            runs = self.runs(group, self.cached(prompt, group), length)
            end = length // layers.block_size
            if chosen is None:
                blocks = [self.holders(content)[0] for content in runs[0]]
            else:
                blocks = [block for block in chosen[group][:end] if block is not None]
                runs = [run for run in runs if [self.blocks[block].content for block in blocks] == run]
                assert runs, f"blocks {blocks} of group {group} do not hold the prompt's first {length} tokens"
            hit.blocks.append([None] * (end - len(blocks)) + blocks)
            path = (self.identity(prompt), *map(tuple, self.spans(prompt.tokens[:length], layers.block_size)))
            hit.last.append(runs[0][-1] if runs[0] else Unseen(path) if end else None)
        return hit
