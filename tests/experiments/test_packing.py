"""Static packing against a plain loop over bytes, and the whole table against its published values."""

import dataclasses
import json
import pathlib

import numpy as np
import pytest

from experiments import cli, config, files, packing
from experiments.packing import Config, Scheme
from experiments.progress import Progress
from experiments.run_directory import RunDirectory
from experiments.workloads import WorkloadConfig

CONFIG = pathlib.Path(__file__).parents[2] / "configs/packing/published.yaml"
KIB, MIB = 1024, 1024**2
SCHEMES = {
    "blocks": Scheme("paged", block_size=48),
    "small_pages": Scheme("vattention", page="64 KiB"),
    "large_pages": Scheme("vattention", page="2 MiB"),
    "longest": Scheme("naive"),
}


@pytest.fixture
def pack(tmp_path, monkeypatch):
    """Packs requests of these lengths, a prompt token and the rest output, from a trace file of their own."""

    def pack(totals, memory="1 GiB", **changes):
        rows = (f"2023-11-16 18:00:00.0000000,1,{total - 1}\n" for total in totals)
        (tmp_path / "trace.csv").write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n" + "".join(rows))
        monkeypatch.setenv("PAXKV_TRACE_DIR", str(tmp_path))
        asked = Config(
            memory=memory, traces={"own": WorkloadConfig("azure", "trace.csv")}, schemes=SCHEMES, block_sizes=(48, 7)
        )
        return run(dataclasses.replace(asked, **changes), tmp_path / "run")

    return pack


def run(asked, path):
    with RunDirectory.open(path) as run_dir:
        run_dir.write_json("manifest.json", {"inputs": {}, "earlier_sessions": []})
        return packing.run(packing.resolve(asked), run_dir, Progress())


def by_hand(totals, bytes_of, memory_bytes):
    """How many fit, byte by byte, and the share that their tokens fill, at 64 KiB a token."""
    used = requests = 0
    for total in totals:
        if used + bytes_of(total) > memory_bytes:
            break
        used += bytes_of(total)
        requests += 1
    return {"requests": requests, "token_percent": 100 * sum(totals[:requests]) * 64 * KIB / memory_bytes}


def pages_of(total, page_bytes):
    """Bytes of a request: 32 layers of keys and of values, in each 4 heads of 128 elements of 2 bytes a token."""
    return 2 * 32 * page_bytes * -(-total * 4 * 128 * 2 // page_bytes)


def test_requests_are_packed_as_a_loop_over_bytes_packs_them(pack):
    totals = np.random.default_rng(0).integers(2, 1500, 200).tolist()
    found = pack(totals)
    largest = 1 << int(np.ceil(np.log2(max(totals))))
    expected = {
        "blocks": lambda total: -(-total // 48) * 48 * 64 * KIB,
        "small_pages": lambda total: pages_of(total, 64 * KIB),
        "large_pages": lambda total: pages_of(total, 2 * MIB),
        "longest": lambda _: largest * 64 * KIB,
    }
    assert {name: found[f"own/{name}"] for name in SCHEMES} == {
        name: pytest.approx(by_hand(totals, bytes_of, 1024 * MIB)) for name, bytes_of in expected.items()
    }
    for unit, of_request in ((48, lambda n: -(-n // 48) * 48), (7, lambda n: -(-n // 7) * 7)):
        handed_out = sum(map(of_request, totals))
        waste = found[f"own/waste/{unit}"]["internal_waste_percent"]
        assert waste == pytest.approx(100 * (handed_out - sum(totals)) / handed_out)
    waste = found["own/waste/longest"]["internal_waste_percent"]
    assert waste == pytest.approx(100 - 100 * np.mean(totals) / max(totals))


def test_the_first_that_does_not_fit_ends_it_though_a_later_one_would(pack):
    # 16,384 tokens fit 1 GiB.
    schemes = {"blocks": Scheme("paged", block_size=16)}
    assert pack([16_000, 384], schemes=schemes)["own/blocks"]["requests"] == 2


def test_what_fits_exactly_fits_and_a_token_more_does_not(pack):
    found = pack([16_000, 385, 2, 2], schemes={"blocks": Scheme("paged", block_size=1)})
    assert found["own/blocks"] == {"requests": 1, "token_percent": pytest.approx(100 * 16_000 / 16_384)}


def test_a_device_of_two_holds_twice_as_many_as_the_one_of_one(pack):
    schemes = {"blocks": Scheme("paged", block_size=16)}
    on_two = pack([256] * 200, schemes=schemes)
    assert on_two["own/blocks"] == {"requests": 64, "token_percent": 100}


def test_a_run_shows_grids_and_keeps_every_comparison_in_its_report(tmp_path, monkeypatch, capsys):
    (tmp_path / "t.csv").write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:00:00.0,10,6\n")
    monkeypatch.setenv("PAXKV_TRACE_DIR", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    pathlib.Path("c.yaml").write_text(
        "# One request?\nexperiment: packing\nmemory: 1 GiB\ntraces: {t: {kind: azure, file: t.csv}}\n"
        "schemes: {blocks: {kind: paged, block_size: 16}}\nblock_sizes: [16, 64]\n"
        "published: [{metric: requests, values: {t/blocks: 2}}, {metric: internal_waste_percent, values: "
        "{t/waste/16: 0, t/waste/64: 75}}]\n"
    )
    assert cli.main(["run", "c.yaml"], {"packing": "experiments.packing"}) == 1
    out, err = capsys.readouterr()
    assert "Published values: 3 compared, 1 differ" in out
    assert "75.000%" in out
    assert "check failed: t/blocks: requests is 1, published 2, which may differ by 0" in err
    summary = json.loads(out.splitlines()[-1])
    assert summary["results"]["t/blocks"]["requests"] == 1
    report = (pathlib.Path(summary["run_dir"]) / "report.html").read_text()
    assert "may differ by" in report
    assert (
        files.read_json(pathlib.Path(summary["run_dir"]) / "manifest.json")["inputs"]["workloads"]["t"]["file"]
        == "t.csv"
    )


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"traces": {}}, "traces: expected at least one"),
        ({"schemes": {}}, "schemes: expected at least one"),
        ({"block_sizes": (16, 16)}, r"block_sizes: expected none twice, got \[16, 16\]"),
        ({"block_sizes": (0,)}, "block_sizes must be at least 1"),
        ({"schemes": {"a/b": Scheme("naive")}}, "names without '/', .* got 'a/b'"),
        ({"memory": "1 gb"}, "memory must end in one of"),
        ({"schemes": {"a": Scheme("paged", block_size=20_000)}}, "budget_bytes must hold a block"),
        ({"schemes": {"a": Scheme("vattention", page="64 kb")}}, "page must end in one of"),
        ({"tensor_parallel": 3}, "tensor_parallel must divide kv_heads"),
    ],
)
def test_what_packs_nothing_is_refused(pack, change, said):
    with pytest.raises(ValueError, match=said):
        pack([2], **change)


@pytest.mark.parametrize(
    "knobs", [{"kind": "paged"}, {"kind": "naive", "block_size": 16}, {"kind": "vattention", "block_size": 16}]
)
def test_a_scheme_has_the_knobs_of_its_kind(knobs):
    with pytest.raises(ValueError, match="expected with kind: "):
        Scheme(**knobs)


# Typed in here a second time, so that neither the config nor the code can drift alone.
REQUESTS = {
    "azure_conv": (798, 730, 784, 436, 60),
    "sharegpt_8k": (350, 344, 349, 269, 120),
    "sync_vs_async": (383, 366, 380, 240, 240),
    "arxiv_offline": (11, 11, 11, 11, 3),
    "mooncake_conv": (75, 75, 75, 72, 7),
}
WASTE = {
    "azure_conv": "0.544 1.122 2.206 4.376 8.017 30.161 45.830 90.306",
    "sharegpt_8k": "0.270 0.558 1.132 2.240 4.427 15.659 28.059 65.901",
    "sync_vs_async": "0.295 0.609 1.220 2.436 4.775 17.023 37.767 14.576",
    "arxiv_offline": "0.009 0.018 0.036 0.073 0.148 0.596 1.148 54.529",
    "mooncake_conv": "0.060 0.124 0.254 0.512 1.014 4.066 7.435 90.217",
}


def test_the_public_traces_pack_to_the_request_and_waste_to_the_printed_digit(trace_dir, monkeypatch, tmp_path):
    monkeypatch.setenv("PAXKV_TRACE_DIR", str(trace_dir))
    asked = config.decode(Config, config.read_yaml(CONFIG))
    if missing := [trace.file for trace in asked.traces.values() if not (trace_dir / trace.file).is_file()]:
        pytest.skip(f"no {missing} in {trace_dir}")
    found = run(asked, tmp_path / "run")
    assert packing.failed_checks(found) == []
    schemes = ("paged16", "paged256", "vattn64k", "vattn2m", "naive")
    units = [*(str(size) for size in (16, 32, 64, 128, 256, 1024, 2048)), "longest"]
    for trace, requests in REQUESTS.items():
        assert tuple(found[f"{trace}/{scheme}"]["requests"] for scheme in schemes) == requests
        printed = [f"{found[f'{trace}/waste/{unit}']['internal_waste_percent']:.3f}" for unit in units]
        assert " ".join(printed) == WASTE[trace]
    assert sum("requests_holds" in metrics for metrics in found.values()) == 25
    assert sum("internal_waste_percent_holds" in metrics for metrics in found.values()) == 40
