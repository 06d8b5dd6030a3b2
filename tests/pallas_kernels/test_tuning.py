"""Sizes come from the table of the device's kind, are written down, and never silently misread."""

import json

import pytest

from pallas_kernels import choices, compat, tuning
from pallas_kernels._mosaic_tpu import SIZES, Sizes
from pallas_kernels._triton_attention import Tiling
from pallas_kernels.targets import TARGETS

NAME = "paged_decode/d128_kv8_g4_b16_bf16"


@pytest.fixture
def table(tmp_path, monkeypatch):
    """Writes the table of a device."""
    monkeypatch.setattr(tuning, "TABLES", tmp_path)

    def write(device_kind, **entries):
        tuning.read_table.cache_clear()
        text = {"device_kind": device_kind, "entries": {name: {"sizes": sizes} for name, sizes in entries.items()}}
        tuning.table_path(device_kind).write_text(json.dumps(text))

    yield write
    tuning.read_table.cache_clear()


def test_an_entry_changes_the_fields_that_it_names_and_no_others(table):
    table("TPU v6 lite", **{NAME: {"logits": 7}})
    assert tuning.choose(NAME, SIZES, "TPU v6 lite") == Sizes(logits=7)
    assert tuning.choose(NAME + "_e4m3", SIZES, "TPU v6 lite") == SIZES
    assert tuning.choose(NAME, SIZES, "TPU v5 lite") == SIZES
    assert tuning.choose(NAME, SIZES, None) == SIZES


def test_an_entry_with_an_unknown_field_is_an_error_that_names_the_file(table):
    table("TPU v6 lite", **{NAME: {"logit": 7}})
    with pytest.raises(
        ValueError, match=r"sizes of paged_decode/.* must be of \['fetch_bytes', .*got \['logit'\] \(tpu_v6_lite.json\)"
    ):
        tuning.choose(NAME, SIZES, "TPU v6 lite")


def test_a_candidate_goes_before_the_table(table):
    table("TPU v6 lite", **{NAME: {"logits": 7}})
    with tuning.candidate({"fetch_bytes": 5}):
        assert tuning.choose(NAME, SIZES, "TPU v6 lite") == Sizes(fetch_bytes=5)
        with tuning.candidate({}):
            assert tuning.choose(NAME, SIZES, "TPU v6 lite") == SIZES
    with tuning.candidate(None):
        assert tuning.choose(NAME, SIZES, "TPU v6 lite") == Sizes(logits=7)


def test_names_tell_apart_what_sizes_depend_on():
    sizes = {"head_dim": 128, "kv_heads": 8, "group": 4, "block_size": 16}
    sizes |= dict.fromkeys(("q_dtype", "kv_dtype"), "bfloat16")
    assert tuning.entry_name("paged_decode", **sizes) == NAME
    changes = (
        *({"head_dim": 64}, {"kv_heads": 1}, {"group": 8}, {"block_size": 32}, {"block_size": None}),
        *({"q_dtype": "float32"}, {"kv_dtype": "int8"}, {"kv_dtype": "float8_e5m2"}),
        {"q_dtype": "float32", "kv_dtype": "float32"},
    )
    names = {tuning.entry_name("paged_decode", **(sizes | change)) for change in changes}
    assert len(names | {NAME, tuning.entry_name("contiguous_decode", **sizes)}) == len(changes) + 2


def test_every_table_that_comes_with_the_package_is_of_a_known_device_and_known_fields():
    kinds = {target.device_kind: target.platform for target in TARGETS.values()}
    for path in tuning.TABLES.glob("*.json"):
        content = json.loads(path.read_text())
        assert path == tuning.table_path(content["device_kind"])
        default = SIZES if kinds[content["device_kind"]] == "tpu" else Tiling(16, 32, 4, 3)
        for name, entry in content["entries"].items():
            assert entry["how"] in ("measured", "modelled")
            assert entry["value"] < entry["default"]
            tuning.choose(name, default, content["device_kind"])


def test_programs_for_an_absent_device_take_its_sizes():
    with compat.absent_device("TPU v6 lite", 1, "tpu"):
        assert compat.device_kind() == "TPU v6 lite"
    assert compat.device_kind() == "cpu"


def test_choices_are_kept_once_each_and_only_while_somebody_asks():
    choices.note("op", backend="unheard")
    with choices.recording() as found:
        for backend in ("xla", "triton", "xla"):
            choices.note("op", backend=backend)
        with choices.recording() as inner:
            choices.note("op", backend="inner")
    choices.note("op", backend="unheard")
    assert found == {"op": [{"backend": "xla"}, {"backend": "triton"}]}
    assert inner == {"op": [{"backend": "inner"}]}
