"""Reading exchanges from listings of operations, in the forms in which compilers write them."""

import jax
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from experiments.collectives import Collective, read_collectives, totals

LOOP = """\
HloModule jit_step, is_scheduled=true

%sum (a: bf16[], b: bf16[]) -> bf16[] {
  ROOT %add.1 = bf16[] add(%a, %b)
}

%offloaded (x: f32[4,8]) -> f32[4,8] {
  ROOT %all-gather.7 = f32[4,8]{1,0} all-gather(%x), replica_groups=[2,4]<=[8], metadata={op_name="jit(step)/gather"}
}

%body (carry: (s32[], bf16[64,16])) -> (s32[], bf16[64,16]) {
  %part = bf16[64,16]{1,0:T(8,128)(2,1)} fusion(%carry), kind=kLoop
  %psum.1 = bf16[64,16]{1,0} all-reduce-start(%part), replica_groups={{0,1},{2,3}}, metadata={op_name="in/psum"}
  %psum.2 = bf16[64,16]{1,0} all-reduce-done(%psum.1)
  %x = f32[1,8]{1,0} copy(%psum.2)
  %start = ((f32[1,8])) custom-call-start(%x), called_computations={%offloaded}
}

%until (carry: (s32[], bf16[64,16])) -> pred[] {
  ROOT %less = pred[] compare(%i, %n), direction=LT
}

ENTRY %main (p0: f32[3], p1: s8[5]) -> f32[3] {
  %p0 = f32[3]{0} parameter(0)
  %p1 = s8[5]{0} parameter(1)
  %while.1 = (s32[], bf16[64,16]) while(%tuple), condition=%until, body=%body%TRIPS%
  ROOT %both = (f32[3], s8[5]) all-reduce(%p0, %p1), to_apply=%sum, metadata={op_name="after"}
}
"""
KNOWN = ', backend_config={"known_trip_count":{"n":"5"}}'


def test_an_exchange_in_a_loop_counts_as_often_as_the_loop_runs():
    found = read_collectives(LOOP.replace("%TRIPS%", KNOWN))
    assert found == [
        Collective("all-gather", 4 * 8, "jit(step)/gather", 4, 5),
        Collective("all-reduce", 2 * 64 * 16, "in/psum", 2, 5),
        Collective("all-reduce", 4 * 3 + 5, "after", None, 1),
    ]
    assert [one.given_bytes for one in found] == [160, 10_240, 17]
    assert totals(found) == {("all-gather", 32): 5, ("all-reduce", 2048): 5, ("all-reduce", 17): 1}


def test_a_loop_whose_length_the_listing_does_not_tell_is_as_long_as_it_is_said_to_be():
    silent = LOOP.replace("%TRIPS%", "")
    assert read_collectives(silent, trips=80)[1].times == 80
    with pytest.raises(ValueError, match=r"trips: expected how often the loop around all-gather\.7 runs, got None"):
        read_collectives(silent)


def test_a_loop_in_a_loop_multiplies():
    outer = LOOP.replace("%TRIPS%", KNOWN).replace("ENTRY %main", "%outer") + (
        "\nENTRY %main (p: f32[3]) -> f32[3] {\n"
        '  %while.2 = f32[3] while(%p), body=%outer, backend_config={"known_trip_count":{"n":"3"}}\n}\n'
    )
    assert [one.times for one in read_collectives(outer)] == [15, 15, 3]


def test_what_is_exchanged_must_have_a_size():
    with pytest.raises(
        ValueError, match=r"expected a size for every operand of all-reduce\.1, got none of \['nowhere'\]"
    ):
        read_collectives("  %all-reduce.1 = f32[2]{0} all-reduce(%nowhere), to_apply=%sum")


def test_a_compiled_program_tells_its_exchanges():
    mesh = jax.make_mesh((4,), ("x",), (AxisType.Explicit,), devices=jax.devices()[:4])

    def on_device(x, y):
        with jax.named_scope("adding"):
            total = jax.lax.psum(x, "x")
        return total, jax.lax.all_gather(y, "x")

    spec = PartitionSpec("x")
    run = jax.shard_map(on_device, mesh=mesh, in_specs=(spec, spec), out_specs=PartitionSpec(), check_vma=False)
    given = (np.zeros((8, 6), np.float32), np.zeros((4, 10), np.float32))
    placed = [jax.device_put(x, NamedSharding(mesh, spec)) for x in given]
    found = read_collectives(jax.jit(run).lower(*placed).compile().as_text())
    assert [(one.kind, one.operand_bytes) for one in sorted(found)] == [
        ("all-gather", 1 * 10 * 4),  # a device's own row
        ("all-reduce", 2 * 6 * 4),
    ]
    assert ["adding" in one.where for one in sorted(found)] == [False, True]


def test_several_operands_and_parts_that_start_and_end():
    operations = """
  %a = f32[4,8]{1,0} parameter(0)
  %b = bf16[16]{0:T(256)(128)(2,1)} parameter(1)
  ROOT %sums = (f32[4,8]{1,0}, bf16[16]{0}) all-reduce(%a, %b), channel_id=1, metadata={op_name="jit(f)/psum"}
  %start = (f32[4,8]{1,0}, f32[16,8]{1,0}) all-gather-start(%a), dimensions={0}
  %done = f32[16,8]{1,0} all-gather-done(%start)
  %typed = f32[4,8]{1,0} collective-permute(f32[4,8]{1,0} %a), source_target_pairs={{0,1}}
  %other = f32[4,8]{1,0} add(%a, %a), metadata={op_name="all-reduce(%a)"}
"""
    assert read_collectives(operations) == [
        Collective("all-reduce", 4 * 8 * 4 + 16 * 2, "jit(f)/psum"),
        Collective("all-gather", 128, ""),
        Collective("collective-permute", 128, ""),
    ]


def test_an_operand_of_unknown_dtype_is_told():
    with pytest.raises(ValueError, match="dtype 'f4e2m1fn'"):
        read_collectives("%a = f4e2m1fn[2]{0} parameter(0)\n%sum = f4e2m1fn[2]{0} all-reduce(%a)")
