"""Every swept key changes what is computed, or the sweep is refused before anything runs."""

import dataclasses
import pathlib
import types
from typing import Literal

import pytest

from experiments import config as configs
from experiments import registry, run
from experiments.errors import UserError
from experiments.sweep_axes import make_points, parse_axis, parse_condition


@dataclasses.dataclass(frozen=True)
class KV:
    block_size: int = 16
    watermark: float = 0.0


@dataclasses.dataclass(frozen=True)
class Config:
    experiment: Literal["case"] = "case"
    seed: int = 0
    kv: KV = KV()
    qps: float = 0.2
    lengths: tuple[int, ...] = (1,)
    memories: dict[str, KV] = dataclasses.field(default_factory=dict)
    trace: pathlib.Path | None = None


def points(*axes, when=(), overrides=None, resolve=lambda config: config):
    """The points of a sweep over a config whose experiment resolves it as given."""
    raw = configs.override({"experiment": "case", "memories": {"paged": {}}}, overrides or {})
    module = types.SimpleNamespace(Config=Config, DESCRIPTION="", run=None, resolve=resolve)
    experiment = registry.from_module("case", module)

    def make(changes):
        config = configs.decode(Config, configs.assign(raw, changes))
        return run.prepare(run.Loaded(experiment, config, ""))

    conditions = [parse_condition(*pair) for pair in when]
    return make_points([parse_axis(axis) for axis in axes], conditions, overrides or {}, make)


def test_a_sweep_is_the_product_of_its_axes_the_last_one_fastest():
    found = points("kv.block_size=8,16", "seed=0,1,2")
    assert [(p.run.config.kv.block_size, p.run.config.seed) for p in found] == [
        (8, 0), (8, 1), (8, 2), (16, 0), (16, 1), (16, 2),
    ]  # fmt: skip
    assert len({p.run.name for p in found}) == 6
    assert str(found[1]) == "kv.block_size=8, seed=1"


def test_values_are_yaml():
    texts = "lengths=[1, 2],[3]", "qps=1e-3,.inf,2", "memories.paged={block_size: 4},null"
    first, second, third = (parse_axis(text).values for text in texts)
    assert first == ([1, 2], [3])
    assert second == (1e-3, float("inf"), 2)
    assert third == ({"block_size": 4}, None)
    found = points(*texts)
    assert len(found) == 12
    assert found[0].run.config == Config(lengths=(1, 2), qps=1e-3, memories={"paged": KV(4)})
    assert found[-1].run.config == Config(lengths=(3,), qps=2.0, memories={})


def test_two_rates_are_two_runs_with_their_rate_in_the_resolved_config():
    low, high = points("qps=0.1,0.2")
    assert [configs.resolved(p.run.config)["qps"] for p in (low, high)] == [0.1, 0.2]
    assert low.run.digest != high.run.digest


def test_a_script_that_passes_the_same_rate_to_every_point_is_found_out():
    def constant(config):
        return dataclasses.replace(config, qps=0.2)

    with pytest.raises(UserError, match=r"^qps=0\.1 did not reach the resolved config, which has 0\.2$"):
        points("qps=0.1,0.2", resolve=constant)


def test_a_value_that_the_experiment_rounds_is_found_out():
    def whole(config):
        return dataclasses.replace(config, kv=KV(config.kv.block_size // 8 * 8))

    with pytest.raises(UserError, match=r"^kv\.block_size=12 did not reach the resolved config, which has 8$"):
        points("kv.block_size=8,12", resolve=whole)


def test_a_condition_changes_the_points_where_it_holds_and_no_other():
    found = points("kv.block_size=8,256", "seed=0,1", when=[("kv.block_size=256", "qps=0.1")])
    assert [p.run.config.qps for p in found] == [0.2, 0.2, 0.1, 0.1]
    assert found[2].values == {"kv.block_size": 256, "seed": 0}


@pytest.mark.parametrize(
    ("when", "said"),
    [
        # The list has 196,608, the script asks for 196,144.
        (
            ("lengths=[196144]", "qps=0.1"),
            r"--when lengths=\[196144\] holds at no point, so qps would never change; the axis has \[65536\], \[1966",
        ),
        (("lengths=196608", "qps=0.1"), r"holds at no point, .* the axis has \[65536\], \[196608\]"),
        (("length=[65536]", "qps=0.1"), r"--when length: expected an axis of the sweep, one of lengths \(did you mean"),
        (("lengths=[65536]", "qps=0.2"), r"qps=0\.2 changes nothing at the point lengths=\[65536\]; leave it out"),
        (("lengths=[65536]", "pqs=0.1"), r"unknown key pqs \(did you mean 'qps'\?\)"),
        (("lengths=[65536]", "lengths=[1]"), "--axis lengths: lengths is set beside it"),
        (("lengths=[65536]", "qps="), "--when: expected a key and what it is, .* got 'qps='"),
    ],
)
def test_a_condition_that_changes_nothing_is_reported(when, said):
    with pytest.raises(UserError, match=said):
        points("lengths=[65536],[196608]", when=[when])


def test_two_conditions_on_one_key_are_refused_where_both_hold():
    apart = [("seed=0", "qps=0.1"), ("seed=1", "qps=0.3")]
    assert [p.run.config.qps for p in points("seed=0,1,2", when=apart)] == [0.1, 0.3, 0.2]
    with pytest.raises(UserError, match=r"--when: qps is set twice where seed=0, kv\.block_size=8"):
        points("seed=0,1", "kv.block_size=8,16", when=[("seed=0", "qps=0.1"), ("kv.block_size=8", "qps=0.3")])


@pytest.mark.parametrize(
    ("axes", "overrides", "said"),
    [
        ([], {}, "sweep needs an axis"),
        (["kv.blok_size=8,16"], {}, r"unknown key kv\.blok_size \(did you mean 'block_size'\?\)"),
        (["block_size=8,16"], {}, r"unknown key block_size \(did you mean 'kv\.block_size'\?\)"),
        (["kv.block_size=8,sixteen"], {}, r"kv\.block_size must be a whole number, got the text 'sixteen'"),
        (["kv.block_size=8,16,8"], {}, r"--axis kv\.block_size: expected every value once, got 8 again"),
        (
            ["qps=1,1.0"],
            {},
            r"qps must change what is computed, but the points qps=1 and qps=1\.0 are the same run case-",
        ),
        (["trace=a.csv,b.csv"], {}, "trace must change what is computed, but the points trace=a.csv and trace=b.csv"),
        (["qps=0.2"], {}, r"qps=0\.2 changes nothing at the point qps=0\.2; leave it out"),
        (["kv.block_size=8,16", "qps=0.2"], {}, r"qps=0\.2 changes nothing at the point kv\.block_size=8, qps=0\.2"),
        (["kv.block_size="], {}, r"--axis: expected a key and what it is, .* got 'kv\.block_size='"),
        (["kv.block_size"], {}, "--axis: expected a key and what it is"),
        (["kv.block_size=,"], {}, r"--axis kv\.block_size: '\[,\]' is not valid YAML"),
        (["kv.block_size=8,"], {}, "expected values between commas, got '8,'"),
        (["kv.block_size=8,[,9"], {}, "is not valid YAML"),
        (["experiment=a,b"], {}, "a sweep is of one experiment"),
        (["qps=1,2", "qps=3,4"], {}, "--axis qps: qps is set beside it"),
        (["kv.block_size=8,16", "kv={},{block_size: 3}"], {}, r"--axis kv: kv\.block_size is set beside it"),
        (["qps=1,2"], {"qps": "3"}, "--axis qps: --qps would change nothing"),
        (["kv={block_size: 1},{block_size: 2}"], {"kv.block_size": "3"}, r"--axis kv: --kv\.block_size would change"),
        (["lengths.first=1,2"], {"lengths": "[1]"}, r"--lengths\.first: lengths is a list \[1\], which has no keys"),
        (["memories.paged=null"], {"memories": "{}"}, r"memories\.paged must be a mapping, got nothing"),
    ],
)
def test_a_key_that_changes_nothing_is_an_error_in_one_line(axes, overrides, said):
    with pytest.raises(UserError, match=said) as error:
        points(*axes, overrides=overrides)
    assert "\n" not in str(error.value)


def test_an_override_holds_at_every_point_and_an_axis_changes_a_part_of_it():
    found = points("kv.block_size=8,16", overrides={"kv": "{watermark: 0.5}"})
    assert [p.run.config.kv for p in found] == [KV(8, 0.5), KV(16, 0.5)]
