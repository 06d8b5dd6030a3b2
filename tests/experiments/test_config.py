"""Configs are strict: what a file says is what an experiment gets, or the key is named."""

import dataclasses
import hashlib
import math
import pathlib
from typing import Any, Literal

import pytest

from experiments import config as configs
from experiments.errors import UserError


@dataclasses.dataclass(frozen=True)
class Memory:
    block_size: int
    policy: Literal["lru", "fifo"] = "lru"

    def __post_init__(self):
        if self.block_size < 1:
            raise ValueError(f"memory.block_size must be at least 1, got {self.block_size}")


@dataclasses.dataclass(frozen=True)
class Config:
    experiment: str
    memory: Memory
    seed: int = 0
    rate: float = 1.0
    names: tuple[str, ...] = ("paged",)
    pair: tuple[int, str] | None = None
    phases: tuple[Memory, ...] = ()
    weights: dict[str, float] = dataclasses.field(default_factory=dict)
    order: Literal["lru", "fifo"] | None = None
    eager: bool = False
    trace: pathlib.Path | None = None


VALID = {"experiment": "x", "memory": {"block_size": 16}}
PATH = pathlib.Path("some.yaml")


def decode(**changes: Any) -> Config:
    return configs.decode(Config, VALID | changes)


def test_every_declared_type_arrives_as_declared():
    config = decode(
        memory={"block_size": 8, "policy": "fifo"},
        rate=2,
        names=["a", "b"],
        pair=[1, "x"],
        phases=[{"block_size": 1}, {"block_size": 2}],
        weights={"a": 0.5},
        order="fifo",
        eager=True,
        trace="some/file",
    )
    assert config == Config(
        "x", Memory(8, "fifo"), 0, 2.0, ("a", "b"), (1, "x"), (Memory(1), Memory(2)), {"a": 0.5}, "fifo", True,
        pathlib.Path("some/file"),
    )  # fmt: skip
    assert type(config.rate) is float


@pytest.mark.parametrize(
    ("change", "key"),
    [
        ({"seed": "5"}, "seed"),
        ({"seed": 5.0}, "seed"),
        ({"seed": True}, "seed"),
        ({"seed": None}, "seed"),
        ({"experiment": 5}, "experiment"),
        ({"rate": "fast"}, "rate"),
        ({"rate": False}, "rate"),
        ({"eager": 1}, "eager"),
        ({"eager": "true"}, "eager"),
        ({"names": "paged"}, "names"),
        ({"names": ["paged", 3]}, "names[1]"),
        ({"pair": [1]}, "pair"),
        ({"pair": ["1", "x"]}, "pair[0]"),
        ({"phases": [{"block_size": 1}, {"block_size": "2"}]}, "phases[1].block_size"),
        ({"weights": {"a": "b"}}, "weights.a"),
        ({"order": "lfu"}, "order"),
        ({"memory": 16}, "memory"),
        ({"memory": {"block_size": 16, "policy": 1}}, "memory.policy"),
        ({"trace": 3}, "trace"),
    ],
)
def test_a_wrong_type_is_refused_by_its_key(change, key):
    with pytest.raises(UserError) as refusal:
        decode(**change)
    assert str(refusal.value).startswith(f"{key} must be ")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"sead": 3}, "unknown key sead (did you mean 'seed'?)"),
        ({"memory": {"block_sise": 3}}, "unknown key memory.block_sise (did you mean 'block_size'?)"),
        ({"block_size": 3}, "unknown key block_size (did you mean 'memory.block_size'?)"),
        ({"policy": 3}, "unknown key policy (did you mean 'memory.policy'?)"),
        ({"phases": [{"block_sise": 3}]}, "unknown key phases[0].block_sise (did you mean 'block_size'?)"),
        ({"order": "lruu"}, "(did you mean 'lru'?)"),
        ({"memory": {}}, "missing key memory.block_size"),
        ({"memory": {"block_size": 0}}, "memory.block_size must be at least 1, got 0"),
    ],
)
def test_a_wrong_key_or_value_comes_with_what_was_meant(change, message):
    with pytest.raises(UserError) as refusal:
        decode(**change)
    assert message in str(refusal.value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("seed: 1\nrate: 2\nseed: 3\n", "given twice"),
        ("memory: {block_size: 1, block_size: 2}\n", "given twice"),
        ("- a\n- b\n", "must hold a mapping"),
        ("", "must hold a mapping"),
        ("a: [1\n", "not valid YAML"),
        ("? [a]\n: b\n", "not valid YAML"),
    ],
)
def test_yaml_that_says_nothing_or_two_things_is_refused(text, message):
    with pytest.raises(UserError, match=message):
        configs.parse_yaml(text, PATH)


def test_yaml_numbers_are_numbers_and_merge_keys_may_be_replaced():
    text = "base: &base {a: 1, b: 2}\nchild: {<<: *base, b: 3}\nrate: 1e-3\nbig: 5E+2\ninf: .inf\nname: e5\n"
    raw = configs.parse_yaml(text, PATH)
    assert raw["child"] == {"a": 1, "b": 3}
    assert (raw["rate"], raw["big"], raw["inf"], raw["name"]) == (1e-3, 500.0, math.inf, "e5")


def test_overrides_replace_and_reach_into_groups_and_leave_the_original():
    raw = {"experiment": "x", "memory": {"block_size": 16}, "names": ["a"], "group": None}
    changed = configs.override(raw, {"memory.block_size": "32", "names": "[b, c]", "rate": "1e-2", "group.x": "1"})
    assert changed == {
        "experiment": "x", "memory": {"block_size": 32}, "names": ["b", "c"], "rate": 0.01, "group": {"x": 1},
    }  # fmt: skip
    assert raw["memory"] == {"block_size": 16}


def test_null_takes_out_a_group_and_is_nothing_elsewhere():
    raw = {"memories": {"paged": {"block_size": 16}, "other": {}}, "rate": 3.0}
    changed = configs.override(raw, {"memories.paged": "null", "rate": "null", "memories.none": "null"})
    assert changed == {"memories": {"other": {}, "none": None}, "rate": None}


def test_a_number_where_a_text_belongs_is_refused_with_the_way_to_quote_it():
    with pytest.raises(UserError) as refusal:
        decode(experiment=0.9)
    assert str(refusal.value) == (
        "experiment must be a text, got the number 0.9; quote it: experiment: '0.9' in a file, "
        """--experiment "'0.9'" in a shell"""
    )
    assert configs.override({}, {"experiment": "'0.9'"}) == {"experiment": "0.9"}


@pytest.mark.parametrize("key", ["names.0", "seed.x"])
def test_an_override_cannot_reach_into_what_has_no_keys(key):
    with pytest.raises(UserError, match=f"--{key}: .* has no keys"):
        configs.override({"names": ["a"], "seed": 3}, {key: "1"})


def test_what_may_be_left_out_says_why_it_is_refused_all_the_same():
    @dataclasses.dataclass(frozen=True)
    class Optional:
        memory: Memory | None = None

    assert configs.decode(Optional, {"memory": {"block_size": 1}}).memory == Memory(1)
    with pytest.raises(UserError, match=r"^memory.block_size must be at least 1, got 0$"):
        configs.decode(Optional, {"memory": {"block_size": 0}})


def test_the_hash_covers_what_is_computed_and_nothing_else():
    base = configs.config_hash(decode())
    same = [
        decode(seed=7),
        decode(trace="elsewhere"),
        decode(rate=1),
        decode(memory={"policy": "lru", "block_size": 16}),
    ]
    other = [
        decode(rate=1.5),
        decode(names=["vattention"]),
        decode(memory={"block_size": 32}),
        decode(memory={"block_size": 16, "policy": "fifo"}),
        decode(phases=[{"block_size": 16}]),
        decode(weights={"a": 1.0, "b": 1.0}),
        decode(weights={"b": 1.0, "a": 1.0}),
        decode(eager=True),
    ]
    assert {configs.config_hash(config) for config in same} == {base}
    assert len({base, *map(configs.config_hash, other)}) == 1 + len(other)


def test_the_hash_is_that_of_canonical_json():
    # A change here would orphan every unfinished run.
    canonical = (
        '{"eager":false,"experiment":"x","memory":{"block_size":16,"policy":"lru"},"names":["paged"],"order":null,'
        '"pair":null,"phases":[],"rate":1.0,"trace":null,"weights":[]}'
    )
    assert configs.config_hash(decode(seed=3, trace="a")) == hashlib.sha256(canonical.encode()).hexdigest()


def test_a_resolved_config_is_the_same_config_with_the_same_comment():
    config = decode(trace="a/b", pair=[1, "x"], weights={"a": 1e-9}, rate=1e-5)
    text = configs.dump(config, "What?\n\n  indented\nlast")
    assert configs.decode(Config, configs.parse_yaml(text, PATH)) == config
    assert configs.header(text) == "What?\n\n  indented\nlast"


def test_every_field_is_listed_under_the_key_that_overrides_it():
    @dataclasses.dataclass(frozen=True)
    class Groups:
        """Some groups.

        Attributes:
            memories: not a field that can be overridden.
            none: of a meaning that goes
                over two lines: with a colon.

        Raises:
            ValueError: never.
        """

        memories: dict[str, Memory]
        one: Memory
        none: dict[str, Memory] = dataclasses.field(default_factory=dict)

    fields = configs.describe_fields(Groups({"a": Memory(1), "b": Memory(2)}, Memory(3)))
    assert [(key, value) for key, _, value, _ in fields] == [
        ("memories.a.block_size", 1),
        ("memories.a.policy", "lru"),
        ("memories.b.block_size", 2),
        ("memories.b.policy", "lru"),
        ("one.block_size", 3),
        ("one.policy", "lru"),
        ("none", {}),
    ]
    assert fields[0][1] == "int"
    meanings = {key: meaning for key, _, _, meaning in fields}
    assert meanings["none"] == "of a meaning that goes over two lines: with a colon."
    assert set(meanings.values()) == {"", meanings["none"]}


def test_a_header_ends_where_the_comment_ends():
    assert configs.header("\n# one\n#two\n\n# not this\nseed: 3\n") == "one\ntwo"
    assert configs.header("seed: 3\n") == ""


@pytest.mark.parametrize("path", sorted(pathlib.Path("configs").glob("**/*.yaml")), ids=str)
def test_every_config_opens_with_its_question(path):
    assert configs.header(configs.read_text(path)), f"{path} must open with a comment"


def test_a_missing_config_suggests_one_that_is_there(tmp_path, monkeypatch):
    (tmp_path / "configs").mkdir()
    (tmp_path / "configs" / "quickstart.yaml").write_text("seed: 1\n")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match=r"no config configs/quickstrt.yaml \(did you mean 'configs/quickstart.yaml'"):
        configs.read_yaml(pathlib.Path("configs/quickstrt.yaml"))
    with pytest.raises(UserError, match="cannot read"):
        configs.read_yaml(tmp_path)
