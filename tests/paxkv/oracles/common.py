"""What the three oracles share. Plain Python on purpose: lists and loops, one row after another, no JAX."""

OK, LATER, NEVER, OUT_OF_BLOCKS, DOUBLE_FREE, OUT_OF_RANGE = range(6)


class Sequence:
    def __init__(self, promised: int):
        self.length = 0
        self.promised = promised


class Oracle:
    """Admission, growth and release with their faults; subclasses say where the memory comes from."""

    num_slots: int
    capacity: int

    def __init__(self, rows: int, max_len: int):
        self.rows = rows
        self.max_len = max_len
        self.live: list[Sequence | None] = [None] * rows
        self.faults: set[int] = set()
        self.fault_row = rows

    # What a subclass defines.

    def fits_empty(self, prompt: int, most: int) -> bool:
        raise NotImplementedError

    def fits_now(self, known: int, prompt: int, most: int) -> bool:
        raise NotImplementedError

    def choose_row(self, known: int) -> int:
        return self.live.index(None)

    def occupy(self, row: int, prompt: int, most: int) -> None:
        pass

    def limit(self, row: int) -> int:
        return self.max_len

    def grow(self, lengths: list[int]) -> bool:
        raise NotImplementedError

    def vacate(self, row: int) -> None:
        raise NotImplementedError

    def background(self) -> None:
        pass

    def units_for(self, tokens: int) -> int:
        raise NotImplementedError

    def available(self) -> int:
        raise NotImplementedError

    def held(self, row: int) -> int:
        return self.units_for(self.length(row))

    def demand(self, row: int, new_length: int) -> int:
        return self.units_for(new_length) - self.held(row)

    def slot(self, row: int, position: int) -> int | None:
        raise NotImplementedError

    def given_and_taken(self, row: int) -> tuple[int, int]:
        raise NotImplementedError

    def own_view(self) -> dict:
        raise NotImplementedError

    def owners(self) -> list[int]:
        raise NotImplementedError

    def calls(self) -> tuple[int, int, int]:
        return 0, 0, 0

    # What they share.

    def length(self, row: int) -> int:
        sequence = self.live[row]
        return 0 if sequence is None else sequence.length

    def is_live(self, row: int) -> bool:
        return self.live[row] is not None

    def fault(self, kind: int, row: int) -> None:
        self.faults.add(kind)
        if self.fault_row == self.rows:
            self.fault_row = row

    def admit(self, known: int, prompt: int, final: int, room: int | None = None) -> tuple[int, int]:
        """`room` is what it wants to be promised, if more than it knows."""
        most = max(known, final)
        promised = known = known if room is None else room
        while room is not None and not self.fits_empty(prompt, known):
            known -= 1  # more than there is: it waits until it is alone
        if most > self.max_len or not self.fits_empty(prompt, most):
            return self.rows, NEVER
        if None not in self.live or not self.fits_now(known, prompt, most):
            return self.rows, LATER
        row = self.choose_row(known)
        self.live[row] = Sequence(promised)
        self.occupy(row, prompt, most)
        return row, OK

    def owed(self) -> int:
        total = 0
        for row, sequence in enumerate(self.live):
            if sequence is not None:
                total += max(0, self.units_for(sequence.promised) - self.held(row))
        return total

    def append(self, tokens: list[int], max_new_tokens: int) -> int:
        bad = []
        for row, count in enumerate(tokens):
            too_long = self.length(row) + count > (self.limit(row) if self.is_live(row) else 0)
            if count < 0 or count > max_new_tokens or (count > 0 and not self.is_live(row)) or too_long:
                bad.append(row)
        if bad:
            self.fault(OUT_OF_RANGE, bad[0])
            return OUT_OF_RANGE
        lengths = [self.length(row) + count for row, count in enumerate(tokens)]
        if not self.grow(lengths):
            self.fault(OUT_OF_BLOCKS, next(row for row, count in enumerate(tokens) if count > 0))
            return OUT_OF_BLOCKS
        for row, sequence in enumerate(self.live):
            if sequence is not None:
                sequence.length = lengths[row]
        return OK

    def release(self, rows: list[bool]) -> None:
        for row in range(self.rows):
            if not rows[row]:
                continue
            if self.is_live(row):
                self.vacate(row)
                self.live[row] = None
            else:
                self.fault(DOUBLE_FREE, row)

    def usage(self, final_lengths: list[int]) -> tuple[int, int, int, int, int]:
        """Looks at every slot of every request in turn."""
        tokens = reserved = internal = allocated = 0
        for row in range(self.rows):
            if not self.is_live(row):
                continue
            given, taken = self.given_and_taken(row)
            for place in range(given):
                if place < self.length(row):
                    tokens += 1
                elif place < final_lengths[row]:
                    reserved += 1
                else:
                    internal += 1
            allocated += taken
        return tokens, reserved, internal, self.capacity - tokens - reserved - internal, allocated

    def view(self, new_lengths: list[int], final_lengths: list[int]) -> dict:
        """Everything there is to see, by name, as plain values."""
        rows = range(self.rows)
        sync, background, unmap = self.calls()
        return {
            "active": [self.is_live(r) for r in rows],
            "lengths": [self.length(r) for r in rows],
            "promised": [s.promised if s else 0 for s in self.live],
            "fault_word": sum(1 << kind for kind in self.faults),
            "fault_row": self.fault_row,
            "demand": [self.demand(r, new_lengths[r]) for r in rows],
            "held": [self.held(r) for r in rows],
            "available": self.available(),
            "map_calls": [sync, background, unmap],
            "usage": list(self.usage(final_lengths)),
            "owners": self.owners(),
            "slots": [
                [self.num_slots if (s := self.slot(r, p)) is None else s for p in range(-1, self.max_len + 2)]
                for r in range(-1, self.rows + 1)
            ],
            **self.own_view(),
        }
