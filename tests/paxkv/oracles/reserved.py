"""Reserved memory on the textbook buddy allocator."""

from tests.paxkv.oracles.buddy import BuddyOracle
from tests.paxkv.oracles.common import Oracle


class ReservedOracle(Oracle):
    def __init__(self, memory):
        super().__init__(memory.rows, memory.max_len)
        self.policy = memory.policy
        self.leaf = memory.min_block
        self.num_slots = self.capacity = memory.num_slots
        self.buddy = BuddyOracle(memory.num_slots // memory.min_block)
        self.ranges: list[tuple[int, int, int] | None] = [None] * memory.rows  # first leaf, order, slots asked for

    def size(self, prompt, most):
        if self.policy == "max":
            return self.max_len
        if self.policy == "oracle":
            return most
        output = 0
        if most > prompt:
            output = 1
            while output < most - prompt:
                output *= 2
        return min(prompt + output, self.max_len)

    def order(self, prompt, most):
        leaves = -(-self.size(prompt, most) // self.leaf)
        return self.buddy.order_of(leaves)

    def fits_empty(self, prompt, most):
        return self.order(prompt, most) <= self.buddy.largest()

    def fits_now(self, known, prompt, most):
        return self.buddy.has_room(self.order(prompt, most))

    def occupy(self, row, prompt, most):
        order = self.order(prompt, most)
        self.ranges[row] = (self.buddy.take(order), order, self.size(prompt, most))

    def limit(self, row):
        return self.ranges[row][2]

    def grow(self, lengths):
        return True

    def vacate(self, row):
        start, order, _ = self.ranges[row]
        self.buddy.give_back(start, order)
        self.ranges[row] = None

    def available(self):
        return 0

    def held(self, row):
        return 2 ** self.ranges[row][1] if self.ranges[row] else 0

    def demand(self, row, new_length):
        return 0

    def slot(self, row, position):
        if not 0 <= row < self.rows or self.ranges[row] is None:
            return None
        start, _, size = self.ranges[row]
        return start * self.leaf + position if 0 <= position < size else None

    def given_and_taken(self, row):
        return self.ranges[row][2], self.held(row) * self.leaf

    def owners(self):
        picture = [self.rows] * (self.num_slots // self.leaf)
        for row, found in enumerate(self.ranges):
            if found:
                start, order, _ = found
                for leaf in range(start, start + 2**order):
                    assert picture[leaf] == self.rows
                    picture[leaf] = row
        return picture

    def own_view(self):
        found = [r or (0, 0, 0) for r in self.ranges]
        return {
            "starts": [start * self.leaf for start, _, _ in found],
            "orders": [order for _, order, _ in found],
            "sizes": [size for _, _, size in found],
        }
