"""Paged memory with a Python list for each table and one for the free blocks."""

import math
from collections import Counter

from tests.paxkv.oracles.common import Oracle


class PagedOracle(Oracle):
    def __init__(self, memory):
        super().__init__(memory.rows, memory.max_len)
        self.block_size = memory.block_size
        self.num_blocks = memory.num_blocks
        self.watermark = memory.watermark_blocks
        self.num_slots = self.capacity = memory.num_blocks * memory.block_size
        self.free = list(range(memory.num_blocks))  # the first is taken first
        self.free_order = memory.free_order
        self.tables: list[list[int]] = [[] for _ in range(memory.rows)]

    def units_for(self, tokens):
        return math.ceil(tokens / self.block_size)

    def available(self):
        return len(self.free)

    def held(self, row):
        return len(self.tables[row])

    def fits_empty(self, prompt, most):
        return self.units_for(most) <= self.num_blocks

    def fits_now(self, known, prompt, most):
        kept_back = self.watermark if any(self.live) else 0
        return self.units_for(known) + self.owed() + kept_back <= len(self.free)

    def grow(self, lengths):
        if sum(self.units_for(n) for n in lengths) - sum(len(t) for t in self.tables) > len(self.free):
            return False
        for row, length in enumerate(lengths):
            while len(self.tables[row]) * self.block_size < length:
                self.tables[row].append(self.free.pop(0))
        return True

    def vacate(self, row):
        back = self.tables[row][::-1]
        self.free = self.free + back if self.free_order == "fifo" else back + self.free
        self.tables[row] = []

    def slot(self, row, position):
        if not (0 <= row < self.rows and position >= 0):
            return None
        for index, block in enumerate(self.tables[row]):
            for offset in range(self.block_size):
                if index * self.block_size + offset == position:
                    return block * self.block_size + offset
        return None

    def given_and_taken(self, row):
        slots = len(self.tables[row]) * self.block_size
        return slots, slots

    def owners(self):
        owner = {block: row for row, table in enumerate(self.tables) for block in table}
        return [owner.get(block, self.rows) for block in range(self.num_blocks)]

    def own_view(self):
        width = math.ceil(self.max_len / self.block_size)
        references = Counter(block for table in self.tables for block in table)
        return {
            "tables": [table + [self.num_blocks] * (width - len(table)) for table in self.tables],
            "next_free": list(self.free),
            "references": [references[block] for block in range(self.num_blocks)],
        }
