"""vAttention memory with real groups: each has an id, lies in the free pool or in the range of one row."""

from tests.paxkv.oracles.common import Oracle


class VAttentionOracle(Oracle):
    def __init__(self, memory):
        super().__init__(memory.rows, memory.max_len)
        self.memory = memory
        self.num_slots = memory.rows * memory.max_len
        self.capacity = 0
        while (self.capacity + 1) * memory.token_bytes <= memory.num_groups * memory.page_bytes:
            self.capacity += 1
        self.free = list(range(memory.num_groups))
        self.ranges: list[list[int]] = [[] for _ in range(memory.rows)]
        self.sync = self.ahead = self.unmapped = 0

    def units_for(self, tokens):
        groups = 0
        while groups * self.memory.page_bytes < tokens * self.memory.token_bytes:
            groups += 1
        return groups

    def room(self, row):
        tokens = 0
        while (tokens + 1) * self.memory.token_bytes <= len(self.ranges[row]) * self.memory.page_bytes:
            tokens += 1
        return min(tokens, self.max_len)

    def available(self):
        return self.memory.num_groups - sum(self.held(row) for row in range(self.rows))

    def fits_empty(self, prompt, most):
        return self.units_for(most) <= self.memory.num_groups

    def fits_now(self, known, prompt, most):
        kept_back = self.memory.watermark_groups if any(self.live) else 0
        return self.units_for(known) + self.owed() + kept_back <= self.available()

    def choose_row(self, known):
        need = self.units_for(known)
        best = None
        for row in range(self.rows):
            if self.is_live(row):
                continue
            if best is None:
                best = row
                continue
            mine, other = len(self.ranges[row]), len(self.ranges[best])
            if mine >= need:
                if other < need or mine < other:
                    best = row
            elif other < need and mine > other:
                best = row
        return best

    def map_one(self, row):
        self.ranges[row].append(self.free.pop())

    def unmap_one(self, row):
        self.free.append(self.ranges[row].pop())
        self.unmapped += self.memory.buffers

    def reclaim(self, groups, keep):
        unmapped = 0
        for row in reversed(range(self.rows)):
            if unmapped >= groups:
                return
            while len(self.ranges[row]) > keep[row]:
                self.unmap_one(row)
                unmapped += 1

    def grow(self, lengths):
        need = [self.units_for(n) for n in lengths]
        if sum(need) > self.memory.num_groups:
            return False
        missing = sum(max(0, need[row] - len(self.ranges[row])) for row in range(self.rows))
        self.reclaim(missing - len(self.free), need)
        for row in range(self.rows):
            while len(self.ranges[row]) < need[row]:
                self.map_one(row)
                self.sync += self.memory.buffers
        return True

    def vacate(self, row):
        if not self.memory.deferred_reclaim:
            while self.ranges[row]:
                self.unmap_one(row)

    def background(self):
        if self.memory.lookahead_steps == 0:
            return
        keep = []
        for row in range(self.rows):
            keep.append(self.units_for(min(self.length(row) + 1, self.max_len)) if self.is_live(row) else 0)
        surplus = sum(max(0, len(self.ranges[row]) - keep[row]) for row in range(self.rows))
        within_reach = len(self.free) + surplus
        served = []
        for row in range(self.rows):
            missing = max(0, keep[row] - len(self.ranges[row]))
            if missing > within_reach:
                break
            within_reach -= missing
            served += [row] * missing
        self.reclaim(len(served) - len(self.free), keep)
        for row in served:
            self.map_one(row)
            self.ahead += self.memory.buffers

        granted = set()
        for further in range(self.memory.lookahead_steps):  # rows with room for no, one, two further tokens, ...
            for row in range(self.rows):
                if not self.is_live(row) or row in granted or len(granted) == self.memory.background_groups:
                    continue
                room = self.room(row)
                if room - self.length(row) <= further and room < self.max_len and self.free:
                    self.map_one(row)
                    self.ahead += self.memory.buffers
                    granted.add(row)

    def slot(self, row, position):
        if not (0 <= row < self.rows and self.is_live(row) and 0 <= position < self.room(row)):
            return None
        return row * self.max_len + position

    def given_and_taken(self, row):
        return self.room(row), self.room(row)

    def owners(self):
        picture = []
        for row in range(self.rows):
            if self.is_live(row):
                picture += [row] * len(self.ranges[row])
        return picture + [self.rows] * (self.memory.num_groups - len(picture))

    def calls(self):
        return self.sync, self.ahead, self.unmapped

    def own_view(self):
        everywhere = sorted(self.free + [group for groups in self.ranges for group in groups])
        assert everywhere == list(range(self.memory.num_groups))
        return {"mapped": [len(groups) for groups in self.ranges]}
