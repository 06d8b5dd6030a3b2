"""From a config to requests: what may be asked, and that one axis leaves the others alone."""

import dataclasses
import json

import draccus
import pytest
import yaml

from experiments.workloads import (
    PRESETS,
    TraceError,
    WorkloadConfig,
    exponential_lengths,
    gamma_arrivals,
    load_workload,
    prompt_tokens,
    statistics,
    stream,
    with_sha256,
)

AZURE = "TIMESTAMP,ContextTokens,GeneratedTokens\n" + "\n".join(
    f"2023-11-16 18:15:{i:02d}.0000000,{100 + i},{10 + i}" for i in range(10)
)
DRAWN = WorkloadConfig(lengths="sharegpt", num_requests=50, rate=2.0)


@pytest.fixture
def traces(tmp_path, monkeypatch):
    (tmp_path / "azure.csv").write_text(AZURE)
    (tmp_path / "stats.csv").write_text(
        "num_prefill_tokens,num_decode_tokens,num_total_tokens,pd_ratio\n10,5,15,2.0\n20,5,25,4.0\n"
    )
    monkeypatch.setenv("PAXKV_TRACE_DIR", str(tmp_path))
    return tmp_path


def _axes(config, seed=0):
    workload = load_workload(config, 2048, seed)
    return {
        "arrivals": workload.arrival_ms.tolist(),
        "lengths": [workload.prompt_len.tolist(), workload.output_len.tolist()],
        "tokens": prompt_tokens(workload, seed, 32_000)[:, :1].tolist(),
    }


@pytest.mark.parametrize(
    ("change", "changed"),
    [
        ({"rate": 3.0}, {"arrivals"}),
        ({"burstiness": 0.5}, {"arrivals"}),
        ({"time_scale": 0.5}, {"arrivals"}),
        ({"lengths": "alpaca"}, {"lengths"}),
        ({"lengths": "constant", "prompt_mean": 5.0, "output_mean": 6.0}, {"lengths"}),
        ({"lengths": "uniform", "prompt_mean": 100.0, "output_mean": 100.0}, {"lengths"}),
        ({"length_scale": 0.5}, {"lengths"}),
    ],
)
def test_changing_one_axis_keeps_the_others(change, changed):
    before, after = _axes(DRAWN), _axes(dataclasses.replace(DRAWN, **change))
    assert {axis for axis in before if before[axis] != after[axis]} == changed


def test_seed_changes_every_axis_and_repeats_exactly():
    first, again, other = _axes(DRAWN, 1), _axes(DRAWN, 1), _axes(DRAWN, 2)
    assert first == again
    assert all(first[axis] != other[axis] for axis in first)


def test_more_requests_continue_the_same_ones():
    few, many = _axes(DRAWN), _axes(dataclasses.replace(DRAWN, num_requests=80))
    assert many["arrivals"][:50] == few["arrivals"]
    assert [lengths[:50] for lengths in many["lengths"]] == few["lengths"]
    assert many["tokens"][:50] == few["tokens"]


def test_streams_and_their_keys_are_apart():
    draws = [stream(0, name, *key).random() for name in ("arrivals", "lengths", "tokens") for key in ((), (0,), (1,))]
    assert len(set(draws)) == 9
    with pytest.raises(ValueError, match="name must be one of arrivals, lengths, tokens, predictions, got 'token'"):
        stream(0, "token")
    with pytest.raises(ValueError, match="must not be negative"):
        stream(-1, "tokens")


def test_each_axis_is_drawn_from_its_own_stream():
    workload = load_workload(DRAWN, 2048, 9)
    assert workload.arrival_ms.tolist() == gamma_arrivals(stream(9, "arrivals"), 50, 2.0).tolist()
    prompt_len, output_len = exponential_lengths(stream(9, "lengths"), 50, *PRESETS["sharegpt"], 1024, 2048)
    assert workload.prompt_len.tolist() == prompt_len.tolist()
    assert workload.output_len.tolist() == output_len.tolist()


def test_arrivals_scale_with_the_rate_alone():
    slow, fast = _axes(DRAWN)["arrivals"], _axes(dataclasses.replace(DRAWN, rate=4.0))["arrivals"]
    assert fast == pytest.approx([t / 2 for t in slow], rel=1e-12)


def test_drawn_workload_says_what_is_cut_and_which_means_hold():
    provenance = load_workload(DRAWN, 2048, 0).provenance
    assert provenance.lengths == (
        "exponential truncated to prompt <= 1024 and prompt + output <= 2048, "
        "with means after truncation of 161.31 prompt and 337.99 output tokens"
    )
    assert provenance.arrivals == "gamma gaps, rate 2.0 requests/s, burstiness 1.0"
    assert (provenance.source, provenance.file, provenance.sha256, provenance.rows_read) == (
        "synthetic",
        None,
        None,
        50,
    )


def test_trace_keeps_its_times_and_rate_redraws_them(traces):
    config = WorkloadConfig(kind="azure", file="azure.csv", num_requests=3, time_scale=0.5)
    workload = load_workload(config, 2048, 0)
    assert workload.arrival_ms.tolist() == [0, 500, 1000]
    redrawn = load_workload(dataclasses.replace(config, rate=2.0, burstiness=float("inf")), 2048, 0)
    assert redrawn.arrival_ms.tolist() == [250, 500, 750]
    assert redrawn.prompt_len.tolist() == workload.prompt_len.tolist() == [100, 101, 102]


def test_rescaled_arrivals_end_on_time_and_say_so():
    workload = load_workload(dataclasses.replace(DRAWN, rescale=True), 2048, 0)
    assert workload.arrival_ms[-1] == pytest.approx(1000 * workload.num_requests / DRAWN.rate)
    assert workload.provenance.arrivals == "gamma gaps, rate 2.0 requests/s, burstiness 1.0, rescaled to end on time"


def test_trace_without_times_takes_drawn_ones(traces):
    config = WorkloadConfig(kind="sharegpt_stats", file="stats.csv")
    with pytest.raises(ValueError, match="rate: expected requests per second with kind: sharegpt_stats, which has no"):
        load_workload(config, 2048, 0)
    workload = load_workload(dataclasses.replace(config, rate=float("inf")), 2048, 0)
    assert workload.arrival_ms.tolist() == [0, 0]
    assert workload.provenance.arrivals == "gamma gaps, rate inf requests/s, burstiness 1.0"


def test_scaling_comes_before_the_fit(traces):
    config = WorkloadConfig(kind="azure", file="azure.csv", length_scale=0.25)
    assert load_workload(config, 34, 0).provenance.too_long == 0  # 109 + 19 tokens become 28 + 5
    with pytest.raises(ValueError, match="requests exceed max_model_len 32"):
        load_workload(config, 32, 0)


def test_hash_of_the_file_enters_the_config_and_guards_it(traces):
    config = with_sha256(WorkloadConfig(kind="azure", file="azure.csv"))
    assert len(config.sha256) == 64
    assert load_workload(config, 2048, 0).provenance.sha256 == config.sha256
    (traces / "azure.csv").write_text(AZURE + "\n")
    for refuse in (lambda: load_workload(config, 2048, 0), lambda: with_sha256(config)):
        with pytest.raises(TraceError, match=f"azure.csv: expected the file whose sha256 is {config.sha256}"):
            refuse()
    assert with_sha256(DRAWN) == DRAWN


def test_no_folder_is_in_config_or_provenance(traces):
    (traces / "2023").mkdir()
    (traces / "azure.csv").rename(traces / "2023/azure.csv")
    config = with_sha256(WorkloadConfig(kind="azure", file="2023/azure.csv"))
    kept = json.dumps([dataclasses.asdict(config), dataclasses.asdict(load_workload(config, 2048, 0).provenance)])
    assert str(traces) not in kept
    assert kept.count('"file": "2023/azure.csv"') == 2


def test_missing_folder_is_named_by_its_variable(monkeypatch, tmp_path):
    config = WorkloadConfig(kind="azure", file="azure.csv")
    monkeypatch.delenv("PAXKV_TRACE_DIR", raising=False)
    with pytest.raises(ValueError, match=r"^PAXKV_TRACE_DIR is not set: .*'azure\.csv'"):
        load_workload(config, 2048, 0)
    monkeypatch.setenv("PAXKV_TRACE_DIR", str(tmp_path))
    with pytest.raises(ValueError, match=r"no trace file 'azure\.csv' in .*PAXKV_TRACE_DIR"):
        load_workload(config, 2048, 0)


SYNTHETIC = {"lengths": "sharegpt", "num_requests": 3, "rate": 1.0}
TRACE = {"kind": "azure", "file": "azure.csv"}
FOLDER = "a path below the folder that PAXKV_TRACE_DIR names"


@pytest.mark.parametrize(
    ("config", "problem"),
    [
        (SYNTHETIC | {"num_requests": None}, "num_requests: expected a number with kind: synthetic, got None"),
        (SYNTHETIC | {"num_requests": 0}, "num_requests: expected at least 1, got 0"),
        (SYNTHETIC | {"lengths": None}, "lengths: expected a distribution with kind: synthetic, got None"),
        (SYNTHETIC | {"rate": None}, "rate: expected requests per second with kind: synthetic, .*, got None"),
        (
            SYNTHETIC | {"prompt_mean": 3.0},
            "prompt_mean, output_mean: expected nothing with lengths: sharegpt, got 3.0 and None",
        ),
        (
            SYNTHETIC | {"lengths": "exponential", "prompt_mean": 3.0},
            "prompt_mean, output_mean: expected numbers with lengths: exponential, got 3.0 and None; give both",
        ),
        (SYNTHETIC | {"file": "x.csv"}, "file: expected nothing with kind: synthetic, got 'x.csv'"),
        (SYNTHETIC | {"sha256": "ab"}, "sha256: expected nothing with kind: synthetic, got 'ab'"),
        (SYNTHETIC | {"zero_output": "drop"}, "zero_output: expected refuse, .*, got drop; .* no drawn length is 0"),
        (
            SYNTHETIC | {"lengths": "constant", "prompt_mean": 1.0, "output_mean": 1.0, "max_total": 9},
            "max_prompt, max_total: expected 1024 and 2048, .* with lengths: constant, got 1024 and 9",
        ),
        (SYNTHETIC | {"rate": 0.0}, "rate must be > 0"),
        (TRACE | {"file": ""}, "file: expected a name with kind: azure, got ''"),
        (TRACE | {"file": "/data/azure.csv"}, f"file: expected {FOLDER}, got '/data/azure.csv'"),
        (TRACE | {"file": "../azure.csv"}, f"file: expected {FOLDER}, got '../azure.csv'; give it relative"),
        (TRACE | {"lengths": "sharegpt"}, "lengths: expected nothing with kind: azure, .* got sharegpt; leave it out"),
        (TRACE | {"burstiness": 2.0}, "burstiness: expected 1, its default, without rate, got 2.0"),
        (TRACE | {"time_scale": 0.0}, "time_scale: expected a positive number, got 0.0"),
        (TRACE | {"time_scale": float("inf")}, "time_scale: expected a positive number, got inf"),
    ],
)
def test_contradictory_config_is_refused_by_its_field(traces, config, problem):
    with pytest.raises(ValueError, match=problem) as refused:
        load_workload(WorkloadConfig(**config), 2048, 0)
    assert len(str(refused.value)) < 200


def test_zero_output_policy_reaches_the_reader(traces):
    (traces / "zero.csv").write_text(AZURE + "\n2023-11-16 18:16:00.0000000,5,0\n")
    config = WorkloadConfig(kind="azure", file="zero.csv")
    with pytest.raises(TraceError, match=r"^zero\.csv, line 12: expected at least 1 output token"):
        load_workload(config, 2048, 0)
    kept, dropped = (
        load_workload(dataclasses.replace(config, zero_output=policy), 2048, 0) for policy in ("keep", "drop")
    )
    assert (statistics(kept)["requests"], statistics(dropped)["requests"]) == (11, 10)
    assert kept.provenance.zero_output == dropped.provenance.zero_output == dropped.provenance.zero_output_dropped == 1


def test_config_is_read_from_yaml_and_refuses_wrong_values():
    text = "kind: azure\nfile: a.csv\nrate: .inf\nnum_requests: 200\nlength_scale: 0.0625\ntoo_long: truncate\n"
    config = draccus.decode(WorkloadConfig, yaml.safe_load(text))
    assert config == WorkloadConfig(
        kind="azure", file="a.csv", rate=float("inf"), num_requests=200, length_scale=1 / 16, too_long="truncate"
    )
    assert draccus.decode(WorkloadConfig, draccus.encode(config)) == config
    assert hash(config) == hash(dataclasses.replace(config))
    for wrong in ({"kind": "vidur"}, {"too_long": "clip"}, {"num_requests": 2.5}, {"max_model_len": 3}):
        with pytest.raises(draccus.utils.DecodingError):
            draccus.decode(WorkloadConfig, wrong)
