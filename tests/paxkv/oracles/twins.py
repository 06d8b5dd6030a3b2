"""The jitted block manager and the plain-Python one, driven together and compared in all there is to see."""

import dataclasses
import random
from collections.abc import Iterable
from typing import Any

import jax
import numpy as np

from paxkv import chains, prefix_cache
from paxkv.paged import Paged
from tests.paxkv.oracles.block_manager import BlockManager
from tests.paxkv.oracles.blocks import Content, Hit, Prompt, Unseen
from tests.paxkv.oracles.common import LATER, NEVER, OK
from tests.paxkv.oracles.jitted import JittedManager, Operations, ints, knobs, paged

# Reasons that the jitted manager tells from a table that may forget, so that it may say `cold` instead.
GUESSED = ("evicted", "other_key", "cold")

# Small enough that memory is nearly always short. All are memories of scenarios too, so that both compile them once.
SMALL = {"rows": 4, "max_len": 48, "block_size": 4, "num_blocks": 10, "forks": True, "explain": True}
MERGING = {"publish": "on_compute", "duplicates": "merge"}
AHEAD = {"num_blocks": 16, "lookahead": 2, "watermark_blocks": 1}
GROUPED = {"rows": 3, "num_blocks": 24, "groups": [{}, {"window": 8}]}
MEMORIES = {
    "lru": paged(SMALL),
    "fifo": paged(SMALL | {"eviction": "fifo", "free_order": "fifo", "publish": "on_compute"}),
    "priority, merging": paged(SMALL | MERGING | {"eviction": "priority"}),
    "lfu, colliding keys, lookahead": paged(SMALL | AHEAD | {"eviction": "lfu", "collide": True}),
    "groups": paged(SMALL | GROUPED),
    "no cache": paged(SMALL | {"cache": False}),
}


class Twins:
    """Raises `AssertionError` as soon as the two differ, or one of them breaks a rule."""

    def __init__(self, memory: Paged, compiled: Operations | None = None):
        self.memory = memory
        self.jitted = JittedManager(memory, compiled)
        self.plain = BlockManager(knobs(memory))
        self.ids: dict[Content, int] = {}  # of each content, its number in the jitted manager
        self.count = 0
        self.compare("init")

    # ---- operations on both ----------------------------------------------------------------------------------------

    def admit(self, prompt: Prompt, final: int = 0, sequences: int = 1) -> tuple[int, int]:
        what, before, known = f"admit({prompt}, {final}, {sequences})", self.jitted.state, len(prompt.tokens)
        row, outcome = self.jitted.admit(prompt, final, sequences)
        never = self.plain.never_fits(known, final, sequences)
        assert (outcome == NEVER) == never, f"{what}: {outcome}"
        if not never:
            lengths = self.plain.hit_lengths(prompt, known)
            if outcome == OK:
                hit = self.followed(prompt, row, lengths)
                assert self.plain.admit(known, final, prompt, hit, sequences) == (row, OK), what
            else:
                dearest = [self.dearest(prompt, n) for n in (lengths if self.is_open(prompt) else lengths[:1])]
                assert outcome == LATER, what
                assert not all(self.plain.has_room(known, hit) for hit in dearest), f"{what}: there is room"
        self.compare(what, before, failed=outcome != OK)
        return row, outcome

    def followed(self, prompt: Prompt, row: int, lengths: list[int]) -> Hit:
        """What the jitted manager hit, which must be as much as there is, in blocks that really hold it."""
        view = self.jitted.view()
        length = view["lengths"][row]
        assert length in lengths, f"hit {length} tokens of {prompt}, which are not cached; possible: {lengths}"
        assert length == lengths[0] or self.is_open(prompt), f"hit {length} of {lengths[0]} tokens of {prompt}"
        return self.plain.hit(prompt, length, [table[row] for table in view["tables"]])

    def is_open(self, prompt: Prompt) -> bool:
        """Whether a hit may be shorter than it could be.

        Under a window equal tokens may be cached as several contents, one of them after a parent that is gone. Which
        of them is looked at first is chance.
        """
        if all(layers.window is None and layers.chunk is None for layers in self.plain.knobs.layers):
            return False
        cached = [self.plain.cached(prompt, group) for group, _ in self.plain.groups]
        return any(len(contents) > 1 for blocks in cached for contents in blocks)

    def dearest(self, prompt: Prompt, length: int) -> Hit:
        """The hit in free blocks, wherever there is a free copy."""
        hit = self.plain.hit(prompt, length)
        for blocks in hit.blocks:
            for index, block in enumerate(blocks):
                if block is not None:
                    copies = self.plain.holders(self.plain.blocks[block].content)
                    blocks[index] = next((copy for copy in copies if copy in self.plain.free), block)
        return hit

    def both(self, name: str, *arguments: Any, plain: str | None = None) -> int:
        before = self.jitted.state
        got = getattr(self.jitted, name)(*arguments)
        expected = getattr(self.plain, plain or name)(*arguments)
        what = f"{name}{arguments}"
        assert got == expected, f"{what}: {got} instead of {expected}"
        outcome = got[1] if isinstance(got, tuple) else got
        self.compare(what, before, failed=bool(outcome))
        return got

    def append(self, counts: list[int], most: int | None = None) -> int:
        before, most = self.jitted.state, most or self.memory.max_len
        got, expected = self.jitted.append(counts, most), self.plain.append(list(counts), most)
        assert got == expected, f"append({counts}, {most}): {got} instead of {expected}"
        self.compare(f"append({counts}, {most})", before, failed=got != OK)
        return got

    def publish(self, tokens: list[list[int]], most: int | None = None) -> None:
        self.jitted.publish(tokens, most)
        self.plain.publish(tokens)
        self.compare(f"publish({tokens})")

    # ---- comparison ------------------------------------------------------------------------------------------------

    def compare(self, after: str, before: Any = None, *, failed: bool = False) -> None:
        if failed:
            changed = [np.any(old != new) for old, new in zip(leaves(before), leaves(self.jitted.state), strict=True)]
            assert not any(changed), f"failed, but changed something: {after}"
        self.count += 1
        view, plain = self.jitted.view(), self.plain
        state = jax.tree.map(np.asarray, self.jitted.state)
        rows = range(self.memory.rows)
        expected = {
            "tables": [[list(plain.table(row, group)) for row in rows] for group, _ in plain.groups],
            "lengths": [plain.length(row) for row in rows],
            "free": list(plain.free),
            "references": [block.references for block in plain.blocks],
            "copies": plain.pending_copies(),
            "faults": plain.faults,
        }
        for name, value in expected.items():
            assert view[name] == value, f"{name} is {view[name]} instead of {value} after {after}"
        new_lengths = [min(plain.length(r) + (5 * self.count + 3 * r) % 8, self.memory.max_len) for r in rows]
        growing = [length if plain.is_live(row) else 0 for row, length in enumerate(new_lengths)]
        demand, violations = self.jitted.operations("observe", self.jitted.state, ints(growing))
        for name, value, wanted in (
            ("active", state.seqs.active, [plain.is_live(row) for row in rows]),
            ("promised", state.seqs.promised, [row.promised if row else 0 for row in plain.rows]),
            ("first faulty row", state.seqs.faults.row, plain.fault_row),
            ("epoch", state.epoch, plain.epoch),
            ("demand", demand, plain.demand(growing)),
        ):
            np.testing.assert_array_equal(np.asarray(value), wanted, err_msg=f"{name} after {after}")
        if self.memory.cache:
            self.compare_contents(view["contents"], after)
            self.compare_chains(state.chains, after)
            self.compare_statistics(view["statistics"], after)
        broken = {name: int(count) for name, count in violations.items() if int(count)}
        assert not broken, f"{broken} after {after}"
        assert not plain.violations(), f"{plain.violations()} after {after}"

    def compare_contents(self, contents: list[tuple | None], after: str) -> None:
        """Equal contents have equal numbers, and others have others, in both."""
        for b, (seen, block) in enumerate(zip(contents, self.plain.blocks, strict=True)):
            content = block.content
            assert (seen is None) == (content is None), f"block {b} holds {seen} instead of {content} after {after}"
            if content is None:
                continue
            number, parent, identity, tokens = seen
            self.same(content, number, content.group, f"block {b} after {after}")
            self.same(content.parent, parent, content.group, f"parent of block {b} after {after}")
            assert identity == content.identity, f"block {b} after {after}"
            assert tokens[: len(content.tokens)] == content.tokens, f"block {b} after {after}"
        present = [self.ids[block.content] for block in self.plain.blocks if block.content]
        assert len(set(present)) == len(self.plain.contents()), f"contents are confused after {after}"

    def compare_chains(self, chain: chains.Chains, after: str) -> None:
        for r, row in enumerate(self.plain.rows):
            known = len(row.tokens) if row else 0
            assert chain.hashed[r] == known, f"row {r} knows {chain.hashed[r]} tokens, not {known}, after {after}"
            for group, _ in self.plain.groups if row else []:
                last = int(chain.contents[r, group])
                if row.publishes[group]:
                    self.same(row.last[group], last, group, f"last content of row {r} after {after}")
                else:
                    assert last == prefix_cache.BROKEN, f"row {r} publishes again after {after}"

    def same(self, content: Content | Unseen | None, number: int, group: int, where: str) -> None:
        if content is None:
            assert number == chains.root_of(group), where
        elif isinstance(content, Unseen):
            assert number == prefix_cache.DETACHED, where
        else:
            assert number > 0, where
            assert self.ids.setdefault(content, number) == number, where

    def compare_statistics(self, statistics: dict[str, int], after: str) -> None:
        expected = dict(vars(self.plain.statistics))
        if self.memory.cache.collide:  # what is cached cannot be told by the key
            for name in (*GUESSED, "hole", "alignment", "last_token"):
                del expected[name]
        else:
            guessed = sum(expected.pop(name) for name in GUESSED)
            assert sum(statistics[name] for name in GUESSED) == guessed, f"reasons {statistics} after {after}"
            assert statistics["evicted"] <= self.plain.statistics.evicted, f"evicted after {after}"
        seen = {name: statistics[name] for name in expected}
        assert seen == expected, f"statistics are {seen} instead of {expected} after {after}"


def leaves(state: Any) -> list[np.ndarray]:
    """All of a state but its faults."""
    clean = dataclasses.replace(state, seqs=dataclasses.replace(state.seqs, faults=None))
    return [np.asarray(leaf) for leaf in jax.tree.leaves(clean)]


class Driver:
    """Does to the twins what a server would do, and now and then what none should.

    Texts are short and of few letters, so that prompts share beginnings, blocks fill alike, and memory is short.
    """

    def __init__(self, twins: Twins, letters: int = 2):
        self.twins = twins
        self.plain = twins.plain
        self.memory = twins.memory
        self.letters = letters
        self.texts: list[tuple[int, ...]] = [()]
        self.unpublished: list[list[int]] = [[] for _ in range(self.memory.rows)]
        self.to_come: list[list[int]] = [[] for _ in range(self.memory.rows)]  # the rest of each row's prompt

    def live(self) -> list[int]:
        return [row for row in range(self.memory.rows) if self.plain.is_live(row)]

    def room(self, row: int) -> int:
        return self.memory.max_len - self.plain.length(row) if self.plain.is_live(row) else 0

    def text(self, rng: random.Random) -> tuple[int, ...]:
        """One that begins like an earlier one, more often than not up to the end of that or of a block."""
        known, size = rng.choice(self.texts), self.memory.block_size
        cut = rng.choice([len(known), len(known) // size * size, rng.randint(0, len(known))])
        more = rng.choice([0, 0, 1, size, rng.randint(0, 6 * size)])
        if cut + more < 2 * size and rng.random() < 0.8:
            more = rng.randint(2 * size, 4 * size)
        if rng.random() < 0.05:
            more = self.memory.max_len
        text = known[:cut] + tuple(rng.randrange(self.letters) for _ in range(more))
        return text[: self.memory.max_len] or (0,)

    def remember(self, text: Iterable[int]) -> None:
        self.texts = [*self.texts[-5:], tuple(text)]

    def admit(self, rng: random.Random) -> None:
        prompt = Prompt(
            self.text(rng),
            adapter=int(rng.random() < 0.1),
            salt=int(rng.random() < 0.1),
            resumed=rng.random() < 0.2,
            lookup=rng.random() < 0.9,
            priority=rng.randint(0, 3),
        )
        final = rng.choice([0] * 8 + [self.memory.max_len, self.memory.max_len + 1])
        several = self.memory.forks and rng.random() < 0.2
        sequences = rng.randint(2, self.memory.rows + 1) if several else 1
        row, outcome = self.twins.admit(prompt, final, sequences)
        if outcome == OK:
            self.remember(prompt.tokens)
            self.to_come[row] = list(prompt.tokens[self.plain.length(row) :])

    def grow(self, rng: random.Random, most: int | None = None) -> None:
        """Some rows store some tokens: of their prompts, then of their own."""
        limit = most or self.memory.max_len
        counts = []
        for row, rest in enumerate(self.to_come):
            count = rng.choice([0, len(rest), len(rest), len(rest) + rng.randint(0, 2), rng.randint(0, len(rest))])
            count = count if rng.random() < 0.95 else self.room(row)
            counts.append(min(count, limit, self.room(row)))
        if most == 1 and rng.random() < 0.5:  # all who run go on by a token
            counts = [min(1, self.room(row)) for row in range(self.memory.rows)]
        if self.twins.append(counts, most) != OK:
            return
        for row, count in enumerate(counts):
            new = self.to_come[row][:count]
            new += [rng.randrange(self.letters) for _ in range(count - len(new))]
            self.to_come[row] = self.to_come[row][count:]
            self.unpublished[row] += new
        if self.memory.cache and (self.memory.cache.publish == "on_schedule" or rng.random() < 0.6):
            self.publish(rng, most, everything=rng.random() < 0.8)

    def publish(self, rng: random.Random, most: int | None = None, *, everything: bool = True) -> None:
        limit = most or self.memory.max_len
        counts = [min(limit, len(new) if everything else rng.randint(0, len(new))) for new in self.unpublished]
        self.twins.publish([new[:count] for new, count in zip(self.unpublished, counts, strict=True)], most)
        self.unpublished = [new[count:] for new, count in zip(self.unpublished, counts, strict=True)]

    def release(self, rng: random.Random, rows: list[int] | None = None) -> None:
        rows = [row for row in self.live() if rng.random() < 0.3] if rows is None else rows
        for row in rows:
            if self.plain.is_live(row):
                self.remember(self.plain.rows[row].tokens)  # it may come back
        self.twins.both("release", [row in rows for row in range(self.memory.rows)])
        for row in rows:
            self.unpublished[row], self.to_come[row] = [], []

    def fork(self, rng: random.Random) -> None:
        if not self.live():
            return
        row = rng.choice(self.live())
        stored = self.plain.length(row)
        tokens = self.plain.rows[row].tokens + self.unpublished[row]
        length = rng.choice([stored, rng.randint(0, stored)])
        prompt = Prompt(tuple(tokens[:length]), *self.plain.rows[row].identity[:2], priority=rng.randint(0, 3))
        promised = min(length + rng.choice([0, 1, 5]), self.memory.max_len)
        child, outcome = self.twins.both("fork", row, length, promised, prompt)
        if outcome == OK:
            self.unpublished[child] = []
            self.to_come[child] = []

    def reorder(self, rng: random.Random) -> None:
        """Some rows give up what they have for what others as long have."""
        length = rng.choice([self.plain.length(row) for row in self.live()] or [0])
        alike = [row for row in self.live() if self.plain.length(row) == length]
        keep = [row for row in alike if rng.random() < 0.5] or alike[:1]
        rows = range(self.memory.rows)
        sources = [rng.choice(keep) if row in alike and row not in keep else row for row in rows]
        if rng.random() < 0.1:
            sources = [rng.randint(-1, self.memory.rows) if rng.random() < 0.3 else source for source in sources]
        before = list(self.plain.rows)
        self.twins.both("reorder", sources)
        for row in rows:
            if self.plain.rows[row] is not before[row]:
                self.unpublished[row] = list(self.unpublished[sources[row]])
                self.to_come[row] = list(self.to_come[sources[row]])

    def some_blocks(self, rng: random.Random) -> list[int]:
        return [rng.randrange(self.memory.num_blocks) for _ in range(rng.randint(1, 2))]

    def parents(self) -> list[int]:
        """Blocks without which others that are cached cannot be reached."""
        needed = [content.parent for content in self.plain.contents()]
        return [b for b, block in enumerate(self.plain.blocks) if block.content and block.content in needed]

    def between(self, rng: random.Random) -> None:
        """What happens between steps."""
        kind = rng.choice(["evict"] * 6 + ["pin"] * 3 + ["unpin"] * 5 + ["reset", "bump_epoch"])
        if kind == "reset":
            self.twins.both("reset", plain="reset_cache")
        elif kind == "bump_epoch":
            self.twins.both("bump_epoch")
        elif kind == "unpin":
            pinned = [b for b, block in enumerate(self.plain.blocks) for _ in range(block.pins)]
            self.twins.both("unpin", rng.sample(pinned, rng.randint(0, len(pinned))))
        elif kind == "evict" and self.parents() and rng.random() < 0.5:
            self.twins.both("evict", [rng.choice(self.parents())])
        else:
            self.twins.both(kind, self.some_blocks(rng))

    def misuse(self, rng: random.Random) -> None:
        rows, blocks = range(self.memory.rows), [rng.randint(-1, self.memory.num_blocks + 1) for _ in range(2)]
        kinds = ["append", "release"] + ["pin", "unpin", "evict", "publish"] * bool(self.memory.cache)
        kind = rng.choice(kinds + ["fork"] * self.memory.forks)
        if kind == "append":
            counts = [rng.randint(-1, self.memory.max_len + 1) for _ in rows]
            if self.twins.append(counts) == OK:
                self.unpublished = [u + [0] * n for u, n in zip(self.unpublished, counts, strict=True)]
        elif kind == "release":
            self.release(rng, [row for row in rows if rng.random() < 0.3])
        elif kind == "publish":
            row = rng.choice(rows)
            tokens = [[0] * (len(self.unpublished[r]) + 1) if r == row else [] for r in rows]
            if len(tokens[row]) <= self.memory.max_len:
                self.twins.publish(tokens)
        elif kind == "fork":
            row, length = rng.randint(-1, self.memory.rows), rng.randint(-1, self.memory.max_len)
            if not self.plain.is_live(row) or length > self.plain.length(row):
                self.twins.both("fork", row, length, max(0, length), Prompt(()))
        else:
            # The sentinel marks an empty place.
            self.twins.both(kind, [block for block in blocks if block != self.memory.num_blocks])

    def step(self, rng: random.Random) -> None:
        if self.plain.copies and rng.random() < 0.7:
            self.twins.both("copied")
            return
        kinds = {"admit": 10, "grow": 7, "decode": 4, "background": 2, "release": 6, "misuse": 1}
        if self.memory.cache:
            kinds |= {"publish": 2, "between": 2}
        if self.memory.forks:
            kinds |= {"fork": 3, "reorder": 1}
        kind = rng.choices(list(kinds), weights=list(kinds.values()))[0]
        if kind == "decode":
            self.grow(rng, most=1)
        elif kind == "background":
            self.twins.both("background", plain="free_out_of_view")
        elif kind == "publish":
            self.publish(rng, everything=rng.random() < 0.5)
        else:
            getattr(self, kind)(rng)


def drive(twins: Twins, seed: int, steps: int, letters: int = 2) -> None:
    rng, driver = random.Random(seed), Driver(twins, letters)
    for _ in range(steps):
        driver.step(rng)
