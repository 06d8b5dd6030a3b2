import dataclasses
import io
import pathlib

import pytest
import rich.console

from experiments import capacity, config
from experiments.capacity_examples import QUANTITIES, Example, worked_examples
from experiments.errors import UserError
from experiments.progress import Progress
from experiments.results import render
from experiments.run_directory import RunDirectory

CONFIG = pathlib.Path(__file__).parents[2] / "configs/capacity/worked_examples.yaml"


def load():
    return config.decode(capacity.Config, config.read_yaml(CONFIG))


def run(examples, path):
    with RunDirectory.open(path / "run") as run_dir:
        results = capacity.run(capacity.Config(examples=tuple(examples)), run_dir, Progress())
        return results, run_dir.read_parquet("examples.parquet")


def printed(results, width=200):
    console = rich.console.Console(file=io.StringIO(), width=width)
    render(capacity.tables(results), console)
    return console.file.getvalue()


# Typed in here a second time, so that neither the config nor the code can drift alone.
KNOWN = {
    ("llama_2_70b", "bytes_per_token"): 327_680,
    ("llama_2_70b", "bytes_per_block"): 5_242_880,
    ("llama_2_70b", "tokens"): 366_210,
    ("llama_2_70b", "num_blocks"): 22_888,
    ("llama_2_70b", "paged_requests"): 91,
    ("llama_2_70b_fp8", "num_blocks"): 45_776,
    ("llama_2_13b", "bytes_per_token"): 819_200,
    ("llama_2_13b", "reserved_requests"): 34,
    ("llama_2_13b", "reserved_requests_exact"): 34.56,
    ("llama_2_13b", "paged_requests"): 276,
    ("llama_2_13b", "paged_requests_exact"): 276.48,
    ("llama_2_13b", "paged_over_reserved"): 8,
    ("tokens_33", "blocks_per_request"): 3,
    ("tokens_33", "slack_slots"): 15,
    ("reserve_2048_use_256", "internal_waste"): 0.875,
    ("opt_13b", "tokens"): 15_728,
    ("opt_13b", "reserved_requests"): 7,
    ("yi_6b_tp1_64k", "tokens_per_page"): 64,
    ("yi_6b_tp1_2m", "tokens_per_page"): 2048,
    ("yi_6b_tp2_64k", "tokens_per_page"): 128,
    ("yi_6b_tp2_2m", "tokens_per_page"): 4096,
    ("llama_3_8b_tp1_64k", "tokens_per_page"): 32,
    ("llama_3_8b_tp1_2m", "tokens_per_page"): 1024,
    ("llama_3_8b_tp2_64k", "tokens_per_page"): 64,
    ("llama_3_8b_tp2_2m", "tokens_per_page"): 2048,
    ("yi_34b_tp1_64k", "tokens_per_page"): 32,
    ("yi_34b_tp1_2m", "tokens_per_page"): 1024,
    ("yi_34b_tp2_64k", "tokens_per_page"): 64,
    ("yi_34b_tp2_2m", "tokens_per_page"): 2048,
}


def test_every_worked_example_holds(tmp_path):
    examples = load().examples
    results, table = run(examples, tmp_path)
    assert results["summary"] == {"checked": sum(len(example.expect) for example in examples), "failed": 0}
    assert capacity.failed_checks(results) == []
    assert len(table) == results["summary"]["checked"] > 100
    assert table["ok"].all()
    assert (table["expected"] == table["got"]).all()
    assert (table["rounding"].str.len_chars() > 0).all()
    assert {(name, quantity): results[name][quantity] for name, quantity in KNOWN} == KNOWN


def test_every_quantity_is_exercised_and_explained():
    assert {quantity for example in load().examples for quantity in example.expect} == QUANTITIES.keys()
    assert capacity.GLOSSARY.keys() == QUANTITIES.keys()


def test_what_sources_print_stands_beside_the_right_value(tmp_path):
    results, table = run(load().examples, tmp_path)
    assert results["llama_2_13b"]["paged_requests"] == 276
    assert results["llama_2_13b"]["paged_requests_printed"] == "277"
    rows = table.filter(example="llama_2_13b", quantity="reserved_requests")
    assert rows.select("got", "sources_print").rows() == [("34", "35")]


@pytest.mark.parametrize(("wrong", "said"), [(22_889, "22,889"), (22_887, "22,887"), ("22888.5", "22,888.5")])
def test_expectation_that_does_not_hold_is_a_failed_check(tmp_path, wrong, said):
    first = load().examples[0]
    example = dataclasses.replace(first, expect=first.expect | {"num_blocks": wrong})
    results, table = run([example], tmp_path)
    assert results["summary"]["failed"] == 1
    assert results["llama_2_70b"]["ok"] is False
    assert table.filter(~table["ok"])["quantity"].to_list() == ["num_blocks"]
    [sentence] = capacity.failed_checks(results)
    assert "llama_2_70b" in sentence
    assert sentence.endswith(f"num_blocks is 22,888, expected {said}")
    assert "NO" in printed(results)
    assert "7 checked, 1 failed" in printed(results)


def test_exact_values_survive_in_the_table(tmp_path):
    _, table = run([Example("third", {"tokens_exact": "28672/3"}, model="OPT-66B", memory="21 GiB")], tmp_path)
    assert table["got"].to_list() == ["28672/3"]
    # A rounded value is another value.
    [row] = worked_examples([Example("third", {"tokens_exact": "9557.333333"}, model="OPT-66B", memory="21 GiB")])
    assert not row.ok


def test_narrow_terminal_cuts_no_number(tmp_path):
    results, _ = run(load().examples, tmp_path)
    assert "\u2026" not in printed(results, width=80)
    assert "12,288,000,000,000" in printed(results)


def test_input_is_described_in_full():
    [row] = worked_examples(
        [
            Example(
                "name",
                {"bytes_per_block": 1_081_344 // 2},
                model="Llama-3-8B",
                element_bytes=1,
                scale_bytes_per_token_head=4,
                tensor_parallel=2,
                block_size=16,
            )
        ]
    )
    assert row.ok
    assert row.input == ("Llama-3-8B, element_bytes 1, scale_bytes_per_token_head 4, tensor_parallel 2, block_size 16")


def test_scales_per_block_and_half_byte_elements_count():
    example = Example(
        "int4",
        {"bytes_per_block": 2 * 2 * (16 * 2 * 4 + 2 * 4)},
        layers=2,
        kv_heads=2,
        head_dim=8,
        element_bytes="1/2",
        scale_bytes_per_block_head=4,
        block_size=16,
    )
    assert worked_examples([example])[0].ok


@pytest.mark.parametrize(
    ("inputs", "said"),
    [
        ({"model": "Llama-2-70B", "block_size": 16}, "memory must be given for this quantity"),
        ({"model": "Llama-2-70B", "memory": "1 GiB"}, "block_size must be given"),
        ({"memory": "1 GiB", "block_size": 16}, "layers must be given"),
        (
            {"model": "Llama-2-70B", "layers": 80, "memory": "1 GiB", "block_size": 16},
            "model must not come with layers",
        ),
        ({"model": "Llama-2-70b", "memory": "1 GiB", "block_size": 16}, "did you mean 'Llama-2-70B'"),
        ({"model": "Llama-2-70B", "memory": "1 gb", "block_size": 16}, "memory must end in one of"),
        (
            {"model": "Llama-2-70B", "memory": "1 GiB", "num_blocks": 3, "block_size": 16},
            "num_blocks must not come with",
        ),
        ({"model": "Llama-2-70B", "num_blocks": 0, "block_size": 16}, "num_blocks must be at least 1"),
        ({"model": "Llama-2-70B", "memory": 0, "block_size": 16}, "memory must be at least 1"),
        ({"model": "Llama-2-70B", "memory": "1 GiB", "block_size": 16, "element_bytes": "1/0"}, "Fraction"),
    ],
)
def test_input_that_is_missing_or_wrong_is_named(inputs, said):
    with pytest.raises(UserError, match=r"^example 'case', num_blocks: ") as error:
        worked_examples([Example("case", {"num_blocks": 1}, **inputs)])
    assert said in str(error.value)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"expect": {}}, "expect of example 'case' must name a quantity"),
        ({"expect": {"num_block": 1}}, "unknown quantity 'num_block' (did you mean 'num_blocks'?)"),
        ({"expect": {"tokens": 1}, "printed": {"num_blocks": "1"}}, "got ['num_blocks']; expect them too"),
    ],
)
def test_example_that_would_check_nothing_is_refused(arguments, said):
    with pytest.raises(ValueError, match="case") as error:
        Example("case", **arguments)
    assert said in str(error.value)


def test_examples_need_names_of_their_own():
    example = Example("case", {"slack_slots": 15}, block_size=16, tokens=1)
    for examples, said in [
        ((), "at least one example"),
        ((example, example), "names of their own"),
        ((dataclasses.replace(example, name="summary"),), "must not be 'summary'"),
    ]:
        with pytest.raises(ValueError, match=said):
            capacity.Config(examples=examples)


def test_config_survives_being_written_and_read():
    loaded = load()
    assert config.decode(capacity.Config, config.resolved(loaded)) == loaded
