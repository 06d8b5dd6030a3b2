"""The block manager in plain Python: what each operation does to each block, one block after another.

This is the specification in code, so it is written to be read: lists, loops, searches from the start, no arrays, no
hashes.
"""

from collections import Counter
from dataclasses import replace

from tests.paxkv.oracles.blocks import Blocks, Content, Hit, Knobs, Path, Prompt, Row
from tests.paxkv.oracles.common import DOUBLE_FREE, LATER, NEVER, OK, OUT_OF_BLOCKS, OUT_OF_RANGE

__all__ = ["BlockManager", "Knobs", "Prompt", "Row"]

SAME_KEY_CAPACITY = 16  # blocks under one hash key: two buckets of eight


class BlockManager(Blocks):
    # ---- requests come and go --------------------------------------------------------------------------------------

    def still_needs(self, tokens: int, tables: list[list[int | None]]) -> int:
        """Blocks that a sequence with these tables must get before it holds so many tokens."""
        total = 0
        for group, layers in self.groups:
            reach = min(tokens + self.knobs.lookahead, self.knobs.max_len)
            gone = tables[group].count(None)
            most = layers.most_blocks(reach, self.knobs.max_chunk or self.knobs.max_len)
            total += max(0, min(most, layers.blocks_for(reach) - gone) - (len(tables[group]) - gone))
        return total

    def owed(self) -> int:
        """Blocks that were promised to the rows and that they have not taken, copies of shared ones among them."""
        growing = [place for place, row in enumerate(self.rows) if row and row.promised > row.length]
        copies = sum(self.must_copy(place, group, growing) for place in growing for group, _ in self.groups)
        return copies + sum(self.still_needs(row.promised, row.tables) for row in self.rows if row)

    def has_room(self, known: int, hit: Hit) -> bool:
        """Whether a request can be admitted. What it hits in the queue leaves the queue, so that counts as taken."""
        queued = sum(1 for blocks in hit.blocks for block in blocks if block in self.free)
        need = self.still_needs(known, hit.blocks) + queued
        watermark = self.knobs.watermark_blocks if any(self.rows) else 0
        return None in self.rows and need + self.owed() + watermark <= len(self.free)

    def never_fits(self, known: int, final: int, sequences: int = 1) -> bool:
        """Whether so many sequences of one prompt can never run together. All but the last prompt token is shared."""
        most = max(known, final)
        held = self.still_needs(most, [[] for _ in self.knobs.layers])
        if self.knobs.forks and sequences > 1:
            shared = sum((known - 1) // layers.block_size for layers in self.knobs.layers)
            held += (sequences - 1) * max(1, held - shared)
        return most > self.knobs.max_len or held > self.knobs.num_blocks or sequences > self.knobs.rows

    def admit(
        self, known: int, final: int, prompt: Prompt, hit: Hit | None = None, sequences: int = 1
    ) -> tuple[int, int]:
        if self.never_fits(known, final, sequences):
            return self.knobs.rows, NEVER
        hit = hit or self.hit(prompt, self.hit_lengths(prompt, known)[0])
        if not self.has_room(known, hit):
            return self.knobs.rows, LATER
        self.count_query(prompt, known, hit.length)
        row = self.rows.index(None)
        self.rows[row] = Row(
            promised=known,
            identity=self.identity(prompt),
            priority=prompt.priority,
            length=hit.length,
            tables=[list(blocks) for blocks in hit.blocks],
            tokens=list(prompt.tokens[: hit.length]),
            last=list(hit.last),
            publishes=[True for _ in hit.last],
        )
        for blocks in hit.blocks:
            for block in blocks:
                if block is not None:
                    self.refer(block)
                    self.used(block, prompt.priority)
                    self.blocks[block].tables += 1
        return row, OK

    def count_query(self, prompt: Prompt, known: int, hit: int) -> None:
        count = self.statistics
        if not (self.knobs.cache and prompt.lookup):
            return
        if prompt.resumed:
            count.resumed_queries += known
            count.resumed_hits += hit
            return
        count.queries += known
        count.hits += hit
        size = self.knobs.layers[0].block_size
        count.below_block += known % size
        path: Path = (self.identity(prompt),)
        cached = self.cached(prompt, 0)
        for index, span in enumerate(self.spans(prompt.tokens[:known], size)):
            path = (*path, tuple(span))
            if index < hit // size:
                continue
            if cached[index] and index == hit // size and (index + 1) * size == known:
                count.last_token += size
            elif all(cached[hit // size : index + 1]) and len(self.knobs.layers) > 1:
                count.alignment += size
            elif cached[index]:
                count.hole += size
            elif path in self.once_cached:
                count.evicted += size
            elif path[1:] in self.once_published:
                count.other_key += size
            else:
                count.cold += size

    def release(self, mask: list[bool]) -> None:
        for row in range(self.knobs.rows):
            if not mask[row]:
                continue
            if not self.is_live(row):
                self.fault(DOUBLE_FREE, row)
                continue
            blocks = [block for table in self.rows[row].tables for block in table if block is not None]
            self.rows[row] = None
            for block in blocks:
                self.blocks[block].tables -= 1
            self.set_free(blocks)

    # ---- growth ----------------------------------------------------------------------------------------------------

    def growth(self, row: int, group: int, new_length: int) -> int:
        """Blocks that a row takes to grow."""
        room = min(new_length + self.knobs.lookahead, self.knobs.max_len)
        return max(0, self.knobs.layers[group].blocks_for(room) - len(self.table(row, group)))

    def half_full(self, row: int, group: int) -> int | None:
        """The block that the next token of a row is written to, if it holds tokens of the row already."""
        size = self.knobs.layers[group].block_size
        return self.table(row, group)[self.length(row) // size] if self.length(row) % size else None

    def must_copy(self, row: int, group: int, growing: list[int]) -> bool:
        """Whether others refer to the block that a row writes to. If all who do write to it now, the last keeps it.

        Without forks only a pin can refer to it besides the row, and a pin does not mind that the block fills.
        """
        block = self.half_full(row, group)
        if block is None or not self.knobs.forks:
            return False
        writers = [r for r in growing if self.half_full(r, group) == block]
        return len(writers) < self.blocks[block].references or row != writers[-1]

    def demand(self, new_lengths: list[int]) -> list[int]:
        """Blocks that each row must be given to grow to these lengths."""
        growing = [row for row in range(self.knobs.rows) if new_lengths[row] > self.length(row)]
        wanted = [0] * self.knobs.rows
        for row in growing:
            for group, _ in self.groups:
                wanted[row] += self.growth(row, group, new_lengths[row]) + self.must_copy(row, group, growing)
        return wanted

    def append(self, counts: list[int], max_new_tokens: int) -> int:
        for row, count in enumerate(counts):
            room = self.knobs.max_len - self.length(row) if self.is_live(row) else 0
            if not 0 <= count <= min(max_new_tokens, room) or (count > 0 and self.waits(row)):
                return self.fault(OUT_OF_RANGE, row)
        growing = [row for row, count in enumerate(counts) if count > 0]
        new_lengths = [self.length(row) + count for row, count in enumerate(counts)]
        if sum(self.demand(new_lengths)) > len(self.free):
            return self.fault(OUT_OF_BLOCKS, growing[0])

        places = [(row, group) for row in growing for group, _ in self.groups]
        copying = [(row, group) for row, group in places if self.must_copy(row, group, growing)]
        kept = [self.half_full(row, group) for row, group in places if (row, group) not in copying]
        for row, group in places:
            if (row, group) in copying:
                self.copies[group, row] = self.copy(row, group)
            for _ in range(self.growth(row, group, new_lengths[row])):
                block = self.take()
                self.blocks[block].tables += 1
                self.rows[row].tables[group].append(block)
        for block in kept:
            if block is not None:
                self.forget(block)  # what is written now is something else
        for row in growing:
            self.rows[row].length = new_lengths[row]
        return OK

    def copy(self, row: int, group: int) -> tuple[int, int]:
        """The row goes on in a block of its own. Both ends are held until the data was copied."""
        source, destination = self.half_full(row, group), self.take()
        self.rows[row].tables[group][self.length(row) // self.knobs.layers[group].block_size] = destination
        self.blocks[source].tables -= 1
        self.blocks[destination].tables += 1
        for block in (source, destination):
            self.blocks[block].copies += 1
        return source, destination

    def pending_copies(self) -> list[tuple[int, int]]:
        return [self.copies[place] for place in sorted(self.copies)]

    def copied(self) -> None:
        pairs = self.pending_copies()
        ends = [source for source, _ in pairs] + [destination for _, destination in pairs]
        self.copies = {}
        for block in ends:
            self.blocks[block].copies -= 1
        self.set_free(ends)

    def free_out_of_view(self) -> None:
        """Gives back the blocks that no later token sees: the oldest of each row, then the next oldest, and so on.

        With a cache, only those that were published or that nobody will publish.
        """
        for group, layers in self.groups:
            while True:
                gone = []
                for row in self.rows:
                    if row is None:
                        continue
                    table = row.tables[group]
                    oldest = table.count(None)
                    stored = min(row.length, len(row.tokens)) if self.knobs.cache else row.length
                    if oldest < min(layers.out_of_view(stored) // layers.block_size, len(table)):
                        gone.append(table[oldest])
                        table[oldest] = None
                if not gone:
                    break
                for block in gone:
                    self.blocks[block].tables -= 1
                self.set_free(gone)

    # ---- publishing ------------------------------------------------------------------------------------------------

    def publish(self, tokens: list[list[int]]) -> None:
        """Row by row, tokens that were stored; every block that is full of them now gets a content."""
        wrong = [
            row
            for row, new in enumerate(tokens)
            if len(new) > (self.length(row) - len(self.rows[row].tokens) if self.is_live(row) else 0)
        ]
        if wrong:
            self.fault(OUT_OF_RANGE, wrong[0])
            return
        before = [len(row.tokens) if row else 0 for row in self.rows]
        for row, new in enumerate(tokens):
            if new:
                self.rows[row].tokens += new
        for group, layers in self.groups:
            given_up = []
            for row, new in enumerate(tokens):
                if not new:
                    continue
                first, end = before[row] // layers.block_size, len(self.rows[row].tokens) // layers.block_size
                for index in range(first, end):
                    given_up += self.publish_block(self.rows[row], group, index)
            self.set_free(given_up)

    def publish_block(self, row: Row, group: int, index: int) -> list[int]:
        """Publishes the next full block of a row; returns the block that the row does not need any more, if any."""
        own = row.tables[group][index]
        size = self.knobs.layers[group].block_size
        span = row.tokens[index * size : (index + 1) * size]
        parent = row.last[group]
        self.once_published.add(tuple(tuple(s) for s in self.spans(row.tokens[: (index + 1) * size], size)))
        content = self.find(group, parent, span, row.identity) if row.publishes[group] else None
        if content and self.knobs.duplicates == "merge":
            kept = self.holders(content)[0]
            self.refer(kept)
            self.used(kept, row.priority)
            self.blocks[kept].tables += 1
            self.blocks[own].tables -= 1
            row.tables[group][index] = kept
            row.last[group] = content
            return [own]
        crowded = self.knobs.collide and sum(1 for block in self.blocks if block.content) >= SAME_KEY_CAPACITY
        if crowded or not row.publishes[group]:
            row.publishes[group] = False
            self.statistics.unpublished += 1
            return []
        self.publications += 1
        row.last[group] = content or Content(group, parent, tuple(span), row.identity)
        if own is not None:
            self.blocks[own] = replace(
                self.blocks[own],
                content=row.last[group],
                uses=1,
                published=self.publications,
                priority=row.priority,
            )
        return []

    # ---- what happens between steps --------------------------------------------------------------------------------

    def fork(self, parent: int, length: int, promised: int, prompt: Prompt) -> tuple[int, int]:
        """Another row with the first `length` tokens of this one, in the same blocks, that may grow as promised."""
        wrong = not self.is_live(parent) or not 0 <= length <= self.length(parent)
        wrong = wrong or not length <= promised <= self.knobs.max_len
        for group, layers in self.groups if not wrong else []:
            # The first token of the fork may see blocks that have left the view of its parent.
            wrong = wrong or self.table(parent, group).count(None) > layers.out_of_view(length) // layers.block_size
        if wrong:
            return self.knobs.rows, self.fault(OUT_OF_RANGE, min(max(parent, 0), self.knobs.rows - 1))
        # Full blocks stay shared; the half-full one is written by one of the two, and so the other needs its own.
        full = [[None] * (length // layers.block_size) for _, layers in self.groups]
        need = self.still_needs(max(promised, length + 1), full) + self.owed()
        unpublished = self.knobs.cache and length > len(self.rows[parent].tokens)
        if None not in self.rows or need > len(self.free) or self.waits(parent) or unpublished:
            return self.knobs.rows, LATER

        source = self.rows[parent]
        tables = [source.tables[group][: layers.blocks_for(length)] for group, layers in self.groups]
        last, publishes = [], []
        for group, layers in self.groups:
            full = length // layers.block_size
            block = tables[group][full - 1] if full else None
            last.append(self.blocks[block].content if block is not None else None)
            publishes.append(full == 0 or last[group] is not None)
        row = self.rows.index(None)
        self.rows[row] = Row(
            promised=promised,
            identity=(prompt.adapter, prompt.salt, source.identity[2]),
            priority=prompt.priority,
            length=length,
            tables=tables,
            tokens=list(prompt.tokens[:length]),
            last=last,
            publishes=publishes,
        )
        for table in tables:
            for block in table:
                if block is not None:
                    self.blocks[block].tables += 1
        return row, OK

    def reorder(self, sources: list[int]) -> None:
        """Each row goes on as a fork of row `sources[row]`, if that is another one."""
        moved = [row for row, source in enumerate(sources) if source != row]
        wrong = [
            row
            for row in moved
            if not (self.is_live(row) and self.is_live(sources[row]) and self.length(row) == self.length(sources[row]))
            or sources[row] in moved
            or self.waits(row)
            or self.waits(sources[row])
        ]
        if wrong:
            self.fault(OUT_OF_RANGE, wrong[0])
            return
        for row in moved:
            old = [block for table in self.rows[row].tables for block in table if block is not None]
            source = self.rows[sources[row]]
            self.rows[row] = replace(
                source,
                tables=[source.tables[group][: layers.blocks_for(source.length)] for group, layers in self.groups],
                tokens=list(source.tokens),
                last=list(source.last),
                publishes=list(source.publishes),
            )
            for table in self.rows[row].tables:
                for block in table:
                    if block is not None:
                        self.blocks[block].tables += 1
            for block in old:
                self.blocks[block].tables -= 1
            self.set_free(old)

    def evict(self, ids: list[int]) -> None:
        """Forgets what these blocks hold, wherever they are."""
        for block in ids:
            if 0 <= block < self.knobs.num_blocks:
                self.forget(block)

    def pin(self, ids: list[int]) -> int:
        """One more reference to each block, so that it stays; only what is held or cached can be pinned."""
        for block in ids:
            if not 0 <= block < self.knobs.num_blocks:
                return OUT_OF_RANGE
            if self.blocks[block].references == 0 and self.blocks[block].content is None:
                return OUT_OF_RANGE
        for block in ids:
            self.refer(block)
            self.blocks[block].pins += 1
        return OK

    def unpin(self, ids: list[int]) -> int:
        """One pin less on each block. What nobody pinned is not anybody's to let go."""
        for block, times in Counter(ids).items():
            if not 0 <= block < self.knobs.num_blocks or self.blocks[block].pins < times:
                return DOUBLE_FREE
        for block in ids:
            self.blocks[block].pins -= 1
        self.set_free(ids)
        return OK

    def reset_cache(self) -> int:
        if any(self.rows) or any(block.references for block in self.blocks):
            return LATER
        for block in range(self.knobs.num_blocks):
            self.forget(block)
        self.statistics.resets += 1
        return OK

    def bump_epoch(self) -> None:
        """The weights changed: nothing that is cached now fits a request that comes later."""
        self.epoch += 1

    # ---- what must always hold -------------------------------------------------------------------------------------

    def violations(self) -> list[str]:
        """The rules that are broken, in words."""
        broken = []
        entries = Counter(b for row in self.rows if row for table in row.tables for b in table if b is not None)
        ends = Counter(block for pair in self.copies.values() for block in pair)
        if len(set(self.free)) != len(self.free):
            broken.append("a block is in the queue twice")
        for b, block in enumerate(self.blocks):
            if block.tables != entries[b] or block.copies != ends[b] or block.pins < 0:
                broken.append(f"block {b} has other references than tables, pins and copies give it")
            if (block.references == 0) != (b in self.free):
                broken.append(f"block {b} is free and held, or neither")
        for r, row in enumerate(self.rows):
            for group, layers in self.groups if row else []:
                table = row.tables[group]
                if len(table) < layers.blocks_for(row.length):
                    broken.append(f"row {r} holds tokens in no block")
                held = [block for block in table if block is not None]
                if len(set(held)) != len(held):
                    broken.append(f"row {r} names a block twice")
                path: Path = (row.identity,)
                for block, span in zip(table, self.spans(row.tokens, layers.block_size), strict=False):
                    path = (*path, tuple(span))
                    content = self.blocks[block].content if block is not None else None
                    if content and content.path != path:
                        broken.append(f"block {block} of row {r} is cached as something that the row does not hold")
                for block in table[layers.blocks_for(row.length) :]:
                    if block is not None and self.blocks[block].tables != 1:
                        broken.append(f"block {block} is shared though nothing is in it yet")
        return broken
