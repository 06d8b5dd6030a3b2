"""Prompts through the jitted block manager against the same prompts through one in plain Python."""

import itertools

import jax.numpy as jnp
import numpy as np
import pytest

from experiments.prefix_prompts import Prompts, SyntheticPrompts, synthetic_prompts
from experiments.prefix_replay import _Prompt, _tokens, replay
from paxkv.cache_stats import MISS_REASONS
from paxkv.paged import Paged
from paxkv.prefix_cache import PrefixCache

pytestmark = pytest.mark.slow

CHATS = synthetic_prompts(
    SyntheticPrompts(
        conversations=14,
        turns=3,
        open_conversations=5,
        system_prompts=3,
        system_tokens=9,
        popularity=1.0,
        question_tokens=(1, 7),
        answer_tokens=(0, 8),
    ),
    seed=4,
)
LONGEST = int(CHATS.lengths.max())
CHUNK = 10  # tokens stored at a time: blocks of 4 are left partly filled in between


class ByHand:
    """A prefix cache in lists and dictionaries: rows of the frame for one prompt after another."""

    def __init__(self, eviction, rows, num_blocks, chunk_tokens):
        self.eviction, self.rows, self.num_blocks, self.chunk_tokens = eviction, rows, num_blocks, chunk_tokens
        self.free = list(range(num_blocks))  # the next one to take is the first
        self.contents = {}  # block -> its content, that before it, its tokens
        self.ranks = {}  # block -> what the policy goes by
        self.references = dict.fromkeys(range(num_blocks), 0)
        self.tables = []  # of the prompts held, the oldest first
        self.new, self.evictions = itertools.count(1), 0
        self.prefixes, self.evicted = {}, set()  # block -> all tokens to its end; those that made way

    def look_up(self, tokens):
        table, content = [], 0
        for at in range(0, len(tokens) - 4, 4):
            wanted = (content, tokens[at : at + 4])
            block = next((b for b, (_, *holds) in self.contents.items() if tuple(holds) == wanted), None)
            if block is None:
                break
            table.append(block)
            content = self.contents[block][0]
        return table

    def in_use(self, table):
        return sum(self.references[block] > 0 for block in table)

    def release_oldest(self):
        for block in reversed(self.tables.pop(0)):
            self.references[block] -= 1
            if self.references[block] == 0:
                self.free.insert(len(self.free) if block in self.contents else 0, block)

    def take(self):
        block = self.free[0]
        if self.eviction != "lru":
            block = min(self.free, key=lambda block: self.ranks[block] if block in self.contents else -1)
        self.free.remove(block)
        self.evictions += self.contents.pop(block, None) is not None
        self.evicted |= {self.prefixes.pop(block)} if block in self.prefixes else set()
        self.references[block] = 1
        return block

    def serve(self, tokens, priority):
        evictions = self.evictions
        table, blocks = self.look_up(tokens), -(-len(tokens) // 4)
        while len(self.tables) == self.rows or blocks - self.in_use(table) > len(self.free):
            self.release_oldest()
            table = self.look_up(tokens)
        hit_tokens = 4 * len(table)
        self.missed = self.explain(tokens, hit_tokens)
        for block in table:
            self.references[block] += 1
            self.free = [b for b in self.free if b != block]
            self.rank(block, priority, self.ranks[block], used=True)
        for start in range(hit_tokens, len(tokens), self.chunk_tokens):
            end = min(start + self.chunk_tokens, len(tokens))
            table += [self.take() for _ in range(-(-end // 4) - len(table))]
            for place in range(start // 4, end // 4):
                before = self.contents[table[place - 1]][0] if place else 0
                self.contents[table[place]] = (next(self.new), before, tokens[4 * place : 4 * place + 4])
                self.prefixes[table[place]] = tokens[: 4 * place + 4]
                self.rank(table[place], priority, self.contents[table[place]][0], used=False)
        self.tables.append(table)
        return {
            "tokens": len(tokens),
            "hit_tokens": hit_tokens,
            "evictions": self.evictions - evictions,
            "held_blocks": self.num_blocks - len(self.free),
            "unshared_blocks": sum(map(len, self.tables)),
        }

    def explain(self, tokens, hit_tokens):
        """Tokens that were not hit, by the reason why."""
        missed = dict.fromkeys((f"missed_{name}" for name in MISS_REASONS), 0)
        missed["missed_below_block"] = len(tokens) % 4
        for end in range(hit_tokens + 4, len(tokens) + 1, 4):
            if tokens[:end] in self.prefixes.values():
                last = end == hit_tokens + 4 == len(tokens)
                missed["missed_last_token" if last else "missed_hole"] += 4
            else:
                missed["missed_evicted" if tokens[:end] in self.evicted else "missed_cold"] += 4
        return missed

    def rank(self, block, priority, number, *, used):
        uses = self.ranks.get(block, 0) + 1 if used else 1
        self.ranks[block] = {"lru": 0, "lfu": uses, "fifo": number, "priority": priority}[self.eviction]


def replayed(eviction, num_blocks):
    # One program serves all sizes: of its 40 blocks, the others are set aside.
    memory = Paged(rows=3, max_len=LONGEST, block_size=4, num_blocks=40, cache=PrefixCache(eviction=eviction))
    return replay(memory, CHATS, CHATS.lengths, CHUNK, num_blocks)


@pytest.mark.parametrize(
    ("eviction", "num_blocks"), [("lru", 40), ("lru", 30), ("lru", 20), ("priority", 30), ("priority", 20)]
)
def test_every_prompt_hits_and_evicts_what_it_does_in_plain_python(eviction, num_blocks):
    by_hand = ByHand(eviction, 3, num_blocks, CHUNK)
    prompts = zip(CHATS.tokens(), CHATS.priorities.tolist(), strict=True)
    expected = [by_hand.serve(tuple(tokens.tolist()), priority) for tokens, priority in prompts]
    found = replayed(eviction, num_blocks)
    assert found.frame.to_dicts() == expected
    assert sum(row["evictions"] for row in expected) > 20
    assert sum(row["hit_tokens"] for row in expected) > 300
    references = by_hand.references.values()
    assert (found.shared_blocks, found.most_sharers) == (sum(n > 1 for n in references), max(references))


def test_what_every_prompt_misses_is_explained_as_it_is_in_plain_python():
    # Each prompt is sent twice, so that there are last tokens to compute; what was cached first makes way first, so
    # that there are holes. The tables that remember what was evicted grow with the memory, here to where none is lost.
    twice = {name: np.repeat(getattr(CHATS, name), 2, axis=0) for name in ("ids", "lengths", "priorities")}
    prompts = Prompts(unit=CHATS.unit, **twice)
    cache = PrefixCache(eviction="fifo", explain=True)
    memory = Paged(rows=3, max_len=LONGEST, block_size=4, num_blocks=2**14, cache=cache)
    by_hand = ByHand("fifo", 3, 40, CHUNK)
    expected = []
    for tokens, priority in zip(prompts.tokens(), prompts.priorities.tolist(), strict=True):
        expected.append(by_hand.serve(tuple(tokens.tolist()), priority) | by_hand.missed)
    found = replay(memory, prompts, prompts.lengths, CHUNK, 40).frame
    assert found.to_dicts() == expected
    totals = {name: found[f"missed_{name}"].sum() for name in MISS_REASONS}
    assert {name for name, count in totals.items() if count} == {
        "below_block",
        "last_token",
        "hole",
        "evicted",
        "cold",
    }
    assert sum(totals.values()) + found["hit_tokens"].sum() == found["tokens"].sum()


def test_a_prompt_that_cannot_fit_is_refused_with_a_way_out():
    with pytest.raises(ValueError, match=r"prompt \d+: expected room .* 5 blocks of 4, got LATER; raise cache_tokens"):
        replayed("lru", 5)


def test_pieces_become_the_same_tokens_on_the_device_as_on_the_host():
    ids = np.array([[5, 0, 3], [0, 7, 0]], np.int32)
    prompts = Prompts(ids, 6, np.array([18, 9], np.int32), np.zeros(2, np.int32))
    for row, expected in enumerate(prompts.tokens()):
        zero = jnp.int32(0)
        prompt = _Prompt(jnp.asarray(ids[row]), zero, zero, zero, zero)
        found = _tokens(prompt, 6, jnp.arange(3, len(expected), dtype=jnp.int32))
        assert found.tolist() == expected[3:].tolist()
