"""What the compiler for TPUs says of a program on a machine without one: its schedule, its memory, its collectives.

Compiled with the libtpu wheel alone. Cycles are static: the lines of the scheduled listing (`packed-bundles-post-ra`),
whose latency slots are still written out as empty bundles. A core issues its bundles in order, so this is the time of a
loop that never waits for memory; whether it can keep up with memory is told by comparing it with what the bandwidth
allows for the same bytes.
"""

import dataclasses
import math
import pathlib
import re
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import topologies

from pallas_kernels import tuning
from pallas_kernels._mosaic_tpu import LANES, SIZES, make_plan
from pallas_kernels._mosaic_tpu_batch import prefill_tile
from pallas_kernels.block_copy.shapes import CopyCase
from pallas_kernels.contiguous_attention.mosaic_tpu import MOST_BLOCK
from pallas_kernels.kv_write.shapes import WriteCase
from pallas_kernels.offline import require_packages
from pallas_kernels.offline_program import compile_absent, program_metrics
from pallas_kernels.paged_attention.shapes import AttentionCase
from pallas_kernels.targets import TOPOLOGIES, Topology

MIB = 2**20
GRANULE_BYTES = 32  # the unit in which listings give the size of a DMA

_BUNDLE = re.compile(r"\s*(?:0x)?([0-9a-f]+)\s+(?:[A-Z]{2})?\s*:\s*>*\s*\{(.*)")
_BRANCH = re.compile(r"sbr\.rel \([^)]*\) target bundleno = (\d+)")
# One whose source and destination are not laid out alike is a general DMA.
_FETCH = re.compile(r"dma\.(?:hbm_to_vmem|general(?=[^;]*hbm-to-vmem))[^;]*?/\*size_in_granules=\*/(\d+)")
_ALLOCATION = re.compile(r"space=(vmem|smem), size = (0x[0-9a-f]+)")
SCHEDULE, ALLOCATIONS = "packed-bundles-post-ra", "post-bundle-packing-post-ra"
UTILIZATION = "final_hlo-static-per-bundle-utilization"
LISTINGS = (SCHEDULE, ALLOCATIONS, UTILIZATION)
NO_LISTINGS = ("none",)
"""But for the program as a whole, which the compiler writes in any case."""
_ENVIRONMENT = {
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_WORKER_ID": "0",
    "TPU_ACCELERATOR_TYPE": "v5litepod-4",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
}
BRANCH_DELAY = 4  # bundles after a branch that are issued whether it is taken or not


def lists(kernel: str) -> bool:
    """Whether a kernel's schedule is listed. That of prefill, which its products bound, would take minutes."""
    return not kernel.endswith("prefill")


def environment(target: str, *, listings: Sequence[str] = LISTINGS) -> dict[str, str]:
    """Variables of the process that compiles for `target`; libtpu reads them when it is loaded.

    Args:
      target: all TPUs are alike.
      listings: that the compiler writes; all that `measure` reads of a kernel unless it is said otherwise.
    """
    del target
    if not listings:
        return _ENVIRONMENT
    return _ENVIRONMENT | {
        # Of some fifty listings of every computation, those that are read here.
        "LIBTPU_INIT_ARGS": "--xla_jf_dump_to={dump_dir} --xla_jf_dump_llo_text=true "
        f"--xla_jf_dump_llo_pass_label_regex={'|'.join(listings)}",
    }


def topology_devices(topology: Topology) -> Sequence[Any]:
    """The devices of a topology, to make a mesh of; none of them can run anything."""
    require_packages("libtpu")
    devices = topologies.get_topology_desc(platform="tpu", topology_name=topology.name).devices
    return devices[: topology.num_devices]


def measure(
    function: Callable[..., object],
    arguments: Sequence[jax.ShapeDtypeStruct],
    *,
    target: str,
    dump_dir: pathlib.Path,
    kv_bytes: int | None = None,
    kernel: str | None = None,
) -> dict[str, float | int]:
    """Compiles a function for a TPU and reports on the program, and on one kernel of it.

    Args:
      function: what to compile; jitted or not.
      arguments: abstract arguments, placed on the first device of the topology unless they say where.
      target: a name of `TOPOLOGIES`.
      dump_dir: where `environment` makes the compiler write its listings.
      kv_bytes: bytes of keys and values that one round of the kernel's loop of matrix products covers; those that it
        fetches if None.
      kernel: name of the kernel, as given to `pallas_call`.

    Returns:
      argument_bytes, output_bytes, temp_bytes (per device), and collectives (a count) where the compiler tells. With
      `kernel` also vmem_bytes and smem_bytes of its scratch and spills (vector registers spilled in the whole kernel).
      If that has a loop of matrix products: bundles_per_mib and cycles_per_mib of the steady state;
      cycles_over_allowed, cycles_per_mib over those that pass while memory delivers a MiB; outer_cycles, those around
      the loops, spent once per sequence at most.
    """
    topology = TOPOLOGIES[target]
    devices = topology_devices(topology)
    placed = jax.sharding.SingleDeviceSharding(devices[0])
    arguments = [
        argument
        if argument.sharding is not None
        else jax.ShapeDtypeStruct(argument.shape, argument.dtype, sharding=placed)
        for argument in arguments
    ]
    compiled = compile_absent(function, arguments, topology.target)
    report = program_metrics(compiled, operations(compiled, dump_dir))
    if kernel is not None:
        report |= read_kernel(dump_dir, kernel)
        schedule = read_schedule(_dump(dump_dir, kernel, SCHEDULE))
        if loops := steady_loops(schedule, kv_bytes):
            cycles_per_mib = MIB * sum(loop.cycles / loop.kv_bytes for loop in loops)
            allowed = topology.target.clock_hz * MIB / topology.target.memory_bytes_per_s
            report |= {
                "bundles_per_mib": MIB * sum(loop.bundles / loop.kv_bytes for loop in loops),
                "cycles_per_mib": cycles_per_mib,
                "cycles_over_allowed": cycles_per_mib / allowed,
                "outer_cycles": len(schedule)
                - sum(loop.end - loop.start for loop in find_loops(schedule) if loop.innermost),
            }
    return report


def inner_loop(kernel: str, case: AttentionCase | WriteCase | CopyCase, target: str) -> dict[str, str | int]:
    """The arguments `kernel` and `kv_bytes` of `measure` for a case of this package's kernels, or of jax's own.

    Args:
      kernel: paged_decode, paged_prefill, contiguous_decode, contiguous_prefill, kv_write, block_copy or
        jax_paged_decode.
      case: what is compiled.
      target: a name of `TOPOLOGIES`; its devices share the KV heads.
    """
    if kernel == "jax_paged_decode":
        return {"kernel": "paged_attention"}
    if not isinstance(case, AttentionCase):
        return {"kernel": kernel}
    topology = TOPOLOGIES[target]
    kv_heads, itemsize = case.kv_heads // topology.num_devices, jnp.dtype(case.kv_dtype).itemsize
    paged, prefill = kernel.startswith("paged"), kernel.endswith("prefill")
    capacity = case.blocks_per_seq * case.block_size * (1 if paged else case.seqs)
    name = case.entry_name(kernel, topology.num_devices)
    sizes = tuning.choose(name, SIZES, topology.target.device_kind)
    head_dim = -(-case.head_dim // LANES) * LANES
    q_heads = case.q_heads // topology.num_devices
    plan = make_plan(
        block_size=case.block_size if paged else math.gcd(capacity, MOST_BLOCK),
        kv_heads=kv_heads,
        head_dim=head_dim,
        q_group=case.q_heads // case.kv_heads,
        q_tile=prefill_tile(case.max_q_len, q_heads, head_dim, sizes) if prefill else 1,
        capacity=capacity,
        kv_itemsize=itemsize,
        sizes=sizes,
        window=case.window,
        soft_cap=case.soft_cap,
        from_start=case.window is None and paged,
        in_table=paged,
        scaled=case.scales == "token",
        unpack=False,
        dtype=case.q_dtype,
    )
    heads = 1 if plan.apart else kv_heads  # that one round covers
    return {"kernel": kernel, "kv_bytes": 2 * plan.step_slots * heads * case.head_dim * itemsize}


@dataclasses.dataclass(frozen=True)
class Loop:
    """A loop of a schedule: the bundles `[start, end)`, and whether no other loop lies in it."""

    start: int
    end: int
    innermost: bool


@dataclasses.dataclass(frozen=True)
class SteadyLoop:
    """What one round of a loop costs in the steady state, and the bytes of keys and values that it covers."""

    cycles: int
    bundles: int
    kv_bytes: int


def read_kernel(dump_dir: pathlib.Path, kernel: str) -> dict[str, int]:
    """Scratch memory and spills of a kernel."""
    sizes = {"vmem": 0, "smem": 0}
    allocations = _dump(dump_dir, kernel, ALLOCATIONS).read_text()
    for space, size in _ALLOCATION.findall(allocations):
        sizes[space] += int(size, 16)
    lines = _dump(dump_dir, kernel, UTILIZATION).read_text().splitlines()
    columns = next(line for line in lines if line.startswith("MATMUL")).replace(" ", "").split(",")
    spill = columns.index("VSTORE:SPILL")
    rows = [line.split() for line in lines[lines.index("== UTILIZATION:") + 1 :]]
    spills = sum(int(row[spill]) for row in rows if len(row) == len(columns))
    return {"vmem_bytes": sizes["vmem"], "smem_bytes": sizes["smem"], "spills": spills}


def read_schedule(listing: pathlib.Path) -> list[str]:
    """The bundles of a listing in order; one that is empty is a latency slot."""
    bundles: list[str] = []
    for line in listing.read_text().splitlines():
        found = _BUNDLE.match(line)
        if found:
            if int(found[1], 16) != len(bundles):
                raise ValueError(f"{listing.name} must number its bundles in order, got {line[:40]!r}")
            bundles.append(found[2])
        elif bundles:
            bundles[-1] += line
    return bundles


def find_loops(schedule: Sequence[str]) -> list[Loop]:
    """The loops of a schedule, by their branches backwards."""
    ends: dict[int, int] = {}
    for bundle, target in _branches(schedule):
        if target <= bundle:
            ends[target] = max(ends.get(target, 0), bundle + 1 + BRANCH_DELAY)
    spans = sorted(ends.items())
    return [
        Loop(start, end, not any(start <= s and e <= end and (s, e) != (start, end) for s, e in spans))
        for start, end in spans
    ]


def steady_loops(schedule: Sequence[str], kv_bytes: int | None) -> list[SteadyLoop]:
    """The loops that run again and again while a long sequence is attended: its matrix products and its fetches.

    The first is the deepest loop with matrix products. Of what a branch in it can jump over, two kinds of regions are
    not counted, unless there are products in them: those with a loop of their own (the search for another sequence),
    and of several that start DMAs all but the last, as those before it fetch what comes first of all. If fetches have a
    loop of their own, that counts too. Where XLA holds a small pool in VMEM, nothing is fetched.

    Args:
      schedule: as `read_schedule` gives it.
      kv_bytes: bytes of keys and values that one round of the loop of matrix products covers; those that it fetches if
        None.

    Returns:
      Nothing if there is no loop with matrix products.
    """
    loops = find_loops(schedule)
    products = [loop for loop in loops if _multiplies(schedule[loop.start : loop.end])]
    if not products:
        return []
    inner = [a for a in products if not any(_within(b, a) for b in products)]
    # Where a loop fetches as it computes, one that does not is what is left at the end.
    compute = max(inner, key=lambda loop: (_fetched_bytes(schedule[loop.start : loop.end]) > 0, loop.end - loop.start))
    regions = [
        (branch + 1, target)
        for branch, target in _branches(schedule)
        if compute.start <= branch < target <= compute.end and not _multiplies(schedule[branch:target])
    ]
    fetching = [region for region in regions if _fetched_bytes(schedule[slice(*region)])]
    skipped = [
        region
        for region in regions
        if any(region[0] <= loop.start and loop.end <= region[1] for loop in loops)
        or (region in fetching and region != max(fetching))
    ]
    counted = [i for i in range(compute.start, compute.end) if not any(a <= i < b for a, b in skipped)]
    bundles = [schedule[i] for i in counted]
    fetched = _fetched_bytes(bundles)
    if kv_bytes is None and not fetched:
        raise ValueError("kv_bytes must be given for a loop that fetches nothing itself")
    steady = [_steady(bundles, kv_bytes or fetched)]
    if not fetched:
        apart = [loop for loop in loops if loop.innermost and _fetched_bytes(schedule[loop.start : loop.end])]
        widest = max(
            apart, key=lambda loop: (_fetched_bytes(schedule[loop.start : loop.end]), loop.start), default=None
        )
        if widest is not None:
            bundles = schedule[widest.start : widest.end]
            steady.append(_steady(bundles, _fetched_bytes(bundles)))
    return steady


def _steady(bundles: Sequence[str], kv_bytes: int) -> SteadyLoop:
    return SteadyLoop(len(bundles), sum(bundle.strip(" }") != "" for bundle in bundles), kv_bytes)


def _within(inner: Loop, outer: Loop) -> bool:
    return inner != outer and outer.start <= inner.start and inner.end <= outer.end


def _branches(schedule: Sequence[str]) -> list[tuple[int, int]]:
    """Each branch and where it goes."""
    return [(i, int(target)) for i, bundle in enumerate(schedule) for target in _BRANCH.findall(bundle)]


def _multiplies(bundles: Sequence[str]) -> bool:
    return any("vmatmul" in bundle for bundle in bundles)


def _fetched_bytes(bundles: Sequence[str]) -> int:
    """Bytes that these bundles start to fetch from device memory."""
    return GRANULE_BYTES * sum(int(granules) for bundle in bundles for granules in _FETCH.findall(bundle))


def operations(compiled: jax.stages.Compiled, dump_dir: pathlib.Path) -> str | None:
    """The operations of the program as HLO writes them; None if nothing tells them.

    A program that hands work to SparseCores cannot show itself, but the compiler writes it down beside its listings.

    Args:
      compiled: the program, the last one that was compiled.
      dump_dir: of the `environment`.
    """
    try:
        return compiled.as_text()
    except jax.errors.JaxRuntimeError:
        last = max(dump_dir.glob("*-TLP-hlo.txt"), default=None)
        return None if last is None else last.read_text()


def _dump(dump_dir: pathlib.Path, kernel: str, kind: str) -> pathlib.Path:
    """The latest listing of one kind."""
    found = sorted(dump_dir.glob(f"*-{kernel}.*-[0-9]*-{kind}.txt"))
    if not found:
        raise ValueError(f"kernel must be one that was compiled, got {kernel!r} without a listing {kind!r}")
    return found[-1]
