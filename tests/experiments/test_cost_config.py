"""From the knobs of a clock to a cost model."""

import dataclasses

import pytest

from experiments import config as configs
from experiments.cost_config import CostConfig, make_cost
from experiments.errors import UserError
from pallas_kernels.targets import TARGETS
from paxkv.cost_model import StepCost
from paxkv.model_shapes import model_shape
from paxkv.model_sizes import model_size
from paxkv.roofline import Efficiencies, make_roofline

LLAMA = {"kind": "roofline", "model": "Llama-2-70B", "hardware": "a100_80gb", "tensor_parallel": 4}


def decoded(**raw):
    return configs.decode(CostConfig, raw)


def test_without_a_kind_the_keys_are_those_of_an_affine_cost():
    assert make_cost(decoded()) == StepCost()
    assert make_cost(decoded(step_ns=7, swap_block_ns=3)) == StepCost(step_ns=7, swap_block_ns=3)
    assert make_cost(configs.decode(CostConfig, configs.resolved(StepCost()))) == StepCost()


def test_a_roofline_is_of_the_named_model_and_hardware_and_of_the_format_that_is_stored():
    config = decoded(**LLAMA, efficiencies={"paged_decode": 1.2})
    shape = dataclasses.replace(model_shape("Llama-2-70B"), tensor_parallel=4, replicate_kv_heads=True)
    args = {"block_size": 16, "efficiencies": Efficiencies(paged_decode=1.2)}
    bf16 = make_roofline(model_size("Llama-2-70B"), shape, TARGETS["a100_80gb"], **args)
    assert make_cost(config, block_size=16) == bf16
    fp8 = make_cost(config, dataclasses.replace(model_shape("Llama-2-70B"), element_bytes=1), 16)
    assert fp8 == make_roofline(
        model_size("Llama-2-70B"), dataclasses.replace(shape, element_bytes=1), TARGETS["a100_80gb"], **args
    )
    assert fp8.kv_token < 0.51 * bf16.kv_token
    assert make_cost(config).swap_block_ns == 0


@pytest.mark.parametrize(
    ("raw", "said"),
    [
        ({"hardware": "h100"}, "cost.hardware: expected its default for a cost of kind 'affine'"),
        ({"efficiencies": {"paged_decode": 1.2}}, "cost.efficiencies: expected its default"),
        (LLAMA | {"step_ns": 7}, "cost.step_ns: expected its default for a cost of kind 'roofline'"),
        (LLAMA | {"hardware": "h100s"}, r"cost.hardware: expected one of a100_40gb, .*; did you mean 'h100'\?"),
        (LLAMA | {"model": "llama2_70b"}, "model must be one of .*, got 'llama2_70b'"),
        (LLAMA | {"weight_dtype": "float8_e4m3fn"}, "weight_dtype: expected one of bfloat16, int8, which a100_80gb"),
    ],
)
def test_knobs_of_the_other_kind_and_unknown_names_are_refused(raw, said):
    with pytest.raises(ValueError, match=said):
        make_cost(decoded(**raw))


def test_keys_and_values_of_another_model_are_refused():
    said = r"cost.model: expected the model that is served, of .* 4 KV heads .*, got 'Llama-2-70B', of 80 layers, 8 KV"
    with pytest.raises(ValueError, match=said):
        make_cost(decoded(**LLAMA), model_shape("Yi-6B"))


def test_a_key_that_there_is_not_is_an_error():
    with pytest.raises(UserError, match=r"efficiencies.linear_flop .did you mean 'linear_flops'"):
        decoded(efficiencies={"linear_flop": 0.5})
