"""Sizes come from the table of the device's kind, are written down, and never silently misread."""

import functools
import json

import jax
import pytest

from pallas_kernels import choices, compat, tuning
from pallas_kernels._mosaic_tpu import SIZES, Sizes
from pallas_kernels._triton_attention import Tiling
from pallas_kernels.paged_attention import paged_attention
from pallas_kernels.targets import TARGETS

TILING = Tiling(16, 32, 4, 3)
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
        tuning.SizesError,
        match=r"sizes of paged_decode/.* must be of \['fetch_bytes', .*got \['logit'\] \(tpu_v6_lite.json\)",
    ):
        tuning.choose(NAME, SIZES, "TPU v6 lite")


@pytest.mark.parametrize(
    ("default", "sizes", "words"),
    [
        (SIZES, {"logits": "7"}, "logits must be a positive integer, got '7'"),
        (SIZES, {"logits": -7}, "logits must be a positive integer, got -7"),
        (SIZES, {"logits": 0}, "logits must be a positive integer, got 0"),
        (SIZES, {"logits": 7.0}, "logits must be a positive integer, got 7.0"),
        (SIZES, {"logits": True}, "logits must be a positive integer, got True"),
        (SIZES, {"logits": None}, "logits must be a positive integer, got None"),
        (SIZES, {"q_tile": 100}, "q_tile must be a power of two of at least 1, got 100"),
        (TILING, {"num_warps": 7}, "num_warps must be a power of two of at least 1, got 7"),
        (TILING, {"rows": 48}, "rows must be a power of two of at least 16, got 48"),
        (TILING, {"rows": 8}, "rows must be a power of two of at least 16, got 8"),
        (TILING, {"kv_tile": 48}, "kv_tile must be a power of two of at least 16, got 48"),
        (TILING, {"split_size": 0}, "split_size must be a positive integer, got 0"),
    ],
)
def test_a_value_that_no_kernel_can_have_is_an_error_that_names_the_file(table, default, sizes, words):
    table("TPU v6 lite", **{NAME: sizes})
    with pytest.raises(tuning.SizesError) as raised:
        tuning.choose(NAME, default, "TPU v6 lite")
    assert str(raised.value) == f"sizes of {NAME} (tpu_v6_lite.json): {words}"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('{"device_kind": "TPU v6 lite", "entr', "be a table of sizes: JSONDecodeError"),
        ("", "be a table of sizes: JSONDecodeError"),
        ("[]", "be a table of sizes: TypeError"),
        ('{"device_kind": "TPU v6 lite"}', "be a table of sizes: KeyError: 'entries'"),
        ('{"device_kind": "TPU v6 lite", "entries": {"other": {}}}', "be a table of sizes: KeyError: 'sizes'"),
        ('{"device_kind": "TPU v6 lite", "entries": {"other": {"sizes": [7]}}}', r"got something else for \['other'\]"),
        ('{"device_kind": "TPU v5", "entries": {}}', "be the table of the device in its name, got 'TPU v5'"),
        ('{"device_kind": 6, "entries": {}}', "be the table of the device in its name, got 6"),
    ],
)
def test_a_damaged_table_is_an_error_that_names_it(table, text, words):
    table("TPU v6 lite")
    tuning.table_path("TPU v6 lite").write_text(text)
    with pytest.raises(tuning.SizesError, match=f"tpu_v6_lite.json must .*{words}"):
        tuning.choose(NAME, SIZES, "TPU v6 lite")


@pytest.mark.parametrize("kind", ["decode", "prefill"])
@pytest.mark.parametrize("sizes", [{"rows": 16}, {"kv_tile": 48}])
def test_a_table_that_is_wrong_does_not_send_the_call_to_a_slower_backend(table, kind, sizes):
    q, stored = (jax.ShapeDtypeStruct(shape, "bfloat16") for shape in ((8, 32, 64), (4, 16, 1, 64)))
    lengths = [jax.ShapeDtypeStruct(shape, "int32") for shape in ((2, 2), (2,), (3,))]
    table("NVIDIA H200", **{f"paged_{kind}/d64_kv1_g32_b16_bf16": sizes})
    with (
        compat.absent_device("NVIDIA H200", 132, "gpu"),
        pytest.raises(tuning.SizesError, match=f"of paged_{kind}/d64_kv1_g32_b16_bf16"),
    ):
        jax.eval_shape(functools.partial(paged_attention, backend=("triton", "xla")), q, stored, stored, *lengths)


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
        default = SIZES if kinds[content["device_kind"]] == "tpu" else TILING
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
