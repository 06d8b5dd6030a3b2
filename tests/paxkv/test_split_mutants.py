"""Wrong ways to split blocks, to attend over some of them and to move them, which the tests must notice."""

import dataclasses
import types
from collections.abc import Callable

import pytest

from pallas_kernels import _contract, _stream
from pallas_kernels.paged_attention import api, reference
from paxkv import attend, split_paged, transfer
from tests.pallas_kernels import test_stream
from tests.pallas_kernels.mistakes import with_mistake
from tests.paxkv import test_kv_store, test_split_paged, test_transfer

pytestmark = pytest.mark.soak


def split():
    for dealing in test_split_paged.DEALINGS:
        test_split_paged.test_every_block_and_every_token_has_one_device(dealing)
        test_split_paged.test_a_block_is_copied_to_where_it_is_needed_bit_for_bit(dealing)
    for case in test_split_paged.ATTENDED:
        test_split_paged.test_all_devices_together_attend_over_all_blocks(*case)
    test_split_paged.test_partial_attentions_merge_by_their_weights()


def moved():
    for program in (test_transfer.find, test_transfer.take):
        program.clear_cache()  # it may be that of another mutant
    test_transfer.test_the_source_finds_the_full_blocks_of_a_prompt_and_those_of_no_other()
    test_transfer.test_what_is_there_stays_and_the_rest_gets_a_place_and_is_found_from_then_on()
    for refused in test_transfer.REFUSED:
        test_transfer.test_what_has_no_room_is_refused_and_changes_nothing(*refused)
    test_transfer.test_blocks_and_their_scales_arrive_as_they_were_and_nothing_else_changes()


def in_part():
    for dealt in ("in turn", "at random", "all to one"):
        for window in (None, 3, 37):
            test_stream.test_tables_of_some_blocks_each_answer_for_those_and_merge_to_the_whole(dealt, window)
    test_stream.test_an_entry_that_is_read_and_no_block_shows()


def firsts():
    test_kv_store.test_first_tokens_are_read_as_they_are_and_the_others_as_they_are_stored(
        "int4_token_head:first3", test_kv_store.MEMORY
    )
    test_kv_store.test_no_token_is_kept_as_one_of_another_row_nor_one_that_only_pads()


@dataclasses.dataclass(frozen=True)
class Place:
    """Where mistakes are made, and who must notice.

    Attributes:
      modules: the one with the mistake, then those through which the tests reach it.
      tests: the module of the tests, in which the names of the right functions are replaced.
      names: these names.
      check: runs the tests.
    """

    modules: tuple[types.ModuleType, ...]
    tests: types.ModuleType
    names: tuple[str, ...]
    check: Callable[[], None]


SPLIT = Place((split_paged,), test_split_paged, ("split_blocks", "merge_over"), split)
MOVED = Place((transfer,), test_transfer, ("find_blocks", "take_blocks", "pack", "unpack"), moved)
CONTRACT = Place((_contract, api), test_stream, ("paged_attention",), in_part)
STREAM = Place((_stream, reference, api), test_stream, ("paged_attention",), in_part)
TABLE = Place((reference, api), test_stream, ("paged_attention",), in_part)
FIRSTS = Place((attend,), test_kv_store, ("MemoryAttend",), firsts)

MISTAKES = {
    "a block that is none": (SPLIT, "(ids >= 0) & ", ""),
    "a block past the last": (SPLIT, " & (ids < self.num_blocks)", ""),
    "shard and place exchanged": (
        SPLIT,
        "ids % self.shards, ids // self.shards",
        "ids // self.shards, ids % self.shards",
    ),
    "run and place exchanged": (SPLIT, "ids // here, ids % here", "ids % here, ids // here"),
    "slots of the first token": (SPLIT, " + slot % self.block_size", ""),
    "slots of one device": (SPLIT, "self.own_blocks(slot // self.block_size)", "(slot // self.block_size)"),
    "lengths of whole blocks": (
        SPLIT,
        "jnp.clip(lengths[:, None] - begin, 0, self.block_size)",
        "self.block_size * (lengths[:, None] > begin)",
    ),
    "no window in decode": (SPLIT, " and spec.window is None:", ":"),
    "short lengths of a sparse table": (SPLIT, "order = None", "order = order"),
    "overflow of an empty entry": (SPLIT, "jnp.minimum(order, self.blocks_per_seq)", "order"),
    "a column late": (SPLIT, "dtype=jnp.int32) - 1, width)", "dtype=jnp.int32), width)"),
    "columns for order": (SPLIT, ".set(logical, mode", ".set(column, mode"),
    "weights over the largest": (SPLIT, "jnp.exp(lse - total)", "jnp.exp(lse - largest)"),
    "NaN is nothing": (SPLIT, "seen | jnp.isnan(total)", "seen"),
    "nothing is NaN": (SPLIT, "jnp.where(seen, largest, 0)", "largest"),
    "sums that overflow": (
        SPLIT,
        "largest = jnp.max(every, axis=0)",
        "largest = jnp.minimum(jnp.max(every, axis=0), 1)",
    ),
    "what others lack": (
        SPLIT,
        'mode="fill", fill_value=0)\n        return from_bits',
        'mode="clip")\n        return from_bits',
    ),
    "places of the whole": (SPLIT, "blocks.at[self.own_blocks(dst)]", "blocks.at[dst]"),
    "copies left out": (SPLIT, "jnp.any(dst < self.num_blocks)", "jnp.all(dst < self.num_blocks)"),
    "copies left out where a block is last": (SPLIT, "jnp.any(dst < self.num_blocks)", "dst[-1] < self.num_blocks - 1"),
    "the last block is not found": (MOVED, "content, tokens + 1)", "content, tokens)"),
    "the last block moves again": (
        MOVED,
        "Ask(tokens + 1, tokens + 1, tokens + 1, content)",
        "Ask(tokens, tokens, tokens, content)",
    ),
    "room for what is there": (MOVED, "tokens - there, 0)", "tokens, 0)"),
    "what is there is written": (MOVED, "(column >= there // size) & ", ""),
    "names of other tokens": (MOVED, "content.tokens.at[there + jnp", "content.tokens.at[jnp"),
    "no names": (MOVED, "state = memory.publish(state, own, cu_lens, width)", ""),
    "a row stays": (MOVED, "state = memory.release(state, rows == row)", ""),
    "refused is there": (MOVED, "jnp.where(outcome == Outcome.OK, there // size, 0)", "there // size"),
    "counted twice": (MOVED, "clipped=jnp.zeros(1, jnp.int32)", "clipped=layer.clipped"),
    "places in order": (MOVED, "memory.own_blocks(ids)", "every"),
    "blocks by their places": (MOVED, "cache, every, memory", "cache, ids, memory"),
    "other formats": (MOVED, "if kinds[0] != kinds[1]:", "if False:"),
    "the newest block may be none": (
        CONTRACT,
        "(order <= (positions // block_size)[:, None])",
        "(order < (positions // block_size)[:, None])",
    ),
    "blocks behind the window must be some": (CONTRACT, "(order >= first[:, None]) & ", ""),
    "a window of one more": (
        CONTRACT,
        "- (window - 1), 0) // block_size\n        seen",
        "- window, 0) // block_size\n        seen",
    ),
    "room in the table": (CONTRACT, "MAX_INT32 if block_order is not None else ", ""),
    "all entries must be blocks": (CONTRACT, "jnp.any(seen & ~is_block", "jnp.any(~is_block"),
    "positions before the span": (STREAM, "(positions >= see[0][:, None]) & ", ""),
    "positions behind the span": (STREAM, " & (positions < see[1][:, None])", ""),
    "positions for places": (STREAM, "start, end = part.source.sparse.span_of(some.seq_ids, start, end)", "pass"),
    "without a part of a block": (TABLE, "(ends + (block_size - 1)) // block_size", "ends // block_size"),
    "from the next block": (
        TABLE,
        "first, last = starts // block_size",
        "first, last = (starts + block_size - 1) // block_size",
    ),
    "positions of the first token": (TABLE, " + places % block_size", ""),
    "one first token more": (FIRSTS, "(position < precise)", "(position <= precise)"),
    "rows that begin late": (FIRSTS, 'side="right"', 'side="left"'),
    "positions in the batch": (
        FIRSTS,
        "self.memory.seqs(self.state).lengths[owner] - (self.cu_lens[owner + 1] - token)",
        "token - self.cu_lens[owner]",
    ),
    "padding in the last row": (FIRSTS, "(row < rows) & ", ""),
    "places of the row before": (FIRSTS, "owner * precise + position", "owner + position"),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_noticed(name, monkeypatch):
    place, right, wrong = MISTAKES[name]
    copy = with_mistake(monkeypatch, place.modules, {right: wrong})
    for function in place.names:
        monkeypatch.setattr(place.tests, function, getattr(copy, function))
    with pytest.raises((Exception, pytest.fail.Exception)):
        place.check()


@pytest.mark.parametrize(
    "place", [SPLIT, MOVED, CONTRACT, STREAM, TABLE, FIRSTS], ids=lambda place: place.modules[0].__name__
)
def test_what_is_right_is_not(place, monkeypatch):
    copy = with_mistake(monkeypatch, place.modules, {})
    for function in place.names:
        monkeypatch.setattr(place.tests, function, getattr(copy, function))
    place.check()
