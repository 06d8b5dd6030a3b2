"""Compiling for NVIDIA GPUs with none in the machine, and what the compiler says of each kernel.

XLA compiles to PTX for a described device; ptxas makes machine code of it and counts registers and spills; nvdisasm
shows the instructions. Meant to run inside a job of `offline.run_job` that has `environment()`.
"""

import importlib
import importlib.util
import pathlib
import re
import subprocess
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
from jax.experimental import topologies

from pallas_kernels.offline import HOW_TO_INSTALL, MissingPackageError, require_packages
from pallas_kernels.offline_program import compile_absent, program_metrics
from pallas_kernels.targets import TOPOLOGIES, Target, Topology

WARP_THREADS = 32
MAX_WARPS = 64  # of a multiprocessor, compute capability 9.0
SCHEDULERS = 4  # each with a quarter of the registers
REGISTER_GRANULE = 256  # registers are given to a warp in units of this many
RESERVED_SHARED_BYTES = 1024  # that the system takes of each thread block's shared memory


# Instructions by the metric that counts them.
INSTRUCTIONS: Mapping[str, str] = {
    "wide_loads": r"\bLDG\.E\S*\.128\b",
    "async_copies": r"\bLDGSTS\.",
    "wide_async_copies": r"\bLDGSTS\.\S*128\b",
    "wgmma": r"\b[HIQB]GMMA\.",
    "mma": r"\b[HIQ]MMA\.",
}


def environment(target: str) -> dict[str, str]:
    """Variables of the process that compiles for `target`."""
    del target  # all GPUs alike
    return {"XLA_FLAGS": "--xla_dump_to={dump_dir} --xla_dump_emitter_re=ptx"}  # all emitters take 20 s a kernel


def topology_devices(topology: Topology) -> Sequence[Any]:
    """The devices of a topology, to be used in shardings; nothing can run on them.

    Raises:
      MissingPackageError: the CUDA plugin of this version of jax is not installed.
    """
    require_packages("jax_plugins.xla_cuda13", "jax_cuda13_plugin")
    try:
        importlib.import_module("jax_plugins.xla_cuda13").initialize()
    except jax.errors.JaxRuntimeError as error:
        if "already exists" not in str(error):  # registered with the first look at the backends
            raise
    description = topologies.get_topology_desc(
        platform="cuda",
        topology_name=topology.target.name,
        topology=topology.name,
        target_config=_target_config(topology.target),
    )
    return list(description.devices)[: topology.num_devices]


def compile_for(
    function: Callable[..., Any], arguments: Sequence[jax.ShapeDtypeStruct], topology: Topology
) -> jax.stages.Compiled:
    """Compiles `function` for a topology; arguments without a sharding lie on its first device."""
    device = topology_devices(topology)[0]
    single = jax.sharding.SingleDeviceSharding(device)
    placed = [
        jax.ShapeDtypeStruct(argument.shape, argument.dtype, sharding=getattr(argument, "sharding", None) or single)
        for argument in arguments
    ]
    return compile_absent(function, placed, topology.target)


def measure(
    function: Callable[..., Any],
    arguments: Sequence[jax.ShapeDtypeStruct],
    *,
    target: str,
    dump_dir: pathlib.Path,
    kernel: str | None = None,
) -> dict[str, Any]:
    """Compiles a function and reads the compiler's reports.

    Args:
      function: to be compiled, jitted or not.
      arguments: shapes, dtypes and, for more than one device, shardings.
      target: a name of `targets.TOPOLOGIES`.
      dump_dir: where `environment` lets XLA write.
      kernel: the Pallas kernel that the metrics describe, by the name of its function; None for the one with the most
        instructions.

    Returns:
      Of that kernel: `registers` per thread; `spills`, bytes stored and loaded; `shared_memory_bytes` of a thread
      block; `warps` of a thread block; `resident_warps` on a multiprocessor; `wide_loads`, 16-byte loads from global
      memory, through registers or asynchronous; `async_copies` to shared memory; `wgmma` and `mma`, tensor-core
      instructions of a warp group and of a warp; `instructions`. All are counted once, as they stand in the
      code. Of the program on each device: `argument_bytes`, `output_bytes`, `temp_bytes`, `collectives`. `kernels`
      holds the same of each Pallas kernel by name.

    Raises:
      MissingPackageError: the plugin or one of the tools is not installed.
      ValueError: the program holds no Pallas kernel, or none called `kernel`.
    """
    topology = TOPOLOGIES[target]
    compiled = compile_for(function, arguments, topology)
    kernels = _kernels(dump_dir, topology.target)
    if not kernels:
        raise ValueError("function must contain a Pallas kernel, got a program without one")
    if kernel is None:
        kernel = max(kernels, key=lambda name: kernels[name]["instructions"])
    if kernel not in kernels:
        raise ValueError(f"kernel must be one of {sorted(kernels)}, got {kernel}")
    return {**kernels[kernel], **program_metrics(compiled, compiled.as_text()), "kernels": kernels}


def resident_warps(registers: int, warps: int, shared_memory_bytes: int, target: Target) -> int:
    """Warps that a multiprocessor holds at once, limited by registers, shared memory and its 64 places.

    The rule is that of the occupancy calculator in the CUDA programming guide.
    """
    per_warp = -(-registers * WARP_THREADS // REGISTER_GRANULE) * REGISTER_GRANULE
    by_registers = target.registers // SCHEDULERS // per_warp * SCHEDULERS // warps
    by_shared = target.shared_memory_bytes // (shared_memory_bytes + RESERVED_SHARED_BYTES)
    return min(by_registers, by_shared, MAX_WARPS // warps) * warps


def _kernels(dump_dir: pathlib.Path, target: Target) -> dict[str, dict[str, Any]]:
    """The Pallas kernels of the compiled program by name."""
    # What XLA makes by itself is compiled beside them.
    names = {
        name
        for path in dump_dir.glob("*gpu_after_optimizations.txt")
        for line in path.read_text(errors="replace").splitlines()
        if "__gpu$xla.gpu.triton" in line
        for name in re.findall(r'name = "(\w+)"', line)
    }
    launches: dict[str, tuple[int, int]] = {}
    for path in dump_dir.glob("*thunk_sequence.txt"):
        for line in path.read_text().splitlines():
            found = re.search(r" (\w+) grid: .*threads: \[(\d+),.*shared_memory: (\d+) bytes", line)
            if found and found[1] in names:
                launches[found[1]] = int(found[2]) // WARP_THREADS, int(found[3])
    kernels = {}
    for path in sorted(dump_dir.glob("*.ptx")):
        if ".version" not in path.read_text():
            continue
        for name, registers, spills, code in _assemble(path):
            if name not in launches:
                continue
            warps, shared = launches[name]
            counts = {metric: len(re.findall(pattern, code)) for metric, pattern in INSTRUCTIONS.items()}
            counts["wide_loads"] += counts.pop("wide_async_copies")
            kernels[name] = {
                "registers": registers,
                "spills": spills,
                "shared_memory_bytes": shared,
                "warps": warps,
                "resident_warps": resident_warps(registers, warps, shared, target),
                **counts,
                "instructions": len(re.findall(r"/\*[0-9a-f]{4,}\*/", code)),
            }
    return kernels


def _assemble(ptx: pathlib.Path) -> list[tuple[str, int, int, str]]:
    """Name, registers, spilled bytes and machine code of each kernel in a PTX file."""
    cubin = ptx.with_suffix(".cubin")
    report = _run("ptxas", "-v", "-arch=sm_90a", str(ptx), "-o", str(cubin))
    code = _run("nvdisasm", "-c", str(cubin))
    found = []
    for part in report.split("Compiling entry function '")[1:]:
        name = part.split("'", 1)[0]
        stores, loads = re.findall(r"(\d+) bytes spill (?:stores|loads)", part)[:2]
        registers = re.search(r"Used (\d+) registers", part)
        section = re.search(rf"^\.text\.{re.escape(name)}:\n(.*?)(?=^//-----|\Z)", code, re.MULTILINE | re.DOTALL)
        if registers is None or section is None:
            raise RuntimeError(f"cannot read what ptxas and nvdisasm say of {name}: {part[:300]}")
        found.append((name, int(registers[1]), int(stores) + int(loads), section[1]))
    return found


def _run(tool: str, *arguments: str) -> str:
    """Output of one of NVIDIA's tools, from the wheels of the group `offline`."""
    spec = importlib.util.find_spec("nvidia")  # a namespace, which the wheels share
    for place in (spec.submodule_search_locations or ()) if spec else ():
        path = pathlib.Path(place, "cu13", "bin", tool)
        if path.exists():
            done = subprocess.run([path, *arguments], capture_output=True, text=True, check=False)
            if done.returncode:
                raise RuntimeError(f"{tool} failed: {done.stderr.strip()[:500]}")
            return done.stdout + done.stderr
    raise MissingPackageError(f"{tool} is not installed; {HOW_TO_INSTALL}")


def _target_config(target: Target) -> str:
    """What XLA wants to know of a GPU, as the text form of its `GpuTargetConfigProto`."""
    return f"""
gpu_device_info {{
  threads_per_block_limit: 1024 threads_per_warp: {WARP_THREADS} threads_per_core_limit: {MAX_WARPS * WARP_THREADS}
  shared_memory_per_block: 49152 shared_memory_per_core: {target.shared_memory_bytes}
  shared_memory_per_block_optin: {target.block_shared_memory_bytes}
  registers_per_core_limit: {target.registers} registers_per_block_limit: {target.registers}
  core_count: {target.num_cores} fpus_per_core: 128 clock_rate_ghz: {target.clock_hz / 1e9:g}
  block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
  memory_bandwidth: {target.memory_bytes_per_s:.0f} device_memory_size: {target.memory_bytes} l2_cache_size: 52428800
  cuda_compute_capability {{ major: 9 minor: 0 }}
}}
platform_name: "CUDA"
dnn_version_info {{ major: 9 minor: 8 patch: 0 }}
device_description_str: "{target.device_kind}"
"""
