import dataclasses

import pytest

from paxkv.config import MemoryConfig, make_memory
from paxkv.contiguous import VAttention
from paxkv.model_shapes import KVShape
from paxkv.paged import Paged
from paxkv.reserved import Reserved
from paxkv.windows import Group

SHAPE = KVShape(layers=2, kv_heads=1, head_dim=16, element_bytes=4)  # 64 B a token and tensor, 256 B in all
BUDGET = 100 * 256 + 255  # a hundred tokens, and not quite another one


def make(budget=BUDGET, rows=6, max_len=40, **knobs):
    return make_memory(MemoryConfig(**knobs), SHAPE, budget, rows, max_len)


def test_paged_memory_has_the_whole_blocks_that_the_budget_pays_for():
    assert make(kind="paged", block_size=16) == Paged(6, 40, block_size=16, num_blocks=6)
    assert make(kind="paged", block_size=3) == Paged(6, 40, block_size=3, num_blocks=33)


def test_paged_memory_of_a_model_with_windows_has_groups_whose_blocks_hold_fewer_layers():
    config = MemoryConfig(block_size=16, swap_space="8192 B")
    made = {
        free: make_memory(
            dataclasses.replace(config, free_windows=free), SHAPE, BUDGET, 6, 40, windows=(8, None), max_chunk=5
        )
        for free in (True, False)
    }
    groups = (Group(16, layers=(1,)), Group(16, 8, layers=(0,)))
    assert made[True] == Paged(6, 40, block_size=16, num_blocks=12, groups=groups, max_chunk=5, host_blocks=4)
    assert made[False] == Paged(6, 40, block_size=16, num_blocks=6, host_blocks=2)
    assert make_memory(config, SHAPE, BUDGET, 6, 40, windows=(None, None), max_chunk=5) == made[False]


def test_a_number_of_blocks_takes_the_place_of_the_budget():
    assert make(kind="paged", block_size=16, num_blocks=9) == Paged(6, 40, block_size=16, num_blocks=9)


def test_vattention_has_the_whole_page_groups_that_the_budget_pays_for():
    # A page in each of 4 tensors: 24 of 256 B each make 96 tokens, 16 of 384 B as many with tokens across pages.
    expected = VAttention(6, 40, num_groups=25, page_bytes=256, token_bytes=64, buffers=4)
    assert make(kind="vattention", page="256 B") == expected
    assert make(kind="vattention", page="96 B").num_groups == BUDGET // 384
    changed = make(
        kind="vattention",
        page="256 B",
        lookahead_steps=3,
        background_groups=0,
        deferred_reclaim=False,
        watermark="0.1",
    )
    assert changed == VAttention(6, 40, 25, 256, 64, 4, 3, 0, False, 2)


def test_vattention_takes_models_of_a_hundred_layers_and_more():
    # A fixed bound below 100 left out Llama-405B, which has 126.
    memory = make_memory(MemoryConfig(kind="vattention"), KVShape(126, 8, 128), 126 * 2**24, 4, 8192)
    assert (memory.buffers, memory.num_groups) == (252, 4)


@pytest.mark.parametrize("policy", ["max", "pow2", "oracle"])
def test_reserved_memory_has_the_whole_smallest_ranges_that_the_budget_pays_for(policy):
    assert make(kind=f"reserved_{policy}") == Reserved(6, 40, num_slots=100, policy=policy)
    assert make(kind=f"reserved_{policy}", min_block=8) == Reserved(6, 40, num_slots=96, policy=policy, min_block=8)


def test_a_watermark_is_exact_and_rounded_down():
    assert make(kind="paged", block_size=1, watermark="0.29").watermark_blocks == 29  # int(0.29 * 100) is 28
    assert make(kind="paged", block_size=16, watermark="0.3").watermark_blocks == 1
    assert make(kind="paged", block_size=16, watermark="0").watermark_blocks == 0


@pytest.mark.parametrize(
    ("kind", "knob", "value"),
    [
        ("paged", "page", "64 KiB"),
        ("paged", "min_block", 4),
        ("paged", "deferred_reclaim", False),
        ("vattention", "block_size", 8),
        ("vattention", "free_windows", False),
        ("vattention", "num_blocks", 8),
        ("vattention", "min_block", 2),
        ("reserved_max", "watermark", "0.1"),
        ("reserved_pow2", "lookahead_steps", 3),
        ("reserved_oracle", "background_groups", 3),
    ],
)
def test_a_knob_of_another_memory_is_refused(kind, knob, value):
    with pytest.raises(ValueError, match=f"^{knob}: expected its default for memory of kind '{kind}'.*{kind} has"):
        make(kind=kind, **{knob: value})


@pytest.mark.parametrize(
    ("knobs", "unit_bytes"),
    [
        ({"kind": "paged", "block_size": 16}, 16 * 256),
        ({"kind": "vattention", "page": "4 KiB"}, 4 * 4096),
        ({"kind": "reserved_max"}, 256),
        ({"kind": "reserved_oracle", "min_block": 4}, 4 * 256),
    ],
)
def test_a_budget_below_one_unit_is_refused(knobs, unit_bytes):
    assert make(budget=unit_bytes, **knobs).num_units == 1
    with pytest.raises(ValueError, match=rf"^budget_bytes: expected at least {unit_bytes}, one .*got {unit_bytes - 1}"):
        make(budget=unit_bytes - 1, **knobs)


@pytest.mark.parametrize(
    ("knobs", "message"),
    [
        ({"kind": "paged", "block_size": 0}, "block_size must be"),
        ({"kind": "paged", "num_blocks": 0}, "num_blocks must be"),
        ({"kind": "paged", "watermark": "1.5"}, "watermark must be"),
        ({"kind": "vattention", "page": "64 kb"}, "page must"),
        ({"kind": "vattention", "page": "0 B"}, "page_bytes must be"),
        ({"kind": "reserved_max", "min_block": 3}, "min_block must be a power of two"),
        ({"kind": "reserved_max", "min_block": 0}, "min_block must be"),
    ],
)
def test_a_knob_out_of_range_is_refused(knobs, message):
    with pytest.raises(ValueError, match=message):
        make(**knobs)


def test_an_unknown_kind_is_refused_where_types_are_not_checked():
    config = MemoryConfig()
    object.__setattr__(config, "kind", "pagged")
    with pytest.raises(ValueError, match="kind: expected one of paged, vattention, reserved_max"):
        make_memory(config, SHAPE, BUDGET, 6, 40)
