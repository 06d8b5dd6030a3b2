"""Why tokens did not hit, against a plain-Python cache that remembers everything it ever held."""

import random

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from paxkv import lifecycle
from paxkv.memory import Ask, content
from paxkv.paged import Paged
from paxkv.prefix_cache import PrefixCache
from paxkv.windows import Group

SIZE = 4
REASONS = ("below_block", "last_token", "alignment", "hole", "evicted", "other_key", "cold")
MEMORY = Paged(
    rows=1, max_len=24, block_size=SIZE, num_blocks=512, cache=PrefixCache(publish="on_compute", explain=True)
)
QUICKLY = {"xla_backend_optimization_level": 0}


class Server:
    def __init__(self, memory):
        self.memory, self.state, self.compiled = memory, memory.init(), {}

    def __call__(self, name, *arguments):
        if name not in self.compiled:
            self.compiled[name] = jax.jit(getattr(self, name)).lower(*arguments).compile(QUICKLY)
        return self.compiled[name](*arguments)

    def store(self, state, ask):
        state, _, outcome = self.memory.admit(state, ask)
        hit = state.seqs.lengths[0]
        new = ask.known_tokens - hit
        state, _ = self.memory.append(state, new[None], self.memory.max_len)
        tokens = jnp.roll(ask.content.tokens, -hit)
        state = self.memory.publish(state, tokens, jnp.stack([jnp.int32(0), new]), self.memory.max_len)
        return self.memory.release(state, jnp.ones(1, jnp.bool)), hit, outcome

    def evict(self, state, ids):
        return lifecycle.evict(self.memory, state, ids)

    def serve(self, tokens, **identity):
        """Stores a prompt, and returns what the hit was and which counts it added."""
        known = jnp.int32(len(tokens))
        padded = jnp.array(tokens + [0] * (self.memory.max_len - len(tokens)), jnp.int32)
        before = vars(self.state.stats)
        asked = content(padded, **identity)
        self.state, hit, outcome = self("store", self.state, Ask(known, known, known, asked))
        assert outcome == 0
        after = vars(self.state.stats)
        return int(hit), {name: int(after[name] - before[name]) for name in before}

    def forget(self, who, block_tokens):
        """Evicts every block that holds these tokens for them."""
        records = np.asarray(self.state.contents.records)
        held = (
            (records[:, 0] != 0) & (records[:, 3:5] == who).all(axis=1) & (records[:, 6:] == block_tokens).all(axis=1)
        )
        blocks = np.flatnonzero(held).tolist()
        padded = blocks + [self.memory.num_blocks] * (self.memory.num_blocks - len(blocks))
        self.state = self("evict", self.state, jnp.array(padded, jnp.int32))
        return len(blocks)


class Diary:
    """What a prompt's blocks were, by all the tokens up to their end: cached now, cached once, published for anyone."""

    def __init__(self):
        self.cached, self.once, self.known = {}, set(), set()

    def explain(self, tokens, who):
        """The hit, and a reason for every other token."""
        paths = [tuple(tokens[: end * SIZE]) for end in range(1, len(tokens) // SIZE + 1)]
        hit = 0
        while hit < (len(tokens) - 1) // SIZE and self.follows(who, paths, hit):
            hit += 1
        reasons = dict.fromkeys(REASONS, 0)
        reasons["below_block"] = len(tokens) % SIZE
        for index in range(hit, len(paths)):
            path = paths[index]
            if (who, path) in self.cached:
                last = index == hit and len(path) == len(tokens)
                reasons["last_token" if last else "hole"] += SIZE
            elif (who, path) in self.once:
                reasons["evicted"] += SIZE
            elif path in self.known:
                reasons["other_key"] += SIZE
            else:
                reasons["cold"] += SIZE
        return hit, reasons

    def follows(self, who, paths, index):
        """Whether the block is cached, and continues the very content that is cached before it."""
        if (who, paths[index]) not in self.cached:
            return False
        before = self.cached[who, paths[index - 1]] if index else ()
        return self.cached[who, paths[index]] == (*before, self.cached[who, paths[index]][-1])

    def store(self, tokens, who, hit):
        before = self.cached[who, tuple(tokens[: hit * SIZE])] if hit else ()
        for end in range(hit + 1, len(tokens) // SIZE + 1):
            path = tuple(tokens[: end * SIZE])
            held = self.cached.get((who, path))
            before = held if held is not None and held[:-1] == before else (*before, object())
            self.cached[who, path] = before
            self.known.add(path)

    def evict(self, who, path):
        del self.cached[who, path]
        self.once.add((who, path))


@pytest.fixture(scope="module")
def server():
    return Server(MEMORY)


@pytest.mark.parametrize("seed", range(4))
def test_reasons_agree_with_a_diary_of_everything_ever_cached(server, seed):
    """Prompts of one tree of texts, evictions at random. No two blocks of the tree hold the same tokens."""
    draw, diary = random.Random(seed), Diary()
    server.state = server.memory.init()
    totals = dict.fromkeys(REASONS, 0)
    for _ in range(60):
        branch, length = draw.randrange(3), draw.randint(1, 24)
        tokens = [
            100 * (position // SIZE * 3 + (branch if position >= 8 else 0)) + position for position in range(length)
        ]
        who = (draw.choice([0, 0, 1]), draw.choice([0, 0, 5]))
        hit, reasons = diary.explain(tokens, who)
        found, counted = server.serve(tokens, adapter=who[0], salt=who[1])
        assert found == hit * SIZE
        assert {name: counted[name] for name in REASONS} == reasons
        assert counted["queries"] == len(tokens) == counted["hits"] + sum(reasons.values())
        diary.store(tokens, who, hit)
        totals = {name: totals[name] + reasons[name] for name in REASONS}
        if diary.cached and draw.random() < 0.5:
            owner, path = draw.choice(list(diary.cached))
            assert server.forget(owner, path[-SIZE:]) >= 1
            diary.evict(owner, path)
    assert all(totals[name] for name in REASONS if name != "alignment"), totals


def test_what_groups_of_layers_cannot_agree_on_is_lost_to_alignment():
    """Blocks of 4 and of 16: of a prompt of 14 cached tokens nothing is hit, though three blocks are cached."""
    memory = Paged(
        rows=1,
        max_len=24,
        block_size=4,
        num_blocks=64,
        groups=(Group(4), Group(16)),
        cache=PrefixCache(publish="on_compute", explain=True),
    )
    assert memory.alignment == 16
    server = Server(memory)
    tokens = list(range(100, 124))
    server.serve(tokens[:14])
    hit, counted = server.serve(tokens[:15])
    assert hit == 0
    assert {name: counted[name] for name in REASONS if counted[name]} == {"alignment": 12, "below_block": 3}
    hit, counted = server.serve(tokens[:22])
    assert hit == 0
    assert {name: counted[name] for name in REASONS if counted[name]} == {"alignment": 12, "cold": 8, "below_block": 2}
    hit, counted = server.serve(tokens[:24])
    assert hit == 16
    assert {name: counted[name] for name in REASONS if counted[name]} == {"alignment": 4, "cold": 4}
