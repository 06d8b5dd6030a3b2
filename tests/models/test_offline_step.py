"""What eight devices exchange and hold in a compiled decode step, for GPUs and TPUs that are not there."""

import importlib.util

import pytest

from experiments import sharded_job
from experiments.sharded_setup import parse_mesh
from pallas_kernels.offline import run_job
from tests.models.offline_steps import ROWS, SMALL


def installed(module):
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:
        return False


GPU = pytest.mark.skipif(not installed("jax_plugins.xla_cuda13"), reason="the CUDA plugin is not installed")
TPU = pytest.mark.skipif(not installed("libtpu"), reason="libtpu is not installed")
MESHES = ("d1m8k1", "d1m2k4", "d2m1k4")


def compiled(target, mesh):
    job, arguments = "tests.models.offline_steps:compile_small", {"target": target, "mesh": mesh}
    outcome = run_job(job, arguments, environment=sharded_job.environment(target), time_limit_s=240.0)
    assert outcome.status == "ok", outcome.message
    return outcome.report


@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize(
    "target",
    [
        pytest.param("h100x8", marks=[GPU, pytest.mark.offline]),
        pytest.param("v6e-8", marks=[TPU, pytest.mark.slow]),
    ],
)
def test_only_sums_and_the_merge_are_exchanged_and_no_pool_is_copied(target, mesh):
    shape, report = parse_mesh(mesh), compiled(target, mesh)
    # Of every layer: a sum behind attention if heads are split, one behind the feed-forward block; the embedding's.
    stream = 2 * ROWS * SMALL.width * (1 + SMALL.layers * (1 + (shape.model > 1)))
    heads = SMALL.q_heads // shape.model
    merge = 4 * ROWS * heads * (1 + SMALL.head_dim) * SMALL.layers if shape.kv > 1 else 0
    logits = 4 * ROWS * SMALL.vocab // (shape.model * shape.kv)
    assert report["unexpected_exchanges"] == ""
    assert report["merge_bytes_per_step"] == merge
    assert report["collective_bytes_per_step"] == stream + merge + logits
    # Of all that is gathered, the logits and the denominators, nothing is as large as keys or values.
    gathered = 4 * ROWS * heads * SMALL.layers if shape.kv > 1 else 0
    assert report["all_gather_bytes_per_step"] == logits + gathered
    # By hand: keys and values of two bytes.
    slots = report["blocks"] // shape.kv * 16
    held = 2 * 2 * slots * SMALL.layers * SMALL.kv_heads // shape.model * SMALL.head_dim
    assert held > 350_000_000
    counted = ("kv_bytes_per_device", "predicted_kv_bytes_per_device", "compiled_kv_bytes_per_device")
    assert [report[name] for name in counted] == [held] * 3
    assert report["alias_bytes"] >= held
    assert report["temp_bytes"] < 2**26
    assert report["fits"]
    assert report["blocks_by_compiler"] >= report["blocks"]
