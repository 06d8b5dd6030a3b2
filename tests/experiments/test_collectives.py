"""What devices exchange, read from programs whose exchanges are known."""

import jax
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from experiments.collectives import Collective, read_collectives


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


def test_an_operand_of_unknown_size_is_told():
    with pytest.raises(ValueError, match=r"a size for every operand of sum, got none of \['missing'\]"):
        read_collectives("%sum = f32[2]{0} all-reduce(%missing)")
    with pytest.raises(ValueError, match="dtype 'f4e2m1fn'"):
        read_collectives("%a = f4e2m1fn[2]{0} parameter(0)\n%sum = f4e2m1fn[2]{0} all-reduce(%a)")
