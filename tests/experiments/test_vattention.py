"""The arithmetic of vAttention against tables typed in from its sources, and its config against the code."""

import dataclasses
import pathlib

import pytest

from experiments import cli, config, vattention
from experiments.progress import Progress
from experiments.run_directory import RunDirectory
from experiments.vattention_sizes import Kept, Virtual, case_name, page_sizes, stranded

CONFIG = pathlib.Path(__file__).parents[2] / "configs/vattention/published.yaml"
PAGES = ("64 KiB", "128 KiB", "256 KiB", "2 MiB")
BLOCKS = {
    ("Yi-6B", 1): (64, 128, 256, 2048),
    ("Yi-6B", 2): (128, 256, 512, 4096),
    ("Llama-3-8B", 1): (32, 64, 128, 1024),
    ("Llama-3-8B", 2): (64, 128, 256, 2048),
    ("Yi-34B", 1): (32, 64, 128, 1024),
    ("Yi-34B", 2): (64, 128, 256, 2048),
    ("Llama-3-70B", 1): (32, 64, 128, 1024),
    ("Llama-3-70B", 2): (64, 128, 256, 2048),
    ("Llama-3-70B", 4): (128, 256, 512, 4096),
    ("Llama-3-70B", 8): (256, 512, 1024, 8192),
}


def load():
    return config.decode(vattention.Config, config.read_yaml(CONFIG))


@pytest.fixture
def found(tmp_path):
    with RunDirectory.open(tmp_path / "run") as run_dir:
        return vattention.run(vattention.resolve(load()), run_dir, Progress())


def test_every_published_value_holds_and_the_whole_block_size_table_is_among_them(found):
    assert vattention.failed_checks(found) == []
    for (model, degree), sizes in BLOCKS.items():
        for page, size in zip(PAGES, sizes, strict=True):
            of_bf16, of_fp8 = (found[case_name(model, degree, page, element)] for element in (2, 1))
            assert (of_bf16["block_size"], of_bf16["block_size_published"]) == (size, size)
            assert (of_fp8["block_size"], of_fp8["block_size_published"]) == (2 * size, 2 * size)
            assert of_bf16["page_group_bytes"] == of_fp8["page_group_bytes"]  # a page is a page


def test_times_and_bytes_are_those_of_the_sources(found):
    assert found["Llama-3-8B/tp2/2MiB"]["map_ms"] == 2.56
    assert found["Llama-3-8B/tp1/2MiB"]["map_ms"] == 2.56  # each device maps its own pages, side by side
    assert found["Yi-34B/tp2/2MiB"]["map_ms"] == 4.8
    assert found["Llama-3-8B/tp1/64KiB"]["supply_gb_per_s"] == pytest.approx(65_536 / 8600)
    assert "map_ms" not in found["Llama-3-8B/tp1/128KiB"]  # nobody says what mapping one costs
    assert found["Llama-3-8B/tp1/2MiB"]["worst_waste_bytes"] == 64 * (2 * 1024**2 - 2048)
    assert found["virtual/yi_34b_200_ki"]["virtual_bytes"] == 120 * 500 * 200 * 1024**2
    assert found["virtual/yi_34b_200_000"]["virtual_tb"] == 12.288


def test_kept_blocks_strand_every_page_they_touch():
    found = stranded(Kept(blocks=64, kept=6, blocks_per_page=4, strides=(1, 3, 10)))
    # Blocks 0..5 are in pages 0, 0, 0, 0, 1, 1; 0, 3, .. 15 in 0, 0, 1, 2, 3, 3; 0, 10, .. 50 in pages of their own.
    assert [found[f"stride/{stride}"]["held_pages"] for stride in (1, 3, 10)] == [2, 4, 6]
    assert [found[f"stride/{stride}"]["times_fewest"] for stride in (1, 3, 10)] == [1, 2, 3]
    with pytest.raises(ValueError, match=r"strides: expected at most 64 blocks, but 13 reaches block 65"):
        Kept(blocks=64, kept=6, blocks_per_page=4, strides=(13,))


def test_a_wrong_page_time_fails_the_run(tmp_path):
    slower = dataclasses.replace(load(), map_call_us={"2 MiB": 41.0, "64 KiB": 8.6})
    with RunDirectory.open(tmp_path / "run") as run_dir:
        failures = vattention.failed_checks(vattention.run(slower, run_dir, Progress()))
    assert failures == [
        "Llama-3-8B/tp2/2MiB: map_ms is 2.624, published 2.56, which may differ by 0",
        "Yi-34B/tp2/2MiB: map_ms is 4.92, published 4.8, which may differ by 0",
    ]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"models": {}}, "models: expected at least one"),
        ({"map_call_us": {"3 MiB": 1.0}}, "map_call_us: expected pages out of 64 KiB, .* got 3 MiB"),
        ({"map_call_us": {"2 MiB": 0.0}}, "map_call_us: expected a finite number, at least a nanosecond"),
        ({"map_call_us": {"2 MiB": float("inf")}}, "map_call_us: expected a finite number"),
        ({"models": {"Yi-6B": ()}}, "models.Yi-6B: expected at least one degree"),
        ({"virtual": {"a": Virtual("Yi-6B", 1, "2 MiB", 0, 8)}}, "rows must be at least 1"),
        ({"models": {"Yi-6b": (1,)}}, "did you mean 'Yi-6B'"),
        ({"models": {"Yi-6B": (3,)}}, "tensor_parallel must divide kv_heads"),
        ({"pages": ("64 kb",)}, "map_call_us: expected pages out of 64 kb"),
        ({"pages": ("64 kb",), "map_call_us": {}}, "pages must end in one of"),
    ],
)
def test_what_makes_no_table_is_refused(change, said):
    with pytest.raises(ValueError, match=said):
        vattention.resolve(dataclasses.replace(load(), **change))


def test_a_page_smaller_than_a_token_holds_no_block():
    with pytest.raises(ValueError, match="page_bytes must hold a token of 2048 bytes, got 1024"):
        page_sizes({"Llama-3-8B": (1,)}, (2,), ("1 KiB",), {})


def test_a_run_says_modelled_and_how_many_published_values_hold(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert cli.main(["run", str(CONFIG), "--out_dir", "runs"], {"vattention": "experiments.vattention"}) == 0
    out, _ = capsys.readouterr()
    assert "map_ms (modelled)" in out
    assert "Published values: 115 compared, 0 differ" in out
    (run,) = pathlib.Path("runs").iterdir()
    assert "may differ by" in (run / "report.html").read_text()
