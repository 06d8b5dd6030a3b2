import dataclasses

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paxkv.model_shapes import KVShape, model_shape
from paxkv.page_groups import PageGroups, held_pages

quick = settings(deadline=None, max_examples=50)  # no deadline: a busy machine is no failure

KIB, MIB = 1024, 1024**2


def groups(model, tensor_parallel, page_bytes, **options):
    shape = dataclasses.replace(model_shape(model), tensor_parallel=tensor_parallel, **options)
    return PageGroups(shape, page_bytes)


@pytest.mark.parametrize(
    ("model", "tensor_parallel", "tokens"),
    [
        ("Yi-6B", 1, (64, 128, 256, 2048)),
        ("Yi-6B", 2, (128, 256, 512, 4096)),
        ("Llama-3-8B", 1, (32, 64, 128, 1024)),
        ("Llama-3-8B", 2, (64, 128, 256, 2048)),
        ("Yi-34B", 1, (32, 64, 128, 1024)),
        ("Yi-34B", 2, (64, 128, 256, 2048)),
        ("Llama-3-70B", 4, (128, 256, 512, 4096)),
        ("Llama-3-70B", 8, (256, 512, 1024, 8192)),
    ],
)
def test_tokens_per_page_are_the_published_block_sizes(model, tensor_parallel, tokens):
    pages = (64 * KIB, 128 * KIB, 256 * KIB, 2 * MIB)
    assert tuple(groups(model, tensor_parallel, page).tokens_per_page for page in pages) == tokens
    halved = tuple(groups(model, tensor_parallel, page, element_bytes=1).tokens_per_page for page in pages)
    assert halved == tuple(2 * count for count in tokens)


@pytest.mark.parametrize(
    ("model", "small", "large"),
    [("Yi-6B", 4, 128), ("Llama-3-8B", 4, 128), ("Yi-34B", 7.5, 240), ("Llama-3-70B", 10, 320)],
)
def test_page_groups_have_their_published_size_on_each_device(model, small, large):
    for tensor_parallel in (1, 2):
        assert groups(model, tensor_parallel, 64 * KIB).group_bytes == small * MIB
        assert groups(model, tensor_parallel, 2 * MIB).group_bytes == large * MIB


def test_slicing_packs_all_layers_into_two_tensors():
    sliced = PageGroups(model_shape("Llama-3-8B"), 2 * MIB, sliced=True)
    assert (sliced.num_tensors, sliced.tokens_per_page, sliced.group_bytes) == (2, 32, 4 * MIB)


@st.composite
def layouts(draw):
    """Small enough to count byte by byte; tokens that divide the page, straddle pages, and exceed a page."""
    shape = KVShape(
        layers=draw(st.integers(1, 3)),
        kv_heads=draw(st.integers(1, 3)),
        head_dim=draw(st.integers(1, 6)),
        element_bytes=draw(st.integers(1, 2)),
        scale_bytes_per_token_head=draw(st.integers(0, 2)),
    )
    return PageGroups(shape, draw(st.integers(1, 64)), draw(st.booleans()))


def token_bytes(layout):
    shape = layout.shape
    of_one_layer = shape.kv_heads * (shape.head_dim * shape.element_bytes + shape.scale_bytes_per_token_head)
    return of_one_layer * shape.layers if layout.sliced else of_one_layer


@quick
@given(layouts(), st.integers(0, 40))
def test_groups_cover_every_byte_and_no_page_more(layout, tokens):
    touched = {byte // layout.page_bytes for byte in range(tokens * token_bytes(layout))}
    assert layout.groups_for(tokens) == len(touched)
    assert layout.num_tensors == (2 if layout.sliced else 2 * layout.shape.layers)


@quick
@given(layouts())
def test_worst_waste_is_the_largest_that_occurs(layout):
    used = token_bytes(layout)
    # After page_bytes tokens the remainders repeat.
    wastes = [-(length * used) % layout.page_bytes for length in range(1, layout.page_bytes + 1)]
    assert layout.worst_waste_bytes == layout.num_tensors * max(wastes)
    assert layout.worst_waste_bytes < layout.group_bytes


def test_length_divided_by_tokens_per_page_would_map_too_much():
    layout = PageGroups(KVShape(1, 1, 3, element_bytes=1), page_bytes=8)
    assert layout.tokens_per_page == 2
    assert layout.groups_for(8) == 3  # 24 bytes are 3 pages, where 8 / 2 would say 4


@quick
@given(layouts(), st.integers(1, 40), st.integers(1, 4))
def test_rows_share_no_page_and_none_is_spare(layout, max_tokens, rows):
    stride, needed = layout.row_stride_bytes(max_tokens), max_tokens * token_bytes(layout)
    assert stride % layout.page_bytes == 0
    assert needed <= stride < needed + layout.page_bytes
    assert layout.virtual_bytes(rows, max_tokens) == layout.num_tensors * rows * stride


def test_virtual_memory_of_a_long_context_server():
    layout = groups("Yi-34B", 2, 2 * MIB)
    assert layout.row_stride_bytes(204_800) == 200 * MIB
    assert layout.virtual_bytes(500, 204_800) == 12_582_912_000_000
    assert layout.row_stride_bytes(200_000) == 205_520_896  # 98 pages, where 97.66 are used
    assert groups("Yi-34B", 2, 64 * KIB).row_stride_bytes(200_000) == 204_800_000


def test_rows_shorter_than_a_page_lie_a_page_apart():
    # 32 KiB a row: mapped every 2 MiB but addressed every 32 KiB, the second row had no memory.
    layout = PageGroups(KVShape(1, 1, 128), 2 * MIB)
    assert 128 * token_bytes(layout) == 32 * KIB
    assert layout.row_stride_bytes(128) == 2 * MIB
    assert layout.virtual_bytes(4, 128) == 2 * 4 * 2 * MIB


def test_page_smaller_than_a_token_still_backs_it_but_holds_none():
    layout = PageGroups(KVShape(1, 1, 4, element_bytes=2), page_bytes=3)
    assert layout.groups_for(1) == 3
    with pytest.raises(ValueError, match=r"^page_bytes must hold a token of 8 bytes, got 3"):
        _ = layout.tokens_per_page


def test_scales_per_block_are_refused_where_there_are_no_blocks():
    with pytest.raises(ValueError, match=r"^shape must keep no scales per block, got 4 bytes"):
        PageGroups(KVShape(2, 2, 8, scale_bytes_per_block_head=4), 64)


@pytest.mark.parametrize("wrong", [0, -1, True])
def test_wrong_argument_is_refused_by_name(wrong):
    layout = PageGroups(KVShape(2, 2, 8), 64)
    with pytest.raises(ValueError, match=r"^page_bytes must be"):
        PageGroups(KVShape(2, 2, 8), wrong)
    with pytest.raises(ValueError, match=r"^max_tokens must be"):
        layout.row_stride_bytes(wrong)
    with pytest.raises(ValueError, match=r"^rows must be"):
        layout.virtual_bytes(wrong, 1)
    with pytest.raises(ValueError, match=r"^max_tokens must be"):
        layout.virtual_bytes(1, wrong)
    if wrong != 0:
        with pytest.raises(ValueError, match=r"^tokens must be"):
            layout.groups_for(wrong)


def test_mapping_a_group_takes_a_call_in_every_tensor():
    assert groups("Llama-3-8B", 2, 2 * MIB).map_ns(40_000) == 2_560_000
    assert groups("Yi-34B", 2, 2 * MIB).map_ns(40_000) == 4_800_000
    assert PageGroups(model_shape("Yi-34B"), 2 * MIB, sliced=True).map_ns(40_000) == 80_000
    with pytest.raises(ValueError, match=r"^call_ns must be"):
        groups("Yi-34B", 2, 2 * MIB).map_ns(0)


@pytest.mark.parametrize(("stride", "pages"), [(1, 8), (2, 16), (4, 32), (8, 64), (16, 128)])
def test_blocks_kept_apart_hold_as_many_pages_as_were_measured(stride, pages):
    assert held_pages(range(0, 1024 * stride, stride), 128) == pages


@quick
@given(st.lists(st.integers(0, 60)), st.integers(1, 9))
def test_a_page_is_held_while_any_of_its_blocks_is_kept(kept, blocks_per_page):
    pages = [range(first, first + blocks_per_page) for first in range(0, 61, blocks_per_page)]
    assert held_pages(kept, blocks_per_page) == sum(any(block in page for block in kept) for page in pages)


def test_pages_of_no_blocks_and_blocks_before_the_first_are_refused():
    with pytest.raises(ValueError, match=r"^blocks_per_page must be"):
        held_pages([1], 0)
    with pytest.raises(ValueError, match=r"^block_ids must be"):
        held_pages([-1], 4)
