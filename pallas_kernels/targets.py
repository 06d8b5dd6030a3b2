"""The hardware that programs are compiled for and held against: one row per device, and the topologies made of them.

Sources. NVIDIA: A100 SXM, H100 SXM and H200 data sheets (peaks without sparsity); memory and bandwidth of the A100 and
bandwidth of the H100 as in XLA's own descriptions of these targets (`a100_sxm_40`, `a100_sxm_80`, `h100_sxm`),
bandwidth of the H200 from its data sheet; sizes per multiprocessor from the CUDA programming guide, compute
capabilities 8.0 and 9.0. TPU: `pltpu.get_tpu_info_for_chip` of jax 0.12, per core; clocks are not published and derived
as bf16 peak / (MXUs * rows * columns * 2, twice that where an MXU has 256 columns), which agrees with the rate of the
compiler's own matrix products. Links: NVLink, both ways together 600 GB/s of an A100 and 900 GB/s of an H100 or H200,
of the data sheets; the bidirectional interconnect bandwidth of a chip that Cloud TPU's pages on each generation state
(v5e 400, v6e 800, v5p and tpu7x 1200 GB/s). Half of that is one way, and a core has half of a chip with two.
"""

import dataclasses
from collections.abc import Mapping


@dataclasses.dataclass(frozen=True)
class Target:
    """One device: a GPU, or a core of a TPU. A size that a kind of device does not have is 0.

    Attributes:
      name: the target's name on the command line.
      platform: "gpu" or "tpu".
      device_kind: as `jax.Device.device_kind` spells it.
      memory_bytes: device memory.
      memory_bytes_per_s: bandwidth of device memory.
      peak_flops: multiply and add counted as two, per second, by dtype of the operands.
      link_bytes_per_s: what the device can give to others at once, over all of its links; a small slice of TPUs does
        not use all of them.
      clock_hz: clock of the compute units.
      num_cores: streaming multiprocessors of a GPU, 1 for a TPU core.
      vmem_bytes: vector memory of a TPU core.
      smem_bytes: scalar memory of a TPU core.
      registers: 32-bit registers of a multiprocessor.
      shared_memory_bytes: shared memory of a multiprocessor.
      block_shared_memory_bytes: shared memory that one thread block may have.
    """

    name: str
    platform: str
    device_kind: str
    memory_bytes: int
    memory_bytes_per_s: float
    peak_flops: Mapping[str, float] = dataclasses.field(hash=False)
    link_bytes_per_s: float
    clock_hz: float
    num_cores: int = 1
    vmem_bytes: int = 0
    smem_bytes: int = 0
    registers: int = 0
    shared_memory_bytes: int = 0
    block_shared_memory_bytes: int = 0


@dataclasses.dataclass(frozen=True)
class Topology:
    """Devices that one program is compiled for.

    Attributes:
      target: what each of them is.
      num_devices: how many of the topology's devices the program uses.
      name: as the platform's compiler spells it: slices x hosts x devices of GPUs, a grid of chips of TPUs (a chip
        of v5p or tpu7x has two cores, which are two devices on tpu7x and one on v5p).
    """

    target: Target
    num_devices: int
    name: str


def _ampere(name: str, device_kind: str, memory_bytes: int, memory_bytes_per_s: float) -> Target:
    return Target(
        name=name,
        platform="gpu",
        device_kind=device_kind,
        memory_bytes=memory_bytes,
        memory_bytes_per_s=memory_bytes_per_s,
        peak_flops={"float32": 19.5e12, "bfloat16": 312e12, "float16": 312e12, "int8": 624e12},
        link_bytes_per_s=300e9,
        clock_hz=1.41e9,
        num_cores=108,
        registers=65_536,
        shared_memory_bytes=167_936,
        block_shared_memory_bytes=166_912,
    )


def _hopper(name: str, device_kind: str, memory_bytes: int, memory_bytes_per_s: float) -> Target:
    return Target(
        name=name,
        platform="gpu",
        device_kind=device_kind,
        memory_bytes=memory_bytes,
        memory_bytes_per_s=memory_bytes_per_s,
        peak_flops={
            "float32": 66.9e12,
            "bfloat16": 989.4e12,
            "float16": 989.4e12,
            "float8_e4m3fn": 1978.9e12,
            "float8_e5m2": 1978.9e12,
            "int8": 1978.9e12,
        },
        link_bytes_per_s=450e9,
        clock_hz=1.98e9,
        num_cores=132,
        registers=65_536,
        shared_memory_bytes=233_472,
        block_shared_memory_bytes=232_448,
    )


def _tpu(
    name: str,
    device_kind: str,
    *,
    memory_bytes: float,
    memory_bytes_per_s: float,
    peak_flops: Mapping[str, float],
    link_bytes_per_s: float,
    clock_hz: float,
    vmem_mib: int,
) -> Target:
    return Target(
        name=name,
        platform="tpu",
        device_kind=device_kind,
        memory_bytes=int(memory_bytes),
        memory_bytes_per_s=memory_bytes_per_s,
        peak_flops=peak_flops,
        link_bytes_per_s=link_bytes_per_s,
        clock_hz=clock_hz,
        vmem_bytes=vmem_mib * 2**20,
        smem_bytes=2**20,
    )


TARGETS: Mapping[str, Target] = {
    target.name: target
    for target in (
        _ampere("a100_40gb", "NVIDIA A100-SXM4-40GB", 42_331_013_120, 1.5552e12),
        _ampere("a100_80gb", "NVIDIA A100-SXM4-80GB", 85_100_068_864, 2.03904e12),
        _hopper("h100", "NVIDIA H100 80GB HBM3", 84_942_979_072, 3.35232e12),
        _hopper("h200", "NVIDIA H200", 150_754_820_096, 4.8e12),
        _tpu(
            "v5e",
            "TPU v5 lite",
            memory_bytes=17.2e9,
            memory_bytes_per_s=820e9,
            peak_flops={"bfloat16": 197e12, "int8": 394e12},
            link_bytes_per_s=200e9,
            clock_hz=197e12 / (4 * 128**2 * 2),
            vmem_mib=128,
        ),
        _tpu(
            "v5p",
            "TPU v5",
            memory_bytes=51.5e9,
            memory_bytes_per_s=1230e9,
            peak_flops={"bfloat16": 229.5e12, "int8": 459e12},
            link_bytes_per_s=300e9,
            clock_hz=229.5e12 / (4 * 128**2 * 2),
            vmem_mib=64,
        ),
        _tpu(
            "v6e",
            "TPU v6 lite",
            memory_bytes=34.4e9,
            memory_bytes_per_s=1640e9,
            peak_flops={"bfloat16": 918e12, "float8_e4m3fn": 918e12, "float8_e5m2": 918e12, "int8": 1836e12},
            link_bytes_per_s=400e9,
            clock_hz=918e12 / (2 * 256**2 * 2 * 2),
            vmem_mib=128,
        ),
        _tpu(
            "tpu7x",
            "TPU7x",
            memory_bytes=103e9,
            memory_bytes_per_s=3700e9,
            peak_flops={"bfloat16": 1155e12, "float8_e4m3fn": 2300e12, "float8_e5m2": 2300e12},
            link_bytes_per_s=300e9,
            clock_hz=1155e12 / (2 * 256**2 * 2 * 2),
            vmem_mib=64,
        ),
    )
}

TOPOLOGIES: Mapping[str, Topology] = {
    name: Topology(TARGETS[target], num_devices, topology)
    for name, target, num_devices, topology in (
        ("h100", "h100", 1, "1x1x1"),
        ("h100x8", "h100", 8, "1x1x8"),
        ("h200", "h200", 1, "1x1x1"),
        ("h200x8", "h200", 8, "1x1x8"),
        ("v5e", "v5e", 1, "v5e:2x2"),
        ("v5e-4", "v5e", 4, "v5e:2x2"),
        ("v5e-8", "v5e", 8, "v5e:2x4"),
        ("v5p", "v5p", 1, "v5p:2x2x1"),
        ("v6e", "v6e", 1, "v6e:2x2"),
        ("v6e-4", "v6e", 4, "v6e:2x2"),
        ("v6e-8", "v6e", 8, "v6e:2x4"),
        ("tpu7x", "tpu7x", 1, "tpu7x:2x2x1"),
        ("tpu7x-8", "tpu7x", 8, "tpu7x:2x2x1"),
    )
}
