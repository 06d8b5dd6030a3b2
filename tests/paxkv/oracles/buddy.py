"""The textbook buddy allocator: a list of free blocks per order, split on the way down, merged on the way up."""


class BuddyOracle:
    def __init__(self, num_leaves: int):
        self.num_leaves = num_leaves
        self.free: dict[int, list[int]] = {k: [] for k in range(num_leaves.bit_length())}
        start = 0
        for k in reversed(range(num_leaves.bit_length())):
            if num_leaves >> k & 1:
                self.free[k].append(start)
                start += 1 << k

    def largest(self) -> int:
        return max(self.free)

    def order_of(self, leaves: int) -> int:
        k = 0
        while 1 << k < leaves:
            k += 1
        return k

    def has_room(self, order: int) -> bool:
        return any(blocks for k, blocks in self.free.items() if k >= order)

    def take(self, order: int) -> int | None:
        for k in range(order, self.largest() + 1):
            if self.free[k]:
                start = min(self.free[k])
                self.free[k].remove(start)
                while k > order:
                    k -= 1
                    self.free[k].append(start + (1 << k))
                return start
        return None

    def give_back(self, start: int, order: int) -> None:
        buddy = start ^ (1 << order)
        while order < self.largest() and buddy in self.free[order]:
            self.free[order].remove(buddy)
            start = min(start, buddy)
            order += 1
            buddy = start ^ (1 << order)
        self.free[order].append(start)
