"""All attention backends on all named cases, against float64."""

import functools

import numpy as np
import pytest

from pallas_kernels.contiguous_attention import contiguous_attention
from pallas_kernels.contiguous_attention.api import BACKENDS as CONTIGUOUS_BACKENDS
from pallas_kernels.paged_attention import paged_attention
from pallas_kernels.paged_attention.api import BACKENDS as PAGED_BACKENDS
from pallas_kernels.paged_attention.shapes import CASES
from tests.pallas_kernels.attention_oracle import assert_matches, make_problem
from tests.pallas_kernels.ways import batches_of

SMALL = tuple(case for case in CASES if not case.offline)


@functools.cache
def problem(case, batch):
    names = list(case.batches)
    made = make_problem(case, case.batches[batch], names.index(batch), use_block_0=names.index(batch) % 2 == 1)
    return made, made.expected()


@pytest.mark.parametrize(("way", "case", "batch"), batches_of(PAGED_BACKENDS, SMALL))
def test_paged_attention_is_softmax_attention(way, case, batch):
    posed, expected = problem(case, batch)
    with way.open():
        result = paged_attention(**posed.paged(), backend=way.backend)
    out = result[0] if case.return_lse else result
    assert out.dtype == case.q_dtype
    assert_matches(result, expected)


@pytest.mark.parametrize(("way", "case", "batch"), batches_of(CONTIGUOUS_BACKENDS, SMALL))
def test_contiguous_attention_is_softmax_attention(way, case, batch):
    posed, expected = problem(case, batch)
    with way.open():
        result = contiguous_attention(**posed.contiguous(), backend=way.backend)
    out = result[0] if case.return_lse else result
    assert out.dtype == case.q_dtype
    assert_matches(result, expected)


@pytest.mark.parametrize("case", SMALL, ids=lambda case: case.name)
def test_paged_and_contiguous_of_xla_are_equal_bit_for_bit(case):
    for batch in case.batches:
        posed, _ = problem(case, batch)
        results = (paged_attention(**posed.paged()), contiguous_attention(**posed.contiguous()))
        outs = [result[0] if case.return_lse else result for result in results]
        np.testing.assert_array_equal(*(np.asarray(out).view(np.uint8) for out in outs))
