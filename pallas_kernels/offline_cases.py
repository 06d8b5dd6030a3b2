"""The programs that are compiled for absent devices: named cases of every kernel, and jax's own for comparison.

On more than one device a program is sharded over KV heads, each with the query heads that read it, which needs no word
between devices.
"""

import functools
import pathlib
from collections.abc import Callable, Mapping, Sequence
from types import ModuleType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from pallas_kernels import offline, offline_gpu, offline_tpu, tuning
from pallas_kernels.block_copy import block_copy
from pallas_kernels.block_copy import shapes as copy_shapes
from pallas_kernels.contiguous_attention import contiguous_attention
from pallas_kernels.contiguous_attention import shapes as contiguous_shapes
from pallas_kernels.kv_write import kv_write
from pallas_kernels.kv_write import shapes as write_shapes
from pallas_kernels.paged_attention import paged_attention
from pallas_kernels.paged_attention import shapes as paged_shapes
from pallas_kernels.targets import TOPOLOGIES

Case = paged_shapes.AttentionCase | write_shapes.WriteCase | copy_shapes.CopyCase

BACKENDS: Mapping[str, str] = {"gpu": "triton", "tpu": "mosaic_tpu"}
AXIS = "kv_heads"


class Program(NamedTuple):
    """A function of keyword arguments, what it is compiled for, and which axis of each array has the KV heads."""

    function: Callable[..., Any]
    arguments: dict[str, jax.ShapeDtypeStruct]
    in_specs: dict[str, PartitionSpec]
    out_specs: Any
    pallas_name: str | None = None  # of the Pallas kernel that the metrics describe


def cases(kernel: str, platform: str, *, on_demand: bool = True) -> dict[str, Case]:
    """The cases of a kernel that are compiled for absent devices of a platform, by name; all, or the checked ones.

    Raises:
      ValueError: there is no such kernel.
    """
    if kernel not in KERNELS:
        raise ValueError(f"kernel must be one of {list(KERNELS)}, got {kernel!r}")
    _, every, kind = KERNELS[kernel]
    return {
        case.name: case
        for case in every
        if case.offline
        and (on_demand or not case.on_demand)
        and platform in case.platforms
        and kind in ("", getattr(case, "kind", ""))
    }


def compile_case(
    *, target: str, kernel: str, case: str, dump_dir: pathlib.Path, sizes: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """The job of a process: compiles one case of one kernel and reports on it.

    Args:
      target: a name of `targets.TOPOLOGIES`.
      kernel: a name of `KERNELS`.
      case: a name of `cases(kernel, platform)`.
      dump_dir: where the compiler writes.
      sizes: fields of the kernel's sizes that differ from its default; None for the tuned ones.

    Returns:
      What `measure` of the platform's module returns.

    Raises:
      ValueError: there is no such name, or a kernel refuses the case.
    """
    topology = TOPOLOGIES[target]
    platform = topology.target.platform
    known = cases(kernel, platform)
    if case not in known:
        raise ValueError(f"case must be one of {list(known)} for {kernel} on {target}, got {case!r}")
    module = compiler(platform)
    program = KERNELS[kernel].build(known[case], BACKENDS[platform])
    devices = module.topology_devices(topology) if topology.num_devices > 1 else ()
    function, arguments = placed(program, devices)
    options = {"kernel": program.pallas_name}
    with tuning.candidate(sizes):
        if platform == "tpu":
            options = offline_tpu.inner_loop(kernel, known[case], target) if offline_tpu.lists(kernel) else {}
        return module.measure(function, arguments, target=target, dump_dir=dump_dir, **options)


def compile_cases(
    *, target: str, names: Sequence[tuple[str, str]], dump_dir: pathlib.Path
) -> dict[str, list[dict[str, Any]]]:
    """The job of a process that compiles several cases for one target: most of a small one goes into the beginning.

    Args:
      target: a name of `targets.TOPOLOGIES`.
      names: kernels and cases.
      dump_dir: where the compiler writes; emptied after each case, so that none is taken for another.

    Returns:
      Under `outcomes`, in order, what `offline.attempt` says of each.
    """
    outcomes = []
    for kernel, case in names:
        outcomes.append(offline.attempt(compile_case, target=target, kernel=kernel, case=case, dump_dir=dump_dir))
        for path in dump_dir.rglob("*"):
            if path.is_file():
                path.unlink()
    return {"outcomes": outcomes}


def environment(target: str, kernel: str) -> dict[str, str]:
    """Variables of a process that compiles cases of a kernel for a target."""
    if TOPOLOGIES[target].target.platform == "gpu":
        return offline_gpu.environment(target)
    return offline_tpu.environment(target, listings=offline_tpu.LISTINGS if offline_tpu.lists(kernel) else ())


def compiler(platform: str) -> ModuleType:
    """The module that compiles for a platform."""
    return {"gpu": offline_gpu, "tpu": offline_tpu}[platform]


def placed(program: Program, devices: Sequence[Any]) -> tuple[Callable[..., Any], list[jax.ShapeDtypeStruct]]:
    """The program as a function of positions, and its arguments, sharded over the KV heads if there are devices.

    Raises:
      ValueError: the devices cannot share the heads evenly.
    """
    names = list(program.arguments)

    def function(*arrays: jax.Array) -> Any:
        return program.function(**dict(zip(names, arrays, strict=True)))

    if not devices:
        return function, list(program.arguments.values())
    mesh = jax.sharding.Mesh(np.array(devices), (AXIS,))
    arguments = []
    for name, argument in program.arguments.items():
        spec = program.in_specs[name]
        for size, axis in zip(argument.shape, spec, strict=False):
            if axis == AXIS and size % len(devices):
                raise ValueError(f"the heads of {name} must be a multiple of {len(devices)} devices, got {size}")
        sharding = jax.sharding.NamedSharding(mesh, spec)
        arguments.append(jax.ShapeDtypeStruct(argument.shape, argument.dtype, sharding=sharding))
    in_specs = tuple(program.in_specs[name] for name in names)
    # A kernel does not say along which axes its results vary, so that is not checked.
    sharded = jax.shard_map(function, mesh=mesh, in_specs=in_specs, out_specs=program.out_specs, check_vma=False)
    return sharded, arguments


def _attention(case: paged_shapes.AttentionCase, backend: str, *, paged: bool) -> Program:
    heads = (case.kv_heads, case.head_dim)
    slots = (case.seqs * case.blocks_per_seq, case.block_size)
    if not paged:
        slots = (slots[0] * slots[1],)
    no_axes = (None,) * len(slots)
    new = jax.ShapeDtypeStruct((case.tokens, *heads), case.q_dtype)
    by_head, by_token = PartitionSpec(AXIS), PartitionSpec(None, AXIS)
    arguments, in_specs = _shapes(
        q=(_array((case.tokens, case.q_heads, case.head_dim), case.q_dtype), by_token),
        k=(_array((*slots, *heads), case.kv_dtype), PartitionSpec(*no_axes, AXIS)),
        v=(_array((*slots, *heads), case.kv_dtype), PartitionSpec(*no_axes, AXIS)),
        kv_lens=(_array((case.seqs,), "int32"), PartitionSpec()),
        cu_q_lens=(_array((case.seqs + 1,), "int32"), PartitionSpec()),
    )
    places = (case.seqs, case.blocks_per_seq) if paged else (case.seqs,)
    extra: dict[str, tuple[jax.ShapeDtypeStruct, PartitionSpec]] = {
        "block_tables" if paged else "starts": (_array(places, "int32"), PartitionSpec())
    }
    scales = {
        "none": None,
        "layer": ((), PartitionSpec()),
        "head": ((case.kv_heads,), by_head),
        "token": ((*slots, case.kv_heads), PartitionSpec(*no_axes, AXIS)),
    }[case.scales]
    if scales is not None:
        extra |= dict.fromkeys(("k_scale", "v_scale"), (_array(scales[0], "float32"), scales[1]))
    if case.reads_new:
        extra |= dict.fromkeys(("k_new", "v_new"), (new, by_token))
    if case.sinks:
        extra["sinks"] = (_array((case.q_heads,), "float32"), by_head)
    more_arguments, more_specs = _shapes(**extra)
    function = functools.partial(
        paged_attention if paged else contiguous_attention,
        window=case.window,
        soft_cap=case.soft_cap,
        return_lse=case.return_lse,
        max_q_len=case.max_q_len,
        backend=backend,
    )
    out_specs = (by_token, by_token) if case.return_lse else by_token
    return Program(function, arguments | more_arguments, in_specs | more_specs, out_specs, f"attention_{case.kind}")


def _write(case: write_shapes.WriteCase, backend: str) -> Program:
    by_token = PartitionSpec(None, AXIS)
    pool = (_array((case.slots, case.kv_heads, case.head_dim), case.pool_dtype), by_token)
    new = (_array((case.tokens, case.kv_heads, case.head_dim), case.new_dtype), by_token)
    slots = (_array((case.tokens,), "int32"), PartitionSpec())
    scales = {
        "none": None,
        "layer": ((), PartitionSpec()),
        "head": ((case.kv_heads,), PartitionSpec(AXIS)),
        "token": ((case.slots, case.kv_heads), by_token),
    }[case.scales]
    extra = {}
    if scales is not None:
        extra = dict.fromkeys(("k_scale", "v_scale"), (_array(scales[0], "float32"), scales[1]))
    arguments, in_specs = _shapes(k_pool=pool, v_pool=pool, k_new=new, v_new=new, slots=slots, **extra)

    def function(**arrays: jax.Array) -> Any:
        written = kv_write(**arrays, backend=backend)
        return [pool for pool in (written.k, written.v, written.k_scale, written.v_scale) if pool is not None]

    scale_specs = [] if scales is None else [scales[1]] * 2
    return Program(function, arguments, in_specs, [by_token, by_token, *scale_specs], "kv_write")


def _copy(case: copy_shapes.CopyCase, backend: str) -> Program:
    by_slot = PartitionSpec(None, AXIS)
    ids = (_array((case.pairs,), "int32"), PartitionSpec())
    pool = (_array((case.num_blocks * case.block_size, *case.item), case.dtype), by_slot)
    arguments, in_specs = _shapes(pool=pool, src=ids, dst=ids)
    function = functools.partial(block_copy, block_size=case.block_size, backend=backend)
    return Program(function, arguments, in_specs, by_slot, "block_copy")


def _jax_decode(case: paged_shapes.AttentionCase, backend: str) -> Program:
    """The decode kernel that comes with jax, on the same sizes; its pages are head-major."""
    pages = (case.kv_heads, case.seqs * case.blocks_per_seq, case.block_size, case.head_dim)
    by_head = PartitionSpec(AXIS)
    arguments, in_specs = _shapes(
        q=(_array((case.seqs, case.q_heads, case.head_dim), case.q_dtype), PartitionSpec(None, AXIS)),
        k_pages=(_array(pages, case.kv_dtype), by_head),
        v_pages=(_array(pages, case.kv_dtype), by_head),
        lengths=(_array((case.seqs,), "int32"), PartitionSpec()),
        tables=(_array((case.seqs, case.blocks_per_seq), "int32"), PartitionSpec()),
    )
    if backend == "mosaic_tpu":
        from jax.experimental.pallas.ops.tpu.paged_attention import paged_attention as jax_paged_attention

        def on_tpu(q: Any, k_pages: Any, v_pages: Any, lengths: Any, tables: Any) -> Any:
            per_step = max(1, 2048 // case.block_size)
            return jax_paged_attention(q, k_pages, v_pages, lengths, tables, pages_per_compute_block=per_step)

        return Program(on_tpu, arguments, in_specs, PartitionSpec(None, AXIS))

    from jax.experimental.pallas.ops.gpu.paged_attention import paged_attention as jax_paged_attention

    if jnp.dtype(case.kv_dtype).itemsize == 1:  # it takes bytes with a scale of each token and head alone
        scale_pages = (_array(pages[:-1], "float32"), by_head)
        more_arguments, more_specs = _shapes(k_scales_pages=scale_pages, v_scales_pages=scale_pages)
        arguments, in_specs = arguments | more_arguments, in_specs | more_specs

    def on_gpu(q: Any, k_pages: Any, v_pages: Any, lengths: Any, tables: Any, **scales: Any) -> Any:
        return jax_paged_attention(
            q,
            k_pages,
            v_pages,
            tables,
            lengths,
            **scales,
            pages_per_compute_block=max(1, 64 // case.block_size),
            num_warps=4,
        )

    return Program(on_gpu, arguments, in_specs, PartitionSpec(None, AXIS))


def _array(shape: tuple[int, ...], dtype: str) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.dtype(dtype))


def _shapes(
    **arrays: tuple[jax.ShapeDtypeStruct, PartitionSpec],
) -> tuple[dict[str, jax.ShapeDtypeStruct], dict[str, PartitionSpec]]:
    return {name: array for name, (array, _) in arrays.items()}, {name: spec for name, (_, spec) in arrays.items()}


class Kernel(NamedTuple):
    """How a kernel's cases become programs."""

    build: Callable[[Any, str], Program]
    cases: tuple[Any, ...]
    kind: str = ""  # of attention cases


# Cases of jax's kernel, which takes none of the options and not every size.
_COMPARED = tuple(f"d128_kv8_g4_b{block_size}_{dtype}" for block_size in (16, 32, 128) for dtype in ("bf16", "fp8"))

_paged = functools.partial(_attention, paged=True)
_contiguous = functools.partial(_attention, paged=False)

KERNELS: Mapping[str, Kernel] = {
    "paged_decode": Kernel(_paged, paged_shapes.CASES, "decode"),
    "paged_prefill": Kernel(_paged, paged_shapes.CASES, "prefill"),
    "contiguous_decode": Kernel(_contiguous, contiguous_shapes.CASES, "decode"),
    "contiguous_prefill": Kernel(_contiguous, contiguous_shapes.CASES, "prefill"),
    "kv_write": Kernel(_write, write_shapes.CASES),
    "block_copy": Kernel(_copy, copy_shapes.CASES),
    "jax_paged_decode": Kernel(
        _jax_decode, tuple(case for case in paged_shapes.CASES if case.name in _COMPARED), "decode"
    ),
}
