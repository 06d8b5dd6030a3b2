"""Contiguous attention on the cases of paged attention, in all ways, against float64 and against paged attention."""

import numpy as np
import pytest

from pallas_kernels.contiguous_attention import contiguous_attention
from pallas_kernels.contiguous_attention.api import BACKENDS
from pallas_kernels.contiguous_attention.shapes import CASES
from pallas_kernels.paged_attention import paged_attention
from tests.pallas_kernels.attention_oracle import assert_matches, problem_of
from tests.pallas_kernels.ways import QUICK, batches_of

SMALL = tuple(case for case in CASES if not case.offline)


@pytest.mark.parametrize(("way", "case", "batch"), batches_of(BACKENDS, SMALL))
def test_contiguous_attention_is_softmax_attention(way, case, batch):
    posed = problem_of(case, batch)
    with way.open():
        result = contiguous_attention(**posed.contiguous(), backend=way.backend)
    out = result[0] if case.return_lse else result
    assert out.dtype == case.q_dtype
    assert_matches(result, posed.expected())


@pytest.mark.parametrize("case", [case for case in SMALL if case.name in QUICK], ids=lambda case: case.name)
def test_paged_and_contiguous_of_xla_are_equal_bit_for_bit(case):
    for batch in case.batches:
        posed = problem_of(case, batch)
        results = (paged_attention(**posed.paged(), backend="xla"), contiguous_attention(**posed.contiguous()))
        outs = [result[0] if case.return_lse else result for result in results]
        np.testing.assert_array_equal(*(np.asarray(out).view(np.uint8) for out in outs))
