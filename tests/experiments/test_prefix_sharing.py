"""The whole experiment on few prompts: its results, what fails a run, and that it can be repeated and taken up."""

import contextlib
import dataclasses
import gzip
import json
import pathlib
import re

import numpy as np
import pytest

from experiments import config as configs
from experiments import plots
from experiments import prefix_sharing as experiment
from experiments.prefix_bounds import block_chains, unbounded_hits
from experiments.prefix_measure import RECENT_PROMPTS, Asked, Case, ask_trace, make_memory
from experiments.prefix_prompts import Prompts, SyntheticPrompts, synthetic_prompts
from experiments.progress import Progress
from experiments.published import Published
from experiments.run_directory import RunDirectory
from experiments.workloads import WorkloadConfig, load_workload

CONFIGS = pathlib.Path(__file__).parents[2] / "configs/prefix_sharing"
CHATS = SyntheticPrompts(
    conversations=16,
    turns=3,
    open_conversations=5,
    system_prompts=3,
    system_tokens=20,
    popularity=1.0,
    question_tokens=(2, 9),
    answer_tokens=(1, 12),
)
CONFIG = experiment.Config(
    seed=2,
    synthetic=CHATS,
    block_sizes=(4, 8),
    evictions=("lru",),
    cache_tokens=(96, 192, "unbounded"),
    resident=2,
    chunk_tokens=32,
    explain_misses=True,
)
NAMES = [f"{block}-{cache}" for block in ("block4", "block8") for cache in ("lru-96", "lru-192", "unbounded")]
# Two chats of a made-up service. Blocks of 512 tokens by hash id, the last of each prompt partly filled.
ROWS = [(700, [7, 8]), (1500, [7, 8, 9]), (600, [7, 3]), (1500, [7, 8, 9]), (100, [4])]


class Dies(Progress):
    """Ends a run before the cache of the given place."""

    def __init__(self, place):
        super().__init__()
        self.place = place

    @contextlib.contextmanager
    def task(self, name, total=None):
        done = 0

        def advance(amount=1, note=""):
            nonlocal done
            done += amount
            if done == self.place:
                raise KeyboardInterrupt

        yield advance


def run(config, path, progress=None):
    with RunDirectory.open(path) as run_dir:
        if not (path / "manifest.json").exists():
            run_dir.write_json("manifest.json", {"inputs": {}})
        return experiment.run(config, run_dir, progress or Progress())


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A run that died after two caches and was taken up: its results and its folder."""
    path = tmp_path_factory.mktemp("runs") / "first"
    with pytest.raises(KeyboardInterrupt):
        run(CONFIG, path, Dies(2))
    begun = {p: p.stat().st_mtime_ns for p in (path / "parts").rglob("*.*")}
    assert len(list((path / "parts").iterdir())) == 2
    results = run(CONFIG, path)
    assert all(p.stat().st_mtime_ns == at for p, at in begun.items())
    return results, path


@pytest.fixture
def trace(tmp_path, monkeypatch):
    lines = [
        json.dumps({"timestamp": 0, "input_length": length, "output_length": 1, "hash_ids": ids})
        for length, ids in ROWS
    ]
    (tmp_path / "trace.jsonl.gz").write_bytes(gzip.compress("\n".join(lines).encode()))
    monkeypatch.setenv("PAXKV_TRACE_DIR", str(tmp_path))
    return experiment.Config(
        trace=WorkloadConfig(kind="mooncake", file="trace.jsonl.gz"),
        partial_blocks=True,
        block_sizes=(512,),
        evictions=("lru",),
        chunk_tokens=1536,
    )


def test_every_configuration_is_a_part_once_and_one_without_bound_serves_all_policies():
    config = dataclasses.replace(
        CONFIG, block_sizes=(8,), evictions=("fifo", "priority"), cache_tokens=("unbounded", 96)
    )
    assert experiment.parts(config) == ["block8-unbounded", "block8-fifo-96", "block8-priority-96"]


def test_policies_and_block_sizes_that_are_not_crossed_meet_the_first_of_the_others():
    config = dataclasses.replace(CONFIG, evictions=("fifo", "lru"), cache_tokens=(96,), crossed=False)
    assert experiment.parts(config) == ["block4-fifo-96", "block4-lru-96", "block8-fifo-96"]


@pytest.mark.parametrize("eviction", ["lru", "lfu", "fifo", "priority"])
def test_sizes_of_one_policy_share_a_memory_as_large_as_the_largest(eviction):
    prompts = Prompts(np.zeros((3, 9), np.int32), 1, np.array([5, 8, 9], np.int32), np.zeros(3, np.int32))
    asked = Asked(prompts, prompts.lengths, prompts.lengths.astype(np.int64), scale=1)
    sizes = [Case(4, eviction, tokens) for tokens in (8, 15)]
    memory = make_memory(sizes, asked, resident=2)
    assert (memory.cache.eviction, memory.num_blocks, memory.rows, memory.max_len) == (eviction, 3, 2, 9)
    assert make_memory([*sizes, Case(4, eviction, None)], asked, 2).num_blocks == 2 + 2 + 3
    explaining = make_memory(sizes, asked, resident=2, explain_misses=True)
    assert explaining.cache.explain
    assert explaining.num_blocks == 2 + 2 + 3


def test_results_have_their_names_and_hold_what_they_must(finished):
    results, _ = finished
    assert list(results) == NAMES
    assert experiment.failed_checks(results) == []
    for name, found in results.items():
        assert {"block_hit_rate", "token_hit_rate", "blocks_saved"} <= found.keys()
        assert found.keys() <= experiment.GLOSSARY.keys()
        assert found["block_hit_rate"] == found["blocks_saved"] / found["blocks"]
        block_size = int(name.split("-")[0].removeprefix("block"))
        assert found["hit_tokens"] == found["blocks_saved"] * block_size
        assert 0 < found["token_hit_rate"] < 1
        assert found["requests"] == 48
        assert found["peak_blocks_held"] <= found["cache_blocks"]
        assert found["peak_bytes_saved"] == found["peak_blocks_saved"] * block_size * 131_072
        assert (found["evictions"] == 0) == name.endswith("unbounded")
    for block in ("block4", "block8"):
        small, large, unbounded = (results[f"{block}-{cache}"] for cache in ("lru-96", "lru-192", "unbounded"))
        assert small["blocks_saved"] < large["blocks_saved"] < unbounded["blocks_saved"]
        assert small["blocks_saved"] < small["optimal_blocks_saved"] < unbounded["optimal_blocks_saved"]
        assert unbounded["blocks_saved"] == unbounded["optimal_blocks_saved"]
    assert results["block4-lru-96"]["cache_blocks"] == 2 * results["block8-lru-96"]["cache_blocks"] == 24


def test_rows_of_the_table_add_up_to_the_results(finished):
    results, path = finished
    with RunDirectory.open(path) as run_dir:
        prompts = run_dir.read_parquet("prompts.parquet")
    assert prompts["cache"].unique(maintain_order=True).to_list() == NAMES
    for name, found in results.items():
        own = prompts.filter(cache=name)
        metrics = ["tokens", "hit_tokens", "blocks", "evictions", *(m for m in found if m.startswith("missed_"))]
        assert len(metrics) == 4 + 7
        sums = {metric: own[metric].sum() for metric in metrics}
        assert sums == {metric: found[metric] for metric in sums}
        assert own["hit_blocks"].sum() == found["blocks_saved"]
        assert (own["hit_tokens"] < own["tokens"]).all()
        own = own.tail(RECENT_PROMPTS)
        assert found["recent_token_hit_rate"] == own["hit_tokens"].sum() / own["tokens"].sum()


def test_misses_are_explained_where_it_was_asked_for(finished, tmp_path):
    results, _ = finished
    prompts = synthetic_prompts(CHATS, CONFIG.seed)
    for name, found in results.items():
        block_size = int(name.split("-")[0].removeprefix("block"))
        # What was never cached before is each block once; what a prompt has beyond its blocks is below one.
        assert found["missed_cold"] == block_size * max(max(c, default=0) for c in block_chains(prompts, block_size))
        assert found["missed_below_block"] == (prompts.lengths % block_size).sum()
        assert found["missed_other_key"] == found["missed_alignment"] == 0
        assert sum(count for metric, count in found.items() if metric.startswith("missed_")) == (
            found["tokens"] - found["hit_tokens"]
        )
    small, unbounded = results["block4-lru-96"], results["block4-unbounded"]
    # Without bound nothing is evicted, and each prompt is new but for what it repeats.
    assert unbounded["missed_evicted"] == unbounded["missed_hole"] == 0 < small["missed_evicted"]
    _, table, *_ = experiment.tables(results)
    assert table.title == "Tokens not found in the prefix cache, by reason, of all tokens"
    shares = dict(zip(table.headings, table.rows[0], strict=True))
    assert shares["evicted"] == f"{small['missed_evicted'] / small['tokens']:.2%}"
    assert "other key" not in shares
    config = dataclasses.replace(CONFIG, explain_misses=False, block_sizes=(8,), cache_tokens=(96,))
    (unexplained,) = run(config, tmp_path / "run").values()
    same = {metric: value for metric, value in results["block8-lru-96"].items() if not metric.startswith("missed_")}
    assert unexplained == same


def test_running_a_config_again_gives_the_same_results(finished, tmp_path):
    results, path = finished
    assert run(CONFIG, tmp_path / "again") == results
    for name in ("prompts.parquet", "caches.parquet"):
        assert (path / name).read_bytes() == (tmp_path / "again" / name).read_bytes()


def test_figures_are_drawn_from_the_files_of_the_run(finished):
    _, path = finished
    with plots.style():
        titles = [figure.title for figure in experiment.figures(path)]
    assert titles == ["Hit rate over cache size", "Hit rate by block size", "Blocks stored against blocks asked for"]


def test_fifty_requests_with_a_thousand_tokens_in_common_store_62_blocks_once(tmp_path):
    config = configs.decode(experiment.Config, configs.read_yaml(CONFIGS / "shared_prefix.yaml"))
    assert (config.synthetic.conversations, config.synthetic.system_tokens, config.resident) == (50, 1000, 50)
    given = tuple(
        dataclasses.replace(p, values={"block16-unbounded": p.values["block16-unbounded"]}) for p in config.published
    )
    results = run(dataclasses.replace(config, block_sizes=(16,), published=given), tmp_path / "run")
    assert experiment.failed_checks(results) == []
    found = results["block16-unbounded"]
    assert (found["shared_blocks"], found["most_sharers"], found["blocks_saved"]) == (62, 50, 62 * 49)
    assert found["peak_bytes_saved"] == 62 * 49 * 16 * 131_072
    # 1,200 tokens are 75 blocks; 13 of them are a request's own.
    assert found["peak_blocks_held"] == 62 + 50 * 13
    with plots.style():
        (figure,) = experiment.figures(tmp_path / "run")  # one size is no axis
    assert figure.title == "Blocks stored against blocks asked for"
    _, together, *_ = experiment.tables(results)
    assert together.rows == [
        ["block16-unbounded", "62 stored once instead of 50 times", "712", "3,750", "3,038", "5.93"],
    ]


def test_a_trace_counts_as_its_publishers_do(trace, tmp_path):
    config = dataclasses.replace(trace, published=(Published("blocks_saved", {"block512-unbounded": 6}),))
    results = run(experiment.resolve(config), tmp_path / "run")
    found = results["block512-unbounded"]
    # Hit: nothing; 7 and 8; 7; 7, 8 and 9, all of the prompt; nothing.
    assert (found["blocks"], found["blocks_saved"]) == (11, 6)
    assert (found["tokens"], found["hit_tokens"]) == (4400, 1024 + 512 + 1500)
    assert experiment.failed_checks(results) == []
    wrong = dataclasses.replace(trace, published=(Published("blocks_saved", {"block512-unbounded": 7}),))
    results = run(experiment.resolve(wrong), tmp_path / "wrong")
    assert experiment.failed_checks(results) == [
        "block512-unbounded: blocks_saved is 6, published 7, which may differ by 0"
    ]
    assert experiment.tables(results)[-1].title == "Published values: 1 compared, 1 differ"


def test_a_trace_counts_token_by_token_unless_told_otherwise(trace):
    workload = load_workload(trace.trace, 4096, 0)
    asked = ask_trace(workload, partial_blocks=False)
    assert (asked.scale, asked.prompts.unit) == (1, 512)
    assert asked.known_tokens.tolist() == asked.tokens.tolist() == [700, 1500, 600, 1500, 100]
    # 700 tokens in common are 10 blocks of 64, 512 are 8, and 1,500 but for the last are 23.
    chains = block_chains(asked.prompts, 64)
    assert unbounded_hits(chains, ((asked.known_tokens - 1) // 64).tolist()) == [0, 10, 8, 23, 0]


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"block4-unbounded": {"miscounted_requests": 3}}, "the hits of 3 requests are not those of an independent"),
        ({"block4-lru-96": {"blocks_saved": 10**6}}, "1,000,000 blocks hit, but no cache of its size can hit more"),
        ({"block4-lru-192": {"missed_cold": 0}}, "block4-lru-192: .* tokens were hit or explained, of "),
        ({"block8-lru-192": {"blocks_saved": 1}}, "block8-lru-192: 1 blocks hit, fewer than the .* which is smaller"),
    ],
)
def test_what_cannot_be_fails_the_run(finished, changes, said):
    results, _ = finished
    broken = {name: found | changes.get(name, {}) for name, found in results.items()}
    assert any(re.search(said, failure) for failure in experiment.failed_checks(broken))


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"synthetic": None}, "trace, synthetic: expected one of the two .* got neither"),
        ({"trace": WorkloadConfig()}, "got both"),
        ({"block_sizes": ()}, "block_sizes: expected at least one value"),
        ({"evictions": ("lru", "lru")}, "evictions: .* none twice"),
        ({"block_sizes": (0,)}, "block_sizes must be at least 1"),
        ({"cache_tokens": (7,)}, "cache_tokens must be at least 8"),
        ({"resident": 0}, "resident must be at least 1"),
        ({"partial_blocks": True, "explain_misses": False}, "partial_blocks: only a trace"),
        ({"partial_blocks": True}, "explain_misses: expected false with partial_blocks"),
        ({"kv_model": "Llama-3-9B"}, "did you mean 'Llama-3-8B'"),
        ({"published": (Published("blocks", {"block5-unbounded": 1}),)}, "published: expected names of configurations"),
        ({"synthetic": SyntheticPrompts(conversations=0)}, "conversations must be at least 1"),
    ],
)
def test_what_describes_no_comparison_is_refused_before_it_leaves_a_directory(changes, said):
    with pytest.raises(ValueError, match=said):
        experiment.resolve(dataclasses.replace(CONFIG, **changes))


def test_a_trace_that_is_missing_or_counted_by_another_block_is_named(trace, tmp_path, monkeypatch):
    with pytest.raises(ValueError, match=r"block_sizes: expected \[512\], .* got \[256\]"):
        run(dataclasses.replace(trace, block_sizes=(256,)), tmp_path / "run")
    monkeypatch.setenv("PAXKV_TRACE_DIR", str(tmp_path / "run"))
    with pytest.raises(ValueError, match=r"no trace file 'trace.jsonl.gz' in .*run"):
        experiment.resolve(trace)
    monkeypatch.delenv("PAXKV_TRACE_DIR")
    with pytest.raises(ValueError, match="PAXKV_TRACE_DIR is not set"):
        experiment.resolve(trace)


def test_an_expectation_of_a_metric_that_is_none_is_refused(trace, tmp_path):
    config = dataclasses.replace(trace, published=(Published("blocks_hit", {"block512-unbounded": 6}),))
    with pytest.raises(ValueError, match="published: there is no 'blocks_hit' of 'block512-unbounded'"):
        run(config, tmp_path / "run")
