"""The readers against published figures of the real files."""

import functools

import pytest

from experiments.workloads import WorkloadConfig, load_workload, read_trace, scale_lengths, statistics

AZURE = ("azure", "AzureLLMInferenceTrace_conv.csv")
SHAREGPT = ("sharegpt_stats", "sharegpt_8k_filtered_stats_llama2_tokenizer.csv")
ARXIV = ("sharegpt_stats", "vattention_arxiv_long_offline.csv")
SYNC = ("sharegpt_stats", "vattention_sync_vs_async_trace.csv")
MOONCAKE = ("mooncake", "mooncake_conversation_trace.jsonl.gz")


@functools.cache  # workloads are read-only
def _read(trace_dir, trace):
    kind, file = trace
    if not (trace_dir / file).is_file():
        pytest.skip(f"no {file} in {trace_dir}")
    return read_trace(kind, trace_dir / file)


@pytest.mark.parametrize(
    ("trace", "published"),
    [
        (
            AZURE,
            {
                "requests": 19_366,
                "prompt_sum": 22_361_870,
                "output_sum": 4_088_665,
                "prompt_p50": 1020,
                "output_p50": 129,
            }
            | {"prompt_mean": 1154.70, "output_mean": 211.13, "span_s": 3501.72, "rate": 5.530, "gap_cv": 1.094},
        ),
        (
            SHAREGPT,
            {"requests": 30_731, "prompt_mean": 2340.03, "output_mean": 438.71, "total_max": 8149}
            | {"prompt_p50": 1730, "output_p50": 415, "span_s": 0, "rate": None, "gap_cv": None},
        ),
        (
            ARXIV,
            {"requests": 427, "prompt_mean": 87_426.21, "output_mean": 427.64, "total_max": 193_208}
            | {"prompt_p50": 78_967, "output_p50": 345},
        ),
        (
            SYNC,
            {"requests": 3965, "prompt_mean": 1800.20, "output_mean": 748.85, "total_max": 2984}
            | {"prompt_p50": 1800, "output_p50": 744},
        ),
        (
            MOONCAKE,
            {"requests": 12_031, "prompt_mean": 12_035.06, "output_mean": 342.62, "span_s": 3536.999}
            | {"prompt_p50": 6909, "output_p50": 350},
        ),
    ],
    ids=["azure", "sharegpt", "arxiv", "sync", "mooncake"],
)
def test_trace_has_its_published_statistics(trace_dir, trace, published):
    workload = _read(trace_dir, trace)
    found = statistics(workload)
    digits = {"rate": 3, "gap_cv": 3, "span_s": 2 if trace is AZURE else 3}
    for name, value in published.items():
        figure = found[name]
        assert (figure if figure is None else round(figure, digits.get(name, 2))) == value, name
    assert workload.provenance.rows_read == published["requests"]
    assert workload.provenance.zero_output == 0
    sums = dict(reversed(line.split()) for line in (trace_dir / "SHA256SUMS").read_text().splitlines())
    assert workload.provenance.sha256 == sums[trace[1]]


@pytest.mark.parametrize(("trace", "low"), [(ARXIV, 64_062), (SYNC, 2117)], ids=["arxiv", "sync"])
def test_shortest_request_is_the_published_one(trace_dir, trace, low):
    assert _read(trace_dir, trace).total_len.min() == low


@pytest.mark.parametrize(
    ("trace", "waste_16", "waste_2048"),
    [
        (AZURE, 0.544, 45.830),
        (SHAREGPT, 0.270, 28.059),
        (SYNC, 0.295, 37.767),
        (ARXIV, 0.009, 1.148),
        (MOONCAKE, 0.060, 7.435),
    ],
    ids=["azure", "sharegpt", "sync", "arxiv", "mooncake"],
)
def test_slack_of_the_last_block_is_the_published_share(trace_dir, trace, waste_16, waste_2048):
    # Every single length counts here, where a mean would hide two errors that cancel.
    total = [int(t) for t in _read(trace_dir, trace).total_len]
    for block, percent in ((16, waste_16), (2048, waste_2048)):
        allocated = sum(-(-t // block) * block for t in total)
        assert round(100 * (1 - sum(total) / allocated), 3) == percent


def test_sharegpt_first_turns_have_their_published_means(trace_dir):
    workload = _read(trace_dir, SHAREGPT)
    prompt, output = workload.prompt_len, workload.output_len
    first = [i for i in range(len(prompt)) if i == 0 or prompt[i] < prompt[i - 1] + output[i - 1]]
    assert len(first) == 5678
    assert round(float(prompt[first].mean()), 1) == 228.4
    assert round(float(output[first].mean()), 1) == 471.3


def _prefix_hits(workload):
    """Blocks and tokens that a cache without bound would have held, and the number of blocks looked up."""
    seen, hit_blocks, hit_tokens, blocks = set(), 0, 0, 0
    size = workload.hash_block_size
    for ids, length in zip(workload.hash_ids, workload.prompt_len.tolist(), strict=True):
        blocks += len(ids)
        for i, block in enumerate(ids.tolist()):
            if block not in seen:
                break
            hit_blocks, hit_tokens = hit_blocks + 1, hit_tokens + min(size, length - i * size)
        seen.update(ids.tolist())
    return hit_blocks, hit_tokens, blocks


def test_mooncake_has_its_published_prefix_hits(trace_dir):
    workload = _read(trace_dir, MOONCAKE)
    hit_blocks, hit_tokens, blocks = _prefix_hits(workload)
    assert (hit_blocks, blocks) == (105_710, 288_500)
    assert round(100 * hit_tokens / int(workload.prompt_len.sum(dtype=int)), 2) == 37.36
    assert (workload.arrival_ms[0], workload.arrival_ms[-1]) == (0, 3_536_999)


def test_scaling_mooncake_keeps_its_prefix_hits(trace_dir):
    workload = scale_lengths(_read(trace_dir, MOONCAKE), 1 / 16)
    assert workload.hash_block_size == 32
    assert _prefix_hits(workload)[::2] == (105_710, 288_500)


def test_burstgpt_sample_is_read_as_published(trace_dir):
    workload = _read(trace_dir, ("burstgpt", "burstgpt_format_sample.csv"))
    assert workload.arrival_ms.tolist() == [5_000, 45_000, 118_000]
    assert workload.prompt_len.tolist() == [472, 1087, 417]
    assert workload.output_len.tolist() == [18, 230, 276]


def test_first_azure_requests_fit_a_small_model_when_scaled(trace_dir):
    config = WorkloadConfig(kind="azure", file=AZURE[1], num_requests=200, length_scale=1 / 16)
    workload = load_workload(config, 1024, 0, trace_dir=trace_dir)
    # The file's first two rows: 374 + 44 tokens at 46.6805900 s, 396 + 109 at 50.9951690 s.
    assert workload.prompt_len[:2].tolist() == [24, 25]
    assert workload.output_len[:2].tolist() == [3, 7]
    assert workload.arrival_ms[:2].tolist() == [0, 4314.579]
    assert (workload.num_requests, workload.provenance.too_long) == (200, 0)
    assert (workload.provenance.length_scale, workload.provenance.rows_read) == (0.0625, 200)


def test_mooncake_rows_over_the_context_are_counted_and_refused_without_a_policy(trace_dir):
    config = {"kind": "mooncake", "file": MOONCAKE[1], "num_requests": 500}
    total = _read(trace_dir, MOONCAKE).total_len[:500]
    over = sum(int(t) > 8192 for t in total)
    assert over > 100
    with pytest.raises(ValueError, match=f"^{over} of 500 requests exceed max_model_len 8192"):
        load_workload(WorkloadConfig(**config), 8192, 0, trace_dir=trace_dir)
    dropped = load_workload(WorkloadConfig(**config, too_long="drop"), 8192, 0, trace_dir=trace_dir)
    assert (dropped.num_requests, dropped.provenance.too_long_dropped) == (500 - over, over)
    cut = load_workload(WorkloadConfig(**config, too_long="truncate"), 8192, 0, trace_dir=trace_dir)
    assert (cut.num_requests, cut.provenance.too_long_truncated, cut.total_len.max()) == (500, over, 8192)
    lost = cut.provenance.prompt_tokens_cut + cut.provenance.output_tokens_cut
    assert lost == sum(int(t) - 8192 for t in total if t > 8192)
