import dataclasses
import math
from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paxkv.capacity import (
    KVShape,
    blocks_for,
    expected_blocks,
    expected_concurrency,
    kv_budget,
    model_shape,
    packed_requests,
    paged_concurrency,
    parse_size,
    plan_blocks,
    reserved_concurrency,
    slack_slots,
    tokens_in,
    waste_by_kind,
)

quick = settings(deadline=None, max_examples=50)  # no deadline: a busy machine is no failure

LLAMA_70B, LLAMA_13B, OPT_13B = model_shape("Llama-2-70B"), model_shape("Llama-2-13B"), model_shape("OPT-13B")
TINY = KVShape(layers=2, kv_heads=2, head_dim=4)  # 64 bytes per token

positive = st.integers(1, 10**30)


@st.composite
def shapes(draw):
    return KVShape(
        layers=draw(st.integers(1, 200)),
        kv_heads=draw(st.integers(1, 128)),
        head_dim=2 * draw(st.integers(1, 256)),
        element_bytes=draw(st.sampled_from([1, 2, 4, Fraction(1, 2)])),
        scale_bytes_per_token_head=draw(st.integers(0, 8)),
        scale_bytes_per_block_head=draw(st.integers(0, 8)),
    )


@pytest.mark.parametrize(
    ("memory", "element_bytes", "num_blocks", "tokens"),
    [
        ("120 GB", 2, 22_888, 366_210),
        ("112 GiB", 2, 22_937, 367_001),
        ("120 GB", 1, 45_776, 732_421),
    ],
)
def test_blocks_and_tokens_of_a_70b_model(memory, element_bytes, num_blocks, tokens):
    shape = dataclasses.replace(LLAMA_70B, element_bytes=element_bytes)
    plan = plan_blocks(shape, 16, parse_size(memory))
    assert plan.num_blocks == num_blocks
    assert plan.block_bytes == 5_242_880 * element_bytes // 2
    assert plan.num_slots == 16 * num_blocks
    assert plan.excess_bytes == 0
    assert tokens_in(shape, parse_size(memory)) == tokens


def test_requests_of_4000_tokens_on_a_70b_model():
    assert blocks_for(4000, 16) == 250
    assert math.floor(paged_concurrency(LLAMA_70B, 120 * 10**9, 4000, 16)) == 91


def test_paged_and_reserved_requests_of_a_13b_model():
    memory = parse_size("54 GiB")
    reserved, paged = reserved_concurrency(LLAMA_13B, memory, 2048), paged_concurrency(LLAMA_13B, memory, 256, 16)
    assert (reserved, paged) == (Fraction("34.56"), Fraction("276.48"))
    assert (math.floor(reserved), math.floor(paged), paged / reserved) == (34, 276, 8)


@pytest.mark.parametrize(
    ("model", "memory", "slots"),
    [
        ("OPT-13B", "12 GiB", 15_728),
        ("OPT-66B", "21 GiB", 9_557),
        ("OPT-175B", "264 GiB", 60_074),
        ("OPT-13B", "12 GB", 14_648),
    ],
)
def test_slots_of_the_opt_models(model, memory, slots):
    assert tokens_in(model_shape(model), parse_size(memory)) == slots


def test_seven_requests_reserve_2048_slots_of_an_opt_13b_server():
    assert math.floor(reserved_concurrency(OPT_13B, parse_size("12 GiB"), 2048)) == 7


@pytest.mark.parametrize(
    ("num_blocks", "blocks_per_request", "requests"), [(1536, 1024, Fraction(3, 2)), (387, 129, 3), (3459, 1153, 3)]
)
def test_concurrency_of_a_pool_is_blocks_per_blocks(num_blocks, blocks_per_request, requests):
    assert paged_concurrency(TINY, num_blocks * 16 * 64, 16 * blocks_per_request, 16) == requests


@quick
@given(shapes(), st.integers(1, 4096), positive)
def test_as_many_whole_blocks_as_fit_and_no_more(shape, block_size, budget_bytes):
    block_bytes = shape.block_bytes(block_size)
    if budget_bytes < block_bytes:
        with pytest.raises(ValueError, match=r"^budget_bytes must hold a block"):
            plan_blocks(shape, block_size, budget_bytes)
        return
    plan = plan_blocks(shape, block_size, budget_bytes)
    assert plan.kv_bytes <= budget_bytes < plan.kv_bytes + block_bytes
    assert plan.num_slots <= tokens_in(shape, budget_bytes)


@quick
@given(shapes(), st.integers(1, 4096), positive, positive)
def test_forced_number_of_blocks_is_taken_and_its_excess_told(shape, block_size, budget_bytes, num_blocks):
    plan = plan_blocks(shape, block_size, budget_bytes, num_blocks)
    assert plan.num_blocks == num_blocks
    too_much = num_blocks * shape.block_bytes(block_size) - budget_bytes
    assert plan.excess_bytes == (too_much if too_much > 0 else 0)


def test_budget_is_rounded_down_once():
    assert kv_budget(10, "0.9") == 9
    assert kv_budget(11, "0.9") == 9  # 9.9
    assert kv_budget(11, "0.9", non_kv_bytes=8) == 1
    assert kv_budget(100, "0.29") == 29  # int(100 * 0.29) is 28
    assert kv_budget(parse_size("80 GiB"), Fraction(1, 3)) == 28_633_115_306
    assert kv_budget(parse_size("40 GB"), "1", parse_size("26 GB")) == 14_000_000_000


@quick
@given(positive, st.integers(1, 1000))
def test_budget_is_below_its_exact_share_by_less_than_a_byte(memory_bytes, thousandths):
    exact = Fraction(memory_bytes * thousandths, 1000)
    if exact < 1:
        with pytest.raises(ValueError, match=r"^non_kv_bytes must be less than the 0 usable bytes"):
            kv_budget(memory_bytes, f"{thousandths / 1000:.3f}")
    else:
        assert 0 <= exact - kv_budget(memory_bytes, f"{thousandths / 1000:.3f}") < 1


def test_weights_that_fill_the_memory_are_refused():
    with pytest.raises(ValueError, match=r"^non_kv_bytes must be less than the 9 usable bytes, got 9; use more memory"):
        kv_budget(10, "0.9", non_kv_bytes=9)


@pytest.mark.parametrize(
    ("tokens", "num_blocks", "slack"), [(33, 3, 15), (32, 2, 0), (1, 1, 15), (16, 1, 0), (0, 0, 0)]
)
def test_blocks_and_slack_of_16(tokens, num_blocks, slack):
    assert (blocks_for(tokens, 16), slack_slots(tokens, 16)) == (num_blocks, slack)


@quick
@given(st.integers(0, 300), st.integers(1, 40))
def test_blocks_grow_when_the_last_is_full(tokens, block_size):
    num_blocks = free = 0
    for _ in range(tokens):
        if free == 0:
            num_blocks, free = num_blocks + 1, block_size
        free -= 1
    assert (blocks_for(tokens, block_size), slack_slots(tokens, block_size)) == (num_blocks, free)


@quick
@given(st.integers(0, 20), st.integers(1, 8), st.integers(1, 40))
def test_mean_blocks_are_those_of_evenly_spread_lengths(full_blocks, spread_blocks, block_size):
    first = full_blocks * block_size + 1
    lengths = range(first, first + spread_blocks * block_size)  # every fill of the last block, equally often
    blocks = [math.ceil(Fraction(length, block_size)) for length in lengths]
    mean_length = Fraction(sum(lengths), len(lengths))
    assert expected_blocks(mean_length, block_size) == Fraction(sum(blocks), len(blocks))


def test_blocks_of_one_slot_have_no_slack():
    assert expected_blocks(256, 1) == 256


def test_expected_requests_of_a_13b_model():
    # 4,423 whole blocks, (256 + 7.5) / 16 of them for a request.
    assert expected_concurrency(LLAMA_13B, parse_size("54 GiB"), 256, 16) == Fraction(4423 * 16 * 2, 527)
    assert math.floor(expected_concurrency(LLAMA_13B, 60 * 10**9, 256, 16)) == 277


@quick
@given(shapes(), positive, st.integers(1, 10**6), st.integers(1, 4096))
def test_whole_requests_need_no_more_blocks_than_there_are(shape, kv_bytes, tokens, block_size):
    num_blocks = kv_bytes // shape.block_bytes(block_size)
    requests = math.floor(paged_concurrency(shape, kv_bytes, tokens, block_size))
    each = blocks_for(tokens, block_size)
    assert requests * each <= num_blocks < (requests + 1) * each


@quick
@given(shapes(), positive, st.integers(1, 10**6), st.integers(1, 4096))
def test_paged_requests_fall_with_length_and_rise_with_memory(shape, kv_bytes, tokens, block_size):
    here = paged_concurrency(shape, kv_bytes, tokens, block_size)
    assert paged_concurrency(shape, kv_bytes, tokens + 1, block_size) <= here
    assert paged_concurrency(shape, kv_bytes, tokens + block_size, block_size) < here
    assert paged_concurrency(shape, kv_bytes + 1, tokens, block_size) > here
    assert paged_concurrency(shape, 2 * kv_bytes, tokens, block_size) == 2 * here


@quick
@given(
    st.integers(1, 99), st.integers(1, 64), st.integers(1, 256), positive, st.integers(1, 10**5), st.integers(1, 999)
)
def test_one_byte_elements_double_every_concurrency(layers, kv_heads, head_dim, kv_bytes, tokens, block_size):
    wide = KVShape(layers, kv_heads, head_dim, element_bytes=2)
    narrow = KVShape(layers, kv_heads, head_dim, element_bytes=1)
    wide_paged = paged_concurrency(wide, kv_bytes, tokens, block_size)
    assert paged_concurrency(narrow, kv_bytes, tokens, block_size) == 2 * wide_paged
    assert reserved_concurrency(narrow, kv_bytes, tokens) == 2 * reserved_concurrency(wide, kv_bytes, tokens)


@quick
@given(shapes(), positive, st.integers(1, 10**5), st.integers(1, 10**5))
def test_reserving_is_paging_with_one_block_per_request(shape, kv_bytes, tokens, max_tokens):
    shape = dataclasses.replace(shape, scale_bytes_per_block_head=0)
    tokens = min(tokens, max_tokens)
    reserved = reserved_concurrency(shape, kv_bytes, max_tokens)
    assert paged_concurrency(shape, kv_bytes, tokens, block_size=max_tokens) == reserved
    assert paged_concurrency(shape, kv_bytes, tokens, block_size=1) >= reserved


@pytest.mark.parametrize(("used", "never_used"), [(256, Fraction("0.875")), (100, Fraction(1948, 2048)), (2048, 0)])
def test_reservation_of_2048_slots_wastes_what_is_never_used(used, never_used):
    waste = waste_by_kind(stored=used, final=used, allocated=2048)
    assert (waste.internal, waste.reservation, waste.external) == (never_used, 0, 0)


def test_requests_of_the_pagedattention_paper_waste_as_its_figure_says():
    # 8 tokens stored of 10 to come, 2,048 reserved: 2 slots reserved for later and 2,038 never used.
    waste = waste_by_kind(stored=8, final=10, allocated=2048)
    assert (waste.reservation * 2048, waste.internal * 2048) == (2, 2038)


def test_seven_reservations_leave_8_9_percent_of_an_opt_13b_server():
    pool = parse_size("12 GiB")
    allocated = 7 * 2048 * 819_200
    waste = waste_by_kind(stored=0, final=0, allocated=allocated, pool=pool)
    assert waste.external == Fraction(17, 192)
    assert f"{100 * float(waste.external):.1f}" == "8.9"


@quick
@given(st.data())
def test_every_slot_is_of_one_kind(data):
    requests = data.draw(st.lists(st.tuples(*[st.integers(0, 50)] * 3), max_size=5))
    free = data.draw(st.integers(1, 50))
    slots = ["external"] * free
    for stored, later, never in requests:
        slots += ["stored"] * stored + ["reservation"] * later + ["internal"] * never
    waste = waste_by_kind(
        stored=sum(r[0] for r in requests),
        final=sum(r[0] + r[1] for r in requests),
        allocated=sum(map(sum, requests)),
        pool=len(slots),
    )
    assert dataclasses.asdict(waste) == {
        kind: Fraction(slots.count(kind), len(slots)) for kind in ("stored", "reservation", "internal", "external")
    }
    assert sum(dataclasses.astuple(waste)) == 1


@pytest.mark.parametrize(
    "sizes",
    [
        {"stored": 3, "final": 2, "allocated": 4},
        {"stored": 1, "final": 5, "allocated": 4},
        {"stored": 1, "final": 2, "allocated": 4, "pool": 3},
    ],
)
def test_sizes_that_contradict_each_other_are_refused(sizes):
    with pytest.raises(ValueError, match=r"^stored <= final <= allocated <= pool must hold, got"):
        waste_by_kind(**sizes)


CALLS = {
    kv_budget: {"memory_bytes": 100, "non_kv_bytes": 1},
    plan_blocks: {"shape": TINY, "block_size": 16, "budget_bytes": 2048, "num_blocks_override": 1},
    tokens_in: {"shape": TINY, "kv_bytes": 2048},
    blocks_for: {"tokens": 1, "block_size": 16},
    slack_slots: {"tokens": 1, "block_size": 16},
    expected_blocks: {"mean_tokens": 1, "block_size": 16},
    paged_concurrency: {"shape": TINY, "kv_bytes": 2048, "tokens": 1, "block_size": 16},
    expected_concurrency: {"shape": TINY, "kv_bytes": 2048, "mean_tokens": 1, "block_size": 16},
    reserved_concurrency: {"shape": TINY, "kv_bytes": 2048, "max_tokens": 16},
    waste_by_kind: {"stored": 1, "final": 1, "allocated": 1, "pool": 1},
}
ARGUMENTS = [(f, name) for f, arguments in CALLS.items() for name in arguments if name != "shape"]
MAY_BE_ZERO = {
    *[(f, "tokens") for f in (blocks_for, slack_slots)],
    *[(waste_by_kind, name) for name in ("stored", "final", "allocated")],
    (kv_budget, "non_kv_bytes"),
}


@pytest.mark.parametrize("wrong", [-1, 0, True, False])
@pytest.mark.parametrize(("function", "name"), ARGUMENTS)
def test_wrong_argument_is_refused_by_name(function, name, wrong):
    arguments = CALLS[function]
    function(**arguments)
    if type(wrong) is int and wrong == 0 and (function, name) in MAY_BE_ZERO:
        return
    with pytest.raises(ValueError, match=rf"^{name} must be .*, got {wrong}"):
        function(**arguments | {name: wrong})


@pytest.mark.parametrize("mean_tokens", [Fraction(0), Fraction(-1, 2)])
def test_mean_length_must_be_positive(mean_tokens):
    with pytest.raises(ValueError, match=r"^mean_tokens must be positive, got"):
        expected_blocks(mean_tokens, 16)


def test_fraction_of_memory_is_checked_by_name():
    with pytest.raises(ValueError, match=r"^memory_fraction must be above 0 and at most 1, got 90"):
        kv_budget(100, "90")


@quick
@given(st.lists(st.integers(1, 9), max_size=12), st.integers(0, 40))
def test_packed_requests_are_the_longest_beginning_that_fits(sizes, pool):
    assert packed_requests(sizes, pool) == max(n for n in range(len(sizes) + 1) if sum(sizes[:n]) <= pool)


def test_packing_reads_no_further_than_the_first_that_does_not_fit():
    sizes = iter([2, 3, 1, 1])
    assert packed_requests(sizes, 4) == 1
    assert list(sizes) == [1, 1]  # they would have fitted beside the first


@pytest.mark.parametrize(("sizes", "pool", "name"), [([1], -1, "pool"), ([0], 1, "sizes"), ([True], 1, "sizes")])
def test_packing_refuses_what_is_no_size(sizes, pool, name):
    with pytest.raises(ValueError, match=rf"^{name} must be"):
        packed_requests(sizes, pool)
