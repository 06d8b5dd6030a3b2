"""What blocks hold: found only if it is the same in truth, whatever the hash says, and given up in the order asked."""

import dataclasses
import functools
import random

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from paxkv import hash_table, prefix_cache
from paxkv.prefix_cache import BROKEN, Filled, PrefixCache, find, forget, init_contents, publish, ranking, touch
from tests.paxkv import unchecked
from tests.paxkv.test_chain_hash import plain_hash, plain_key

NUM_BLOCKS, SIZE = 64, 2  # blocks, and tokens in each
ENTRIES = 6  # in a call of publish
PROMPT = 5  # blocks in a call of find
NOBODY = (0, 0, 0)
policy = functools.partial(PrefixCache, publish="on_compute")


def ints(values) -> jax.Array:
    return jnp.asarray(np.asarray(values, np.int32))


def blocks_of(tokens: list[int]) -> list[list[int]]:
    return [tokens[i : i + SIZE] for i in range(0, len(tokens) - SIZE + 1, SIZE)]


def key_of(config: PrefixCache, tokens: list[int], identity, group: int = 0) -> tuple[int, int]:
    return (0, 0) if config.collide else plain_key(plain_hash(tokens, identity), group)


@dataclasses.dataclass
class Chain:
    """A row that publishes: its tokens so far and the content of its last block."""

    tokens: list[int] = dataclasses.field(default_factory=list)
    last: int = 0
    identity: tuple[int, int, int] = NOBODY
    priority: int = 0


@functools.cache
def compiled(config: PrefixCache, width: int) -> dict:
    """Compiled as the code is now."""
    known = {
        "publish": lambda contents, filled: publish(config, contents, filled, width),
        "find": lambda contents, *prompt: find(contents, *prompt[:3], 0, prompt[3]),
        "forget": lambda contents, ids: forget(config, contents, ids)[0],
        "touch": lambda contents, ids, priority: touch(config, contents, ids, priority),
        "ranking": lambda contents: ranking(config, contents),
    }
    quickly = {"xla_backend_optimization_level": 0}  # compiling takes longer than all the tests run
    return {name: jax.jit(function, compiler_options=quickly) for name, function in known.items()}


def pack(config: PrefixCache, rows: list[tuple[Chain, list[int], list[int]]]) -> Filled:
    """Blocks that became full: of each row its chain, the blocks, and the tokens in them."""
    entries = []
    for chain, blocks, tokens in rows:
        for index, (block, span) in enumerate(zip(blocks, blocks_of(tokens), strict=True)):
            until = chain.tokens + tokens[: (index + 1) * SIZE]
            keys = key_of(config, until, chain.identity), key_of(config, until, NOBODY)
            entries.append((True, index == 0, block, *keys, span, chain.last, chain.identity, chain.priority))
    # Padding is full of what would do harm if it were looked at.
    padding = (False, False, 0, (0, 0), (0, 0), [0] * SIZE, 0, NOBODY, 99)
    columns = list(zip(*(entries + [padding] * (ENTRIES - len(entries))), strict=True))
    valid, starts, blocks, keys, plain_keys, tokens, parents, identities, priorities = columns
    return Filled(
        valid=jnp.asarray(np.array(valid)),
        starts=jnp.asarray(np.array(starts)),
        blocks=ints(blocks),
        keys=jnp.asarray(np.array(keys, np.uint32)),
        tokens=ints(tokens),
        parents=ints(parents),
        identities=ints(identities),
        priorities=ints(priorities),
        plain_keys=jnp.asarray(np.array(plain_keys, np.uint32)) if config.explain else None,
    )


class Cache:
    """The contents of some blocks, published row by row, with every answer checked for consistency."""

    def __init__(self, config: PrefixCache | None = None, width: int = ENTRIES):
        self.config = config = config or policy()
        self.run = compiled(config, width)
        self.contents = init_contents(config, NUM_BLOCKS, SIZE)

    def publish(self, *rows: tuple[Chain, list[int], list[int]]) -> tuple[list[list[int]], list[list[int]]]:
        """Returns contents and holders by row, and takes the chains further."""
        self.contents, ids, holders = self.run["publish"](self.contents, pack(self.config, list(rows)))
        ids, holders = np.asarray(ids).tolist(), np.asarray(holders).tolist()
        by_row, at = ([], []), 0
        for chain, blocks, tokens in rows:
            by_row[0].append(ids[at : at + len(blocks)])
            by_row[1].append(holders[at : at + len(blocks)])
            at += len(blocks)
            chain.tokens = chain.tokens + tokens
            chain.last = by_row[0][-1][-1]
        return by_row

    def store(self, blocks: list[int], tokens: list[int], **of) -> Chain:
        """A new row with these blocks."""
        chain = Chain(**of)
        self.publish((chain, blocks, tokens))
        return chain

    def find(self, tokens: list[int], identity=NOBODY, limit: int = PROMPT) -> prefix_cache.Found:
        spans = blocks_of(tokens)
        spans += [[-1] * SIZE] * (PROMPT - len(spans))
        flat = [token for span in spans for token in span]
        keys = [key_of(self.config, flat[: (i + 1) * SIZE], identity) for i in range(PROMPT)]
        limit = min(limit, len(tokens) // SIZE)
        return self.run["find"](
            self.contents, jnp.asarray(np.array(keys, np.uint32)), ints(spans), ints(identity), jnp.int32(limit)
        )

    def hit(self, tokens: list[int], identity=NOBODY, limit: int = PROMPT) -> list[int]:
        """The blocks that can be used."""
        found = self.find(tokens, identity, limit)
        return np.asarray(found.blocks)[: int(found.hits)].tolist()

    def forget(self, *blocks: int) -> None:
        self.contents = self.run["forget"](self.contents, ints([*blocks, *[NUM_BLOCKS] * (ENTRIES - len(blocks))]))

    def touch(self, *blocks: int, priority: int = 0) -> None:
        ids = ints([*blocks, *[NUM_BLOCKS] * (ENTRIES - len(blocks))])
        self.contents = self.run["touch"](self.contents, ids, jnp.int32(priority))

    def order(self, *blocks: int) -> list[int]:
        """In which order these blocks go, if the queue has them as they are listed."""
        ranks = np.asarray(self.run["ranking"](self.contents))
        return sorted(blocks, key=lambda block: ranks[block])

    def content(self, block: int) -> int:
        return int(prefix_cache.content_of(self.contents, ints([block]))[0])


# ---- hits ----------------------------------------------------------------------------------------------------------


def test_a_prompt_hits_the_blocks_it_begins_with():
    cache = Cache()
    cache.store([4, 7, 2], [1, 2, 3, 4, 5, 6])
    assert cache.hit([1, 2, 3, 4, 5, 6, 7, 8]) == [4, 7, 2]
    assert cache.hit([1, 2, 3, 4, 9, 9]) == [4, 7]
    assert cache.hit([1, 2, 3, 4], limit=1) == [4]
    assert cache.hit([1, 2, 3, 4], limit=0) == []
    assert cache.hit([2, 1, 3, 4]) == []
    assert cache.hit([3, 4, 5, 6]) == []  # cached, but not at the beginning


@pytest.mark.parametrize("identity", [(1, 0, 0), (0, 1, 0), (0, 0, 1)], ids=["adapter", "salt", "epoch"])
@pytest.mark.parametrize("collide", [False, True])
def test_another_adapter_salt_or_epoch_hits_nothing(identity, collide):
    cache = Cache(policy(collide=collide))
    cache.store([0, 1], [1, 2, 3, 4])
    assert cache.hit([1, 2, 3, 4], identity) == []
    cache.store([2, 3], [1, 2, 3, 4], identity=identity)
    assert cache.hit([1, 2, 3, 4], identity) == [2, 3]
    assert cache.hit([1, 2, 3, 4]) == [0, 1]


def test_a_lookup_stops_at_the_first_hole():
    cache = Cache()
    cache.store([0, 1, 2, 3], [1, 2, 3, 4, 5, 6, 7, 8])
    cache.forget(1)
    assert cache.hit([1, 2, 3, 4, 5, 6, 7, 8]) == [0]
    found = cache.find([1, 2, 3, 4, 5, 6, 7, 8])
    assert np.asarray(found.present).tolist() == [True, False, True, True, False]
    assert np.asarray(found.linked).tolist() == [True, False, False, True, False]


def test_what_continues_an_evicted_block_is_not_reached_again():
    """Equal tokens get another content, and the old child says that it continues the old one."""
    cache = Cache()
    cache.store([0, 1], [1, 2, 3, 4])
    cache.forget(0)
    cache.store([5], [1, 2])
    assert cache.hit([1, 2, 3, 4]) == [5]
    chain = Chain([1, 2], cache.content(5))
    cache.publish((chain, [6], [3, 4]))
    assert cache.hit([1, 2, 3, 4]) == [5, 6]  # the first candidate of the second key is the old child


def test_a_group_finds_only_what_begins_at_its_own_root():
    config = policy()
    contents = init_contents(config, NUM_BLOCKS, SIZE)
    keys = jnp.asarray([key_of(config, [1, 2], NOBODY, group=1)], jnp.uint32)
    one = Filled(
        valid=jnp.ones(1, jnp.bool),
        starts=None,
        blocks=ints([3]),
        keys=keys,
        tokens=ints([[1, 2]]),
        parents=ints([-1]),
        identities=ints([NOBODY]),
        priorities=ints([0]),
        plain_keys=None,
    )
    contents, _, _ = jax.jit(lambda contents: publish(config, contents, one, 1))(contents)
    hits = [
        int(jax.jit(find, static_argnums=4)(contents, keys, one.tokens, ints(NOBODY), root, jnp.int32(1)).hits)
        for root in (0, -1, -2)
    ]
    assert hits == [0, 1, 0]


# ---- collisions ----------------------------------------------------------------------------------------------------


def test_blocks_whose_keys_collide_are_told_apart_by_what_they_hold():
    cache = Cache(policy(collide=True))
    cache.store([0, 1, 2], [1, 2, 3, 4, 5, 6])
    cache.store([3, 4], [7, 8, 3, 4])  # equal tokens, another parent
    assert cache.hit([1, 2, 3, 4, 5, 6]) == [0, 1, 2]
    assert cache.hit([7, 8, 3, 4, 5, 6]) == [3, 4]
    assert cache.hit([3, 4]) == []
    assert cache.hit([9, 9]) == []


def test_equal_tokens_twice_in_one_prompt_are_two_contents_though_their_keys_collide():
    cache = Cache(policy(collide=True))
    cache.store([0, 1, 2], [5, 5, 5, 5, 5, 5])
    assert len({cache.content(block) for block in range(3)}) == 3
    assert cache.hit([5, 5, 5, 5, 5, 5]) == [0, 1, 2]
    assert cache.hit([5, 5, 5, 5, 6, 6]) == [0, 1]


def test_a_table_that_is_full_publishes_nothing_more_of_a_row():
    cache = Cache(policy(collide=True), width=2)
    for block in range(hash_table.WAYS - 1):
        cache.store([block], [block, block])
    chain = Chain()
    (ids,), _ = cache.publish((chain, [20, 21, 22], [70, 70, 71, 71, 72, 72]))
    assert ids[0] > 0
    assert ids[1:] == [BROKEN, BROKEN]
    assert [cache.content(block) for block in (20, 21, 22)] == [ids[0], 0, 0]
    cache.forget(0)
    (ids,), _ = cache.publish((chain, [23], [73, 73]))  # there is room again, but what came before is unknown
    assert ids == [BROKEN]
    assert cache.hit([70, 70, 71, 71]) == [20]
    other = cache.store([24], [80, 80])
    assert other.last > 0


# In rounds of a few blocks or of all, with keys of their own or the same one.
SETTLED = pytest.mark.parametrize(("collide", "width"), [(False, 2), (True, 2), (False, ENTRIES), (True, ENTRIES)])


# ---- equal contents ------------------------------------------------------------------------------------------------


def test_copies_are_one_content_and_any_of_them_will_do():
    cache = Cache()
    cache.store([0, 1], [1, 2, 3, 4])
    cache.store([2, 3], [1, 2, 3, 4])
    assert cache.content(0) == cache.content(2)
    assert cache.content(1) == cache.content(3)
    cache.forget(0)
    cache.forget(3)
    assert cache.hit([1, 2, 3, 4]) == [2, 1]  # the copies mix


@SETTLED
def test_equal_contents_within_a_call_are_one(collide, width):
    cache = Cache(policy(collide=collide), width)
    rows = [(Chain(), [0, 1], [1, 2, 3, 4]), (Chain(), [2, 3], [1, 2, 3, 4]), (Chain(), [4, 5], [1, 2, 9, 9])]
    ids, holders = cache.publish(*rows)
    assert ids[0] == ids[1]
    assert ids[0][0] == ids[2][0]
    assert len({*ids[0], *ids[2]}) == 3
    assert holders == [[0, 1], [2, 3], [4, 5]]


@SETTLED
def test_a_row_of_blocks_finds_the_one_that_continues_it_among_orphans_of_equal_tokens(collide, width):
    cache = Cache(policy(collide=collide), width)
    cache.store([0, 1, 2], [1, 2, 3, 4, 5, 6])
    cache.forget(0)
    cache.store([3, 4, 5], [1, 2, 3, 4, 5, 6])  # 1 and 2 continue what is gone
    (ids,), _ = cache.publish((Chain(), [6, 7, 8], [1, 2, 3, 4, 5, 6]))
    assert ids == [cache.content(block) for block in (3, 4, 5)]


@SETTLED
def test_merging_points_to_the_block_that_held_it_before(collide, width):
    cache = Cache(policy(duplicates="merge", collide=collide), width)
    cache.store([10, 11], [1, 2, 3, 4])
    rows = [(Chain(), [0, 1, 2], [1, 2, 3, 4, 5, 6]), (Chain(), [3, 4, 5], [1, 2, 3, 4, 5, 6])]
    ids, holders = cache.publish(*rows)
    assert holders == [[10, 11, 2], [10, 11, 2]]
    assert ids[0] == ids[1] == [cache.content(block) for block in (10, 11, 2)]
    assert [cache.content(block) for block in (0, 1, 3, 4, 5)] == [0] * 5


def test_a_forgotten_block_holds_nothing_and_the_others_what_they_did():
    cache = Cache()
    cache.store([0, 1, 2], [1, 2, 3, 4, 5, 6])
    before = np.asarray(cache.contents.records)
    cache.forget(2, 40)
    cache.forget(2)
    after = np.asarray(cache.contents.records)
    assert not after[2].any()
    np.testing.assert_array_equal(np.delete(after, 2, axis=0), np.delete(before, 2, axis=0))
    assert cache.hit([1, 2, 3, 4, 5, 6]) == [0, 1]


# ---- against a list of contents ------------------------------------------------------------------------------------


class PlainCache:
    """Contents as a list, searched from its start; ids are whatever the cache said they are."""

    def __init__(self, merge: bool, collide: bool):
        self.merge, self.collide = merge, collide
        self.blocks: dict[int, tuple] = {}  # block -> (content, parent, tokens, identity)
        self.seen: set[int] = set()

    def holders(self, parent: int, tokens: list[int], identity) -> list[int]:
        return [b for b, (_, *what) in self.blocks.items() if what == [parent, tokens, identity]]

    def publish(self, chain: Chain, block: int, parent: int, tokens: list[int], said: tuple[int, int]) -> None:
        """Checks what the cache said of one block: its content and its holder."""
        content, holder = said
        known = self.holders(parent, tokens, chain.identity) if parent != BROKEN else []
        if known and self.merge:
            assert holder in known
            assert content == self.blocks[holder][0]
            return
        assert holder == block
        if parent == BROKEN or (self.collide and len(self.blocks) >= hash_table.WAYS):
            assert content == BROKEN
            return
        if known:
            assert content == self.blocks[known[0]][0]
        else:
            assert content not in self.seen  # never used before
            assert content > parent
        self.seen.add(content)
        self.blocks[block] = content, parent, tokens, chain.identity

    def walk(self, spans: list[list[int]], identity) -> list[list[int]]:
        """For each block of a prompt that hits, the blocks that will do."""
        good, parent = [], 0
        for span in spans:
            holders = self.holders(parent, span, identity)
            if not holders:
                break
            good.append(holders)
            parent = self.blocks[holders[0]][0]
        return good


@pytest.mark.parametrize("duplicates", ["keep", "merge"])
@SETTLED
def test_random_publishing_agrees_with_a_list(collide, duplicates, width):
    config = policy(duplicates=duplicates, collide=collide)
    cache, plain = Cache(config, width), PlainCache(duplicates == "merge", collide)
    rng = random.Random(f"{collide} {duplicates} {width}")
    chains: list[Chain] = []

    def some_tokens(count: int) -> list[int]:
        return [rng.choice([7, 8]) for _ in range(count)]

    def some_identity() -> tuple[int, int, int]:
        return rng.choice([NOBODY] * 6 + [(1, 0, 0), (0, 0, 1)])

    hits = broken = 0
    for _ in range(200):
        kind = rng.choice(["publish", "publish", "find", "find", "find", "forget"])
        if len(plain.blocks) > NUM_BLOCKS - ENTRIES:
            kind = "forget"
        if kind == "publish":
            # When the last entries go, who gets them depends on the order: then one row at a time.
            several = not collide or len(plain.blocks) + ENTRIES <= hash_table.WAYS
            while len(chains) < 3:
                chains.append(Chain(identity=some_identity()))
            rows = rng.sample(chains, rng.randint(1, 3) if several else 1)
            spare = [block for block in range(NUM_BLOCKS) if block not in plain.blocks]
            rng.shuffle(spare)
            calls, before = [], []
            for chain, count in zip(rows, rng.choice([(1, 1, 1), (2, 1, 3), (3, 2, 1)]), strict=False):
                before.append(dataclasses.replace(chain))
                calls.append((chain, [spare.pop() for _ in range(count)], some_tokens(count * SIZE)))
            ids, holders = cache.publish(*calls)
            for row, (_, blocks, tokens) in enumerate(calls):
                parent = before[row].last
                for block, span, *said in zip(blocks, blocks_of(tokens), ids[row], holders[row], strict=True):
                    plain.publish(before[row], block, parent, span, tuple(said))
                    parent = said[0]
                    broken += parent == BROKEN
            chains = [chain for chain in chains if len(chain.tokens) < PROMPT * SIZE and rng.random() < 0.8]
        elif kind == "find":
            tokens, identity, limit = (
                some_tokens(rng.randint(1, PROMPT) * SIZE),
                some_identity(),
                rng.randint(0, PROMPT),
            )
            good = plain.walk(blocks_of(tokens)[:limit], identity)
            hit = cache.hit(tokens, identity, limit)
            assert len(hit) == len(good)
            assert all(block in choices for block, choices in zip(hit, good, strict=True))
            hits += len(hit)
            if hit and rng.random() < 0.5:  # a row that begins with what was hit
                last = plain.blocks[hit[-1]][0]
                chains.append(Chain(tokens[: len(hit) * SIZE], last, identity))
        elif plain.blocks:
            gone = rng.sample(sorted(plain.blocks), rng.randint(1, min(ENTRIES, len(plain.blocks))))
            cache.forget(*gone)
            for block in gone:
                del plain.blocks[block]
        for block in range(NUM_BLOCKS):
            content, parent, *_ = np.asarray(cache.contents.records)[block].tolist()
            assert (content, parent) == plain.blocks.get(block, (0, 0))[:2]
    assert hits > 20
    assert (broken > 0) == collide


def test_blocks_that_each_begin_a_row_need_no_chain_of_one_another():
    """As in a step that decodes: no entry follows another."""
    cache, other = Cache(), Cache()
    chains = [Chain([1, 2], last=50), Chain([1, 2], last=50), Chain()]
    filled = pack(cache.config, [(chain, [block], [3, 4]) for block, chain in enumerate(chains)])
    first = cache.run["publish"](cache.contents, filled._replace(starts=None))
    again = other.run["publish"](other.contents, filled)
    for one, two in zip(jax.tree.leaves(first), jax.tree.leaves(again), strict=True):
        np.testing.assert_array_equal(one, two)
    ids = np.asarray(first[1])[:3].tolist()
    assert ids[0] == ids[1] != ids[2]


# ---- eviction ------------------------------------------------------------------------------------------------------


def test_least_recently_used_leaves_the_order_to_the_queue():
    cache = Cache()
    cache.store([0], [1, 2])
    assert cache.run["ranking"](cache.contents) is None
    assert cache.contents.ranks.size == 0


@pytest.mark.parametrize("eviction", ["lfu", "fifo", "priority"])
def test_blocks_that_hold_nothing_go_first_whatever_they_held_before(eviction):
    cache = Cache(policy(duplicates="merge", eviction=eviction))
    cache.store([3], [1, 2], priority=-5)
    cache.store([4], [3, 4], priority=-(2**31) + 1)
    cache.touch(3, priority=-7)
    cache.forget(3)
    assert cache.order(4, 3, 9) == [3, 9, 4]


def test_least_frequently_used_counts_publications_and_touches():
    cache = Cache(policy(duplicates="merge", eviction="lfu"))
    for block in range(4):
        cache.store([block], [block, 9])
    cache.touch(0, 2)
    cache.touch(2, 1)
    assert cache.order(2, 0, 1, 3) == [3, 0, 1, 2]
    cache.forget(2)
    cache.store([2], [5, 5])  # begins anew
    assert cache.order(0, 1, 2, 3) == [2, 3, 0, 1]


def test_first_in_first_out_follows_publication_and_no_touch():
    cache = Cache(policy(duplicates="merge", eviction="fifo"))
    cache.store([5], [1, 1])
    cache.store([3], [2, 2])
    cache.publish((Chain(), [4], [3, 3]), (Chain(), [0], [4, 4]))
    cache.touch(5)
    assert cache.order(0, 3, 4, 5) == [5, 3, 4, 0]


def test_priority_is_that_of_who_published_or_touched_it_last():
    cache = Cache(policy(duplicates="merge", eviction="priority"))
    cache.store([0], [1, 1], priority=5)
    cache.store([1], [2, 2], priority=-1)
    cache.store([2], [3, 3], priority=2)
    assert cache.order(0, 1, 2) == [1, 2, 0]
    cache.touch(0, priority=0)
    cache.touch(1, priority=9)
    assert cache.order(0, 1, 2) == [0, 2, 1]


@pytest.mark.parametrize(("eviction", "order"), [("lfu", [2, 1, 0]), ("fifo", [0, 1, 2]), ("priority", [2, 0, 1])])
def test_merging_with_a_block_counts_as_a_use_of_it(eviction, order):
    cache = Cache(policy(duplicates="merge", eviction=eviction))
    for block, priority in ((0, 1), (1, 8), (2, 0)):
        cache.store([block], [block, block], priority=priority)
    cache.store([9], [0, 0], priority=7)
    cache.store([9], [0, 0], priority=7)
    cache.store([9], [1, 1], priority=8)
    assert cache.order(0, 1, 2) == order
    assert cache.content(9) == 0


# ---- why a prompt did not hit --------------------------------------------------------------------------------------


def test_misses_are_explained_by_what_was_cached_once_and_for_whom():
    cache = Cache(policy(explain=True))
    cache.store([0, 1], [1, 2, 3, 4], identity=(7, 0, 0))
    keys = [key_of(cache.config, tokens, (7, 0, 0)) for tokens in ([1, 2], [1, 2, 3, 4], [9, 9])]
    plain = [key_of(cache.config, tokens, NOBODY) for tokens in ([1, 2], [1, 2, 3, 4], [9, 9])]

    def remembered(tags: jax.Array, keys: list) -> list[bool]:
        return np.asarray(prefix_cache.remembers(tags, jnp.asarray(np.array(keys, np.uint32)))).tolist()

    assert remembered(cache.contents.known_tags, plain) == [True, True, False]
    assert remembered(cache.contents.evicted_tags, keys) == [False] * 3
    cache.forget(1)
    assert remembered(cache.contents.evicted_tags, keys) == [False, True, False]
    assert remembered(cache.contents.known_tags, plain) == [True, True, False]


def test_nothing_is_kept_to_explain_misses_unless_asked_for():
    contents = init_contents(PrefixCache(), NUM_BLOCKS, SIZE)
    assert contents.evicted_tags.size == contents.known_tags.size == 0


# ---- refusals ------------------------------------------------------------------------------------------------------


def test_merging_before_the_data_is_there_is_refused():
    with pytest.raises(ValueError, match="duplicates: 'merge' needs publish='on_compute'"):
        PrefixCache(duplicates="merge")


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"explain": "yes"}, "explain must be True or False, got 'yes' of type str"),
        ({"collide": 1}, "collide must be True or False, got 1 of type int"),
        ({"kv_format": None}, "kv_format: expected a str, got None"),
    ],
)
def test_what_only_looks_like_an_option_is_refused(change, said):
    with pytest.raises(ValueError, match=said):
        unchecked.replace(PrefixCache(), **change)
