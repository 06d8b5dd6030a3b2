"""The whole experiment on a tiny untrained model: meshes give the same tokens, and devices hold what was predicted."""

import dataclasses
import json

import polars as pl
import pytest
from flax import nnx

from experiments import cli
from experiments import sharded_serving as experiment
from experiments.sharded_setup import parse_mesh
from experiments.workloads import WorkloadConfig
from models.checkpoint import save_checkpoint
from models.config import DecoderConfig
from models.decoder import Decoder
from paxkv.config import MemoryConfig
from paxkv.sharding import MeshShape

pytestmark = pytest.mark.slow

MODEL = DecoderConfig(vocab=256, width=16, layers=2, q_heads=4, kv_heads=2, head_dim=8, ffn=16, max_len=64)
YAML = """
experiment: sharded_serving
seed: 3
model: {model}
meshes: [d1m1k1, d1m2k2]
kv_memory: 10 KiB
memory: {{kind: paged, block_size: 4}}
rows: 4
max_model_len: 48
token_budget: 16
steps_per_dispatch: 8
workload: {{lengths: exponential, prompt_mean: 12, output_mean: 10, max_prompt: 30, max_total: 40, num_requests: 9,
  rate: 2000, too_long: truncate}}
"""


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    folder = tmp_path_factory.mktemp("sharded")
    save_checkpoint(folder / "model", Decoder(MODEL, rngs=nnx.Rngs(0)), {"training.json": "{}"})
    (folder / "config.yaml").write_text(YAML.format(model=folder / "model"))
    assert cli.main(["run", str(folder / "config.yaml"), "--out_dir", str(folder / "runs")]) == 0
    (run,) = (folder / "runs").iterdir()
    return folder, run, json.loads((run / "summary.json").read_text())["results"]


def test_every_mesh_gives_the_tokens_of_the_first(finished):
    _, _, results = finished
    assert list(results) == ["d1m1k1", "d1m2k2"]
    assert all(values["tokens_equal"] and values["fits"] for values in results.values())
    assert all(values["near_tie_differences"] == 0 for values in results.values())


def test_memory_and_exchange_are_what_arithmetic_says(finished):
    _, _, results = finished
    block = 4 * 2 * 2 * 2 * 8 * 4  # tokens, layers, keys and values, heads, head_dim, bytes
    one, both = results.values()
    assert (one["blocks"], both["blocks"]) == (10240 // block, 2 * (10240 // (block // 2)))
    assert [v["kv_bytes_per_device"] for v in results.values()] == [10240 // block * block] * 2
    assert both["capacity_tokens"] == both["blocks"] * 4
    assert one["collective_bytes_per_step"] == 0
    # Of four rows: the embedding, two sums a layer, logits of a quarter of the vocabulary, and the merge of two heads.
    merge = 2 * (4 * 2 * 4 + 4 * 2 * 8 * 4)
    assert both["merge_bytes_per_step"] == merge
    assert both["collective_bytes_per_step"] == merge + (1 + 2 * 2) * 4 * 16 * 4 + 4 * 64 * 4


@pytest.mark.soak
def test_a_pair_of_meshes_gives_the_same_tokens_and_says_what_moved(finished, tmp_path):
    folder, _, _ = finished
    text = YAML.format(model=folder / "model").replace("block_size: 4}", "block_size: 4, prefix_caching: true}")
    (tmp_path / "config.yaml").write_text(text.replace("[d1m1k1, d1m2k2]", "[d1m1k1]\npairs: [d1m2k1+d1m1k2]"))
    assert cli.main(["run", str(tmp_path / "config.yaml"), "--out_dir", str(tmp_path / "runs")]) == 0
    (run,) = (tmp_path / "runs").iterdir()
    values = json.loads((run / "summary.json").read_text())["results"]["d1m2k1+d1m1k2"]
    assert values["tokens_equal"]
    assert values["moved_bytes"] == values["moved_blocks"] * 4 * 2 * 2 * 2 * 8 * 4 > 0
    assert values["devices"] == 4


def test_a_host_that_keeps_devices_waiting_for_too_long_fails_the_run(finished):
    _, run, results = finished
    steps = pl.read_parquet(run / "steps.parquet").filter(pl.col("new_tokens") > 0, pl.col("prefill_tokens") == 0)
    for name, values in results.items():
        own = steps.filter(pl.col("mesh") == name)
        assert min(len(own), own["host_ms"].min(), own["wall_ms"].min()) > 0
        assert values["host_share"] == pytest.approx(
            own["host_ms"].sum() / own.select("host_ms", "wall_ms").to_numpy().sum()
        )
    assert experiment.failed_checks(results) == []
    limited = {name: values | {"host_share": 0.06, "max_host_share": 0.05} for name, values in results.items()}
    assert experiment.failed_checks(limited) == [
        f"{name}: host_share is 0.06, more than max_host_share = 0.05" for name in results
    ]


def test_the_report_is_there(finished):
    _, run, _ = finished
    page = (run / "report.html").read_text()
    for words in ("Capacity", "Exchange", "merging attention", "d1m2k2"):
        assert words in page


def test_a_finished_run_is_not_run_again(finished, capsys):
    folder, _, _ = finished
    assert cli.main(["run", str(folder / "config.yaml"), "--out_dir", str(folder / "runs")]) == 2
    assert "finished" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"meshes": ("d1m2",)}, "meshes: expected names such as d1m8k1"),
        ({"meshes": ("d1m1k1", "d1m1k1")}, "none twice"),
        ({"meshes": ("d4m4k1",)}, "d4m4k1: mesh: expected at most 8 devices"),
        (
            {"meshes": ("d1m4k1",), "replicate_kv_heads": False},
            "d1m4k1: mesh.model: expected a divisor of the 2 KV heads",
        ),
        ({"meshes": ("d1m1k3",), "ffn": ("model",)}, "d1m1k3: vocab: expected a multiple of the 3 parts"),
        ({"kv_memory": "1000 B"}, "d1m1k1: kv_memory: expected room on each device for a block of .* got 1000"),
        ({"kv_format": "nope"}, "kv_format: .* got 'nope'"),
        ({"memory": MemoryConfig(num_blocks=0)}, "memory.num_blocks must be at least 1"),
        ({"memory": MemoryConfig(swap_space="4 KiB"), "meshes": ("d1m1k2",)}, "memory.swap_space: expected '0 GiB'"),
        ({"temperature": -1.0}, "temperature: expected a finite number, 0 or more"),
        ({"link_bytes_per_s": 0.0}, "link_bytes_per_s: expected a finite number above 0"),
        ({"max_host_share": 2.0}, "max_host_share: expected a share"),
        ({"pairs": ("d1m1k1+d1m1k1",) * 2}, "pairs: expected none twice"),
        ({"pairs": ("d1m1k1+d1m1k1",), "temperature": 1.0}, "temperature: expected 0 where pairs serve"),
        ({"pairs": ("d1m1k1+d2m1k1",)}, r"pairs: d1m1k1\+d2m1k1: source: |pairs: d1m1k1\+d2m1k1: memory.cache"),
        ({"kv_format": "e4m3_layer"}, "kv_format: expected one whose scales need no calibration"),
        ({"memory": MemoryConfig(kind="vattention")}, "memory.kind: expected 'paged'"),
    ],
)
def test_what_cannot_be_served_is_refused_by_name(finished, changes, message):
    folder, _, _ = finished
    config = experiment.Config(
        model=folder / "model",
        meshes=("d1m1k1",),
        kv_memory="10 KiB",
        memory=MemoryConfig(block_size=4),
        rows=4,
        max_model_len=48,
        token_budget=16,
        workload=WorkloadConfig(
            lengths="exponential",
            prompt_mean=12.0,
            output_mean=10.0,
            max_prompt=30,
            max_total=40,
            num_requests=9,
            rate=10.0,
        ),
    )
    with pytest.raises(ValueError, match=message):
        experiment.resolve(dataclasses.replace(config, **changes))


def test_names_of_meshes():
    assert parse_mesh("d2m4k16") == MeshShape(2, 4, 16)
    assert parse_mesh("d2m4k16").name == "d2m4k16"
