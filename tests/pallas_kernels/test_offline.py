"""Jobs in processes of their own, and kernels compiled for a GPU that is not there."""

import pytest

from pallas_kernels import offline, offline_gpu
from pallas_kernels.targets import TARGETS

JOBS = "tests.pallas_kernels.offline_jobs"


def test_a_job_gets_its_arguments_an_empty_directory_and_its_environment():
    outcome = offline.run_job(f"{JOBS}:echo", {"words": ["a", 1]}, environment={"SOME_FLAGS": "to={dump_dir}/x"})
    assert (outcome.status, outcome.message) == ("ok", "")
    assert outcome.report["words"] == ["a", 1]
    assert outcome.report["empty"]
    assert outcome.report["flags"].startswith("to=/")
    assert outcome.report["flags"].endswith("/dump/x")


@pytest.mark.parametrize(
    ("job", "status", "message"),
    [
        ("refuse", "refused", "ValueError: block_size must be at least 1, got 0"),
        ("lack", "missing", "no_such_compiler cannot be imported; install the dependency group"),
        ("fail", "failed", "KeyError: 'what'"),
        ("crash", "crashed", "exit code -6: F0101 compiler.cc:1] Check failed: shape.rank() == 2"),
        ("no_such_job", "failed", "AttributeError"),
    ],
)
def test_a_job_that_gives_no_report_says_why(job, status, message):
    outcome = offline.run_job(f"{JOBS}:{job}", {})
    assert (outcome.status, outcome.report) == (status, {})
    assert outcome.message.startswith(message)


def test_a_job_that_hangs_is_ended():
    outcome = offline.run_job(f"{JOBS}:hang", {}, time_limit_s=3.0)
    assert (outcome.status, outcome.message) == ("timed_out", "no answer within 3 s")
    assert 3 <= outcome.seconds < 30


@pytest.mark.parametrize(
    ("registers", "warps", "shared_memory_bytes", "resident"),
    # jax's paged attention on H100, its rows of registers and shared memory, and the occupancy calculator's answers.
    [(109, 8, 73_728, 16), (111, 4, 38_912, 16), (162, 4, 25_088, 12), (165, 4, 73_728, 12), (207, 8, 88_064, 8)],
)
def test_resident_warps_are_those_of_the_occupancy_calculator(registers, warps, shared_memory_bytes, resident):
    assert offline_gpu.resident_warps(registers, warps, shared_memory_bytes, TARGETS["h100"]) == resident


def compile_case(target, kernel, case):
    arguments = {"target": target, "kernel": kernel, "case": case}
    return report_of("pallas_kernels.offline_cases:compile_case", arguments)


def report_of(job, arguments, flags=""):
    environment = {name: f"{value} {flags}" for name, value in offline_gpu.environment("h100").items()}
    outcome = offline.run_job(job, arguments, environment=environment, time_limit_s=240.0)
    if outcome.status == "missing":
        pytest.skip(outcome.message)
    assert outcome.status == "ok", outcome.message
    return outcome.report


@pytest.mark.offline
@pytest.mark.parametrize("case", ["d128_kv8_g4_b16_bf16", "d128_kv8_g4_b16_fp8"])
def test_decode_on_h100_fits_the_registers_and_copies_16_bytes_at_a_time_without_waiting(case):
    report = compile_case("h100", "paged_decode", case)
    assert report["spills"] == 0
    assert report["registers"] <= 168
    assert report["warps"] == 4
    # Two of the wide loads are those of the queries; all else that is copied, but for the table, is keys and values.
    assert report["wide_loads"] - 2 >= report["async_copies"] - 3 >= 16


@pytest.mark.offline
@pytest.mark.parametrize("case", ["d128_kv8_g4_b16_bf16", "d128_kv8_g4_b16_fp8"])
def test_prefill_on_h100_uses_the_tensor_cores_of_warp_groups(case):
    report = compile_case("h100", "paged_prefill", case)
    assert report["spills"] == 0
    assert report["wgmma"] > 0


@pytest.mark.offline
@pytest.mark.parametrize("kernel", ["paged_decode", "contiguous_prefill", "kv_write"])
def test_sharding_over_the_heads_of_8_devices_needs_no_word_between_them(kernel):
    case = "d128_kv8_t64_bf16" if kernel == "kv_write" else "d128_kv8_g4_b16_bf16"
    report = compile_case("h100x8", kernel, case)
    assert report["collectives"] == 0
    whole = compile_case("h100", kernel, case)
    assert report["argument_bytes"] < whole["argument_bytes"] / 7


@pytest.mark.offline
@pytest.mark.parametrize(
    # A block of 16 slots, 8 heads and 128 elements has 2**14 elements.
    ("blocks", "kv_dtype", "bits"),
    [(2**17, "bfloat16", "32"), (3 * 2**16, "bfloat16", "64"), (2**17, "int8", "32"), (2**18 + 1, "int8", "64")],
)
def test_offsets_have_64_bits_where_32_would_wrap(blocks, kv_dtype, bits):
    arguments = {"blocks": blocks, "kv_dtype": kv_dtype}
    listings = "--xla_dump_emitter_re=triton-to-llvm"
    assert report_of(f"{JOBS}:offset_bits", arguments, listings) == {"bits": [bits]}


@pytest.mark.offline
def test_a_pool_between_the_two_is_refused():
    arguments = {"blocks": 3 * 2**16, "kv_dtype": "int8"}
    outcome = offline.run_job(f"{JOBS}:offset_bits", arguments, environment=offline_gpu.environment("h100"))
    if outcome.status == "missing":
        pytest.skip(outcome.message)
    assert (outcome.status, "k must have at most 2**31 elements" in outcome.message) == ("refused", True)
