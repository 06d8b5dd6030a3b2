"""Paged attention on all named cases, in all ways, against float64."""

import pytest

from pallas_kernels.paged_attention import paged_attention
from pallas_kernels.paged_attention.api import BACKENDS
from pallas_kernels.paged_attention.shapes import CASES
from tests.pallas_kernels.attention_oracle import assert_matches, problem_of
from tests.pallas_kernels.ways import batches_of

SMALL = tuple(case for case in CASES if not case.offline)


@pytest.mark.parametrize(("way", "case", "batch"), batches_of(BACKENDS, SMALL, always=("xla",)))
def test_paged_attention_is_softmax_attention(way, case, batch):
    posed = problem_of(case, batch)
    with way.open():
        result = paged_attention(**posed.paged(), backend=way.backend)
    out = result[0] if case.return_lse else result
    assert out.dtype == case.q_dtype
    assert_matches(result, posed.expected())
