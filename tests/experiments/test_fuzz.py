"""Random operations find nothing in the manager, and find what is put into it."""

import dataclasses
import pathlib

import jax.numpy as jnp
import numpy as np
import pytest

from experiments import config as configs
from experiments import fuzz, fuzz_scan
from experiments.fuzz_scan import play
from experiments.fuzz_world import prints_of
from experiments.progress import Progress
from experiments.run_directory import RunDirectory
from paxkv import growth, paged
from paxkv.outcomes import Outcome
from paxkv.paged import Paged

CONFIGS = pathlib.Path(__file__).parents[2] / "configs/fuzz"
PLAIN = Paged(rows=4, max_len=20, block_size=3, num_blocks=9)


def config_of(name):
    return configs.decode(fuzz.Config, configs.read_yaml(CONFIGS / name))


@pytest.mark.slow
def test_fifty_thousand_operations_leave_nothing_wrong(tmp_path):
    config = fuzz.resolve(config_of("ci.yaml"))
    with RunDirectory.open(tmp_path / "run") as run_dir:
        results = fuzz.run(config, run_dir, Progress())
        assert results["all"] == {"operations": 50_000, "faults": 0}
        assert fuzz.failed_checks(results) == []
        counts = run_dir.read_parquet("outcomes.parquet")
        assert counts["count"].sum() == 50_000
        assert fuzz.run(config, run_dir, Progress()) == results  # its parts are finished: nothing is played again
    assert results["everything"].keys() >= {"swap_out.LATER", "fork.OUT_OF_RANGE", "moves", "copies", "reset.OK"}


def test_a_series_is_the_same_each_time_and_however_long_it_is():
    whole, again, half = (play(PLAIN, "plain", 3, steps) for steps in (6000, 6000, 3000))
    assert whole == again
    assert whole != play(PLAIN, "plain", 4, 6000)
    for operation, counts in half.outcomes.items():
        assert all(count <= whole.outcomes[operation][outcome] for outcome, count in counts.items())
    assert sum(sum(counts.values()) for counts in half.outcomes.values()) == 3000
    assert min(min(counts.values()) for counts in whole.outcomes.values()) > 0


@pytest.fixture
def changed(monkeypatch):
    """For tests that change the manager: nothing compiled before or after must be mistaken for it."""
    fuzz_scan._dispatch.clear_cache()
    yield monkeypatch
    fuzz_scan._dispatch.clear_cache()


def test_a_row_that_gets_the_block_of_another_reads_what_it_did_not_write(changed):
    take = paged.take

    def take_again(pool, wanted, ranking=None):
        after, ids, ok = take(pool, wanted, ranking)
        return dataclasses.replace(after, head=jnp.where(after.num_free == 4, after.head - 1, after.head)), ids, ok

    changed.setattr(paged, "take", take_again)
    played = play(PLAIN, "plain", 0, 3000)
    assert played.faults > 0
    assert played.first.step > 0
    again = play(PLAIN, "plain", 0, played.first.step + 1)
    assert (again.faults, again.first) == (1, played.first)


def test_a_write_into_the_wrong_slot_is_seen_by_who_reads(changed):
    put = growth.put

    def put_elsewhere(table, rows, columns, ids):
        new = put(table, rows, columns, ids)
        fifth = jnp.any((columns == 4) & (rows < table.ids.shape[0]))
        return dataclasses.replace(new, ids=jnp.where(fifth, jnp.roll(new.ids, 1, axis=0), new.ids))

    changed.setattr(growth, "put", put_elsewhere)
    played = play(PLAIN, "plain", 0, 3000)
    assert "rows_read_what_they_wrote" in played.first.checks


def test_a_fault_that_is_not_recorded_is_noticed(changed):
    changed.setattr("paxkv.seqs.record", lambda faults, outcome, bad: faults)
    played = play(PLAIN, "plain", 0, 500)
    assert "faults_are_recorded" in played.first.checks


def test_prints_tell_identity_tokens_and_their_order_apart():
    tokens = np.array([0, 1, 1, 0, 1], np.int32)
    found = np.asarray(prints_of(jnp.asarray(tokens), jnp.array([0, 7, 1], jnp.int32)))
    values = [0, 7, 1, *tokens.tolist()]
    for position in range(5):
        value = 0
        for v in values[: position + 4]:
            value = (value * 1_000_003 + v + 1) % 2**32
        assert found[position] == value


def test_what_is_wrong_or_never_happened_fails_the_run():
    good = {"operations": 25_000, "faults": 0, "admit.OK": 4, "copies": 2}
    results = {
        "all": {"operations": 75_000, "faults": 1},
        "a": good,
        "b": good | {"faults": 1, "first_fault": "step 3: admit came to OK and broke this (1)"},
        "c": good | {"admit.OK": 0, "copies": 0},
    }
    assert fuzz.failed_checks({"a": good}) == []
    assert fuzz.failed_checks(results) == [
        "b: 1 operations left something wrong; step 3: admit came to OK and broke this (1)",
        "c: admit.OK never happened in 25,000 operations",
        "c: copies never happened in 25,000 operations",
    ]
    assert fuzz.failed_checks({"too short to tell": results["c"] | {"operations": 24_999}}) == []
    memories, operations = fuzz.tables(results)
    assert memories.rows[2][:3] == ["b", "25,000", "1"]
    assert operations.rows == [["admit", "8", *[""] * (len(Outcome) - 1)]]


def test_operations_are_shared_out_to_the_last_one():
    config = fuzz.Config(operations=11, memories=dict.fromkeys("abc", PLAIN))
    assert dict(fuzz._shares(config)) == {"a": 4, "b": 4, "c": 3}


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"operations": 0}, "operations must be at least 1"),
        ({"memories": {}}, "memories: expected at least one"),
        ({"memories": {"all": PLAIN}}, "expected names other than 'all'"),
        (
            {"memories": {"a": dataclasses.replace(PLAIN, max_chunk=2)}},
            r"memories.a.max_chunk: expected at least 6.*got 2",
        ),
    ],
)
def test_what_tests_nothing_is_refused(changes, said):
    with pytest.raises(ValueError, match=said):
        fuzz.resolve(dataclasses.replace(fuzz.Config(memories={"a": PLAIN}), **changes))


def test_the_soak_covers_every_policy():
    memories = config_of("block_manager.yaml").memories.values()
    caches = [memory.cache for memory in memories if memory.cache is not None]
    assert {cache.eviction for cache in caches} == {"lru", "lfu", "fifo", "priority"}
    assert {cache.duplicates for cache in caches} == {"keep", "merge"}
    assert {cache.publish for cache in caches} == {"on_schedule", "on_compute"}
    assert {memory.free_order for memory in memories} == {"recent_first", "fifo"}
    assert any(cache.collide for cache in caches)
    for knob in ("forks", "host_blocks", "lookahead", "watermark_blocks", "groups"):
        assert any(getattr(memory, knob) for memory in memories), knob
