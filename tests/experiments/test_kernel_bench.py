import dataclasses
import pathlib

import numpy as np
import polars as pl
import pytest

from experiments import config, kernel_bench
from experiments.kernel_bench_cases import Work, calls
from experiments.progress import Progress
from experiments.run_directory import RunDirectory

CONFIGS = sorted((pathlib.Path(__file__).parents[2] / "configs/kernel_bench").glob("[!o]*.yaml"))
SMALL = kernel_bench.Config(
    seqs=3,
    context=40,
    kv_heads=2,
    group=2,
    head_dim=32,
    kv_dtypes=("float32", "float8_e4m3fn"),
    block_sizes=(8, 16),
    prefill_seqs=2,
    chunk=5,
    repeats=3,
)


@pytest.fixture(scope="module")
def small_run(tmp_path_factory):
    config = dataclasses.replace(SMALL, kv_dtypes=("float8_e4m3fn",))
    with RunDirectory.open(tmp_path_factory.mktemp("bench") / "run") as run_dir:
        return kernel_bench.run(config, run_dir, Progress()), run_dir.read_parquet("timings.parquet")


def test_works_are_of_every_kind_and_dtype():
    assert [work.name for work in SMALL.works()] == ["decode_f32", "decode_fp8", "prefill_f32", "prefill_fp8"]


def test_every_call_of_every_work_is_timed_in_every_round(small_run):
    found, timings = small_run
    works = ["decode_fp8", "prefill_fp8"]
    places = ["copy", "contiguous", *(f"b{size}_{order}" for size in (8, 16) for order in ("identity", "permuted"))]
    assert set(found) == {f"{work}_{place}" for work in works for place in places}
    assert timings.group_by("work", "name").len()["len"].unique().to_list() == [SMALL.repeats]
    for name, values in found.items():
        assert values["ms_lower_quartile"] <= values["ms"] <= values["ms_upper_quartile"]
        assert values["gb_per_s"] > 0
        if not name.endswith("copy"):
            assert values["backend"] == "xla"
            assert values["fraction_of_copy"] == pytest.approx(
                values["gb_per_s"] / found[name.rsplit("_", 1)[0].split("_b")[0] + "_copy"]["gb_per_s"]
            )


def test_all_ways_to_store_a_batch_have_one_answer(small_run):
    found, _ = small_run
    assert kernel_bench.failed_checks(found) == []
    assert max(values.get("max_error", 0.0) for values in found.values()) < 1e-6


def test_a_call_with_another_answer_fails_the_run(small_run):
    found = {name: dict(values) for name, values in small_run[0].items()}
    found["decode_fp8_b8_permuted"]["max_error"] = 0.01
    assert kernel_bench.failed_checks(found) == [
        "decode_fp8_b8_permuted: its output differs from the contiguous one by 1.0e-02, more than rounding explains"
    ]
    found["decode_fp8_b8_permuted"]["max_error"] = np.nan
    assert len(kernel_bench.failed_checks(found)) == 1


def test_a_wrong_table_changes_the_answer():
    work = SMALL.works()[0]
    contiguous, paged = list(calls(work, 0, (8,), ("permuted",), None))[:2]
    q, k, v, table, *lengths = paged.arguments
    wrong = dataclasses.replace(paged, arguments=(q, k, v, table[::-1], *lengths))
    assert kernel_bench._errors([contiguous, paged])[paged.name] < 1e-6
    assert kernel_bench._errors([contiguous, wrong])[paged.name] > 0.01


def test_bytes_are_those_of_keys_values_queries_output_and_table():
    work = Work("decode", 64, 4096, 1, 8, 4, 128, "bfloat16", "bfloat16")
    stored, computed = 64 * 4096 * 8 * 2 * 128 * 2, 2 * 64 * 32 * 128 * 2
    assert work.bytes_moved(None) == stored + computed
    assert work.bytes_moved(16) == stored + computed + 8 * 64 * 256 * 4
    assert dataclasses.replace(work, kv_dtype="int8").bytes_moved(None) == stored // 2 + computed


def test_ratios_are_of_calls_in_the_same_round():
    work = SMALL.works()[0]
    timed = list(calls(work, 0, (8,), ("identity",), None))
    names = [f"{work.name}_contiguous", f"{work.name}_b8_identity"]
    # The third round is slow for both.
    ms = {"copy": [1.0, 1.0, 1.0], names[0]: [1.0, 1.0, 10.0], names[1]: [2.0, 3.0, 20.0]}
    frame = pl.DataFrame([{"name": n, "repeat": i, "ms": t} for n, times in ms.items() for i, t in enumerate(times)])
    found = kernel_bench.summarise(timed, frame, dict.fromkeys(names, 0.0))
    assert found[names[1]]["paged_over_contiguous"] == 2.0
    assert found[names[0]]["paged_over_contiguous"] == 1.0
    assert found[names[1]]["ms"] == 3.0
    copied = 2 * 2 * 3 * 40 * 2 * 32 * 4
    assert found[f"{work.name}_copy"]["gb_per_s"] == pytest.approx(copied / 1e6)


def test_the_table_says_that_a_cpu_times_references(small_run):
    (table,) = kernel_bench.tables(small_run[0])
    assert table.title == "Attention through XLA's references; no kernel of ours runs here"
    assert len(table.rows) == len(small_run[0])


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_configs_cover_the_block_sizes(path):
    loaded = config.decode(kernel_bench.Config, config.read_yaml(path))
    assert loaded.block_sizes == (8, 16, 32, 64, 128, 256)
    assert {work.kind for work in loaded.works()} == {"decode", "prefill"}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"repeats": 0}, "repeats: expected at least 1, got 0"),
        ({"chunk": 41}, "chunk: expected 2 to context = 40, got 41"),
        ({"block_sizes": ()}, "block_sizes: expected at least one"),
        ({"kv_dtypes": ("int4",)}, "kv_dtypes: expected some of"),
        ({"q_dtype": "int8"}, "q_dtype: expected one of"),
        ({"prefill_seqs": -1}, "prefill_seqs: expected at least 0"),
    ],
)
def test_what_cannot_be_timed_is_refused(change, message):
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(SMALL, **change)
