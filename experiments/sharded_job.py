"""The job of a process: one decode step of a published model, compiled for devices that are not there."""

import dataclasses
import math
import pathlib
from collections.abc import Mapping
from typing import Any

import jax

from experiments import jax_setup
from experiments.collectives import read_collectives, totals
from experiments.sharded_model import work_of
from experiments.sharded_setup import Server, Serving, device_shape, make_server, parse_mesh
from experiments.sharded_step import decode_step, deep_arguments, expected_exchanges, merge_exchanges
from models.config import DecoderConfig
from models.deep import abstract_stacked
from pallas_kernels import choices, offline_tpu
from pallas_kernels.offline_cases import compiler
from pallas_kernels.offline_program import compile_absent, program_metrics
from pallas_kernels.targets import TOPOLOGIES, Target
from paxkv.capacity import blocks_for
from paxkv.config import MemoryConfig
from paxkv.kv_format import scheme
from paxkv.sharding import Rules, make_mesh
from paxkv.split_paged import MERGE

# Attention and cache writes by platform; XLA where the kernel refuses.
KERNELS: Mapping[str, tuple[str, ...]] = {"gpu": ("triton", "xla"), "tpu": ("mosaic_tpu", "xla")}
_TILE_BYTES = 512  # that a small array takes in the memory of a TPU
# Of the weights of a layer, those that a compiler with wider tiles than those of arguments copies.
_LAID_OUT_ANEW = ("o_proj", "gate_proj", "up_proj", "down_proj")


def environment(target: str) -> dict[str, str]:
    """Variables of the process."""
    if TOPOLOGIES[target].target.platform == "gpu":
        return {}
    return offline_tpu.environment(target, listings=offline_tpu.NO_LISTINGS)


def published(model: str) -> DecoderConfig:
    """A model in bfloat16, by the name that `DecoderConfig` has for it.

    Raises:
      ValueError: it has none.
    """
    makes = isinstance(vars(DecoderConfig).get(model), classmethod) and model != "of_dict"
    if not makes:
        raise ValueError(f"offline.models: expected names of published models, such as llama3_8b, got {model!r}")
    return dataclasses.replace(getattr(DecoderConfig, model)(), dtype="bfloat16", param_dtype="bfloat16")


def compile_published(*, model: str, dump_dir: pathlib.Path, **case: Any) -> dict[str, Any]:
    """`compile_step` of a published model, by its name."""
    return compile_step(config=published(model), dump_dir=dump_dir, **case)


def compile_step(
    *,
    config: DecoderConfig,
    target: str,
    mesh: str,
    usable_bytes: int,
    reserve_bytes: int,
    laid_out_anew: bool,
    memory: Mapping[str, Any],
    kv_format: str,
    rows: int,
    max_model_len: int,
    ffn: tuple[str, ...],
    vocab: tuple[str, ...],
    replicate_kv_heads: bool,
    dump_dir: pathlib.Path,
) -> dict[str, Any]:
    """Plans how many blocks fit, compiles a step with them, and reads what the compiler says.

    Args:
      config: of the whole model.
      target: a name of `TOPOLOGIES`.
      mesh: such as `d1m8k1`, of its first devices.
      usable_bytes: of a device's memory.
      reserve_bytes: kept free for what a step computes.
      laid_out_anew: whether room is kept for a second copy of the layers' largest weights.
      memory: fields of `MemoryConfig`.
      kv_format: how keys and values are stored.
      rows: of a replica; each computes one token.
      max_model_len: tokens of the longest sequence, which has to fit.
      ffn: see `Rules`, as the next.
      vocab: see `Rules`.
      replicate_kv_heads: whether several devices may store the same KV head.
      dump_dir: where the compiler writes.

    Returns:
      What the memory of a device has to hold, whether it `fits`, and what is `missing`; if it fits by arithmetic also
      what was compiled.

    Raises:
      ValueError: the model cannot be split so, or a kernel refuses it.
    """
    jax_setup.configure()
    topology, shape, fmt = TOPOLOGIES[target], parse_mesh(mesh), scheme(kv_format)
    devices, rules = compiler(topology.target.platform).topology_devices(topology), Rules(tuple(ffn), tuple(vocab))
    on_mesh = make_mesh(shape, config.q_heads, config.kv_heads, replicate_kv_heads=replicate_kv_heads, devices=devices)
    weights = abstract_stacked(config, on_mesh, rules)
    weight_bytes = shard_bytes(weights)
    copied = (weights["layers"][part].get(name) for part in ("attention", "ffn") for name in _LAID_OUT_ANEW)
    copy_bytes = shard_bytes(list(copied)) if laid_out_anew else 0
    kv_shape = device_shape(config, shape, fmt, replicate_kv_heads)
    facts = {
        "devices": shape.size,
        "replicas": shape.data,
        "weight_bytes_per_device": weight_bytes,
        "usable_bytes": usable_bytes,
        "reserve_bytes": reserve_bytes + copy_bytes,
    }
    handed_out = MemoryConfig(**memory)
    budget = usable_bytes - weight_bytes - facts["reserve_bytes"]
    sequence = -(-blocks_for(max_model_len, handed_out.block_size) // shape.kv) * kv_shape.block_bytes(
        handed_out.block_size
    )
    if budget < sequence:
        whole = (weight_bytes + copy_bytes + sequence) * shape.model * shape.kv
        enough = -(-whole // (usable_bytes - reserve_bytes))
        return facts | {"fits": False, "missing": _missing(facts, sequence, enough, topology.target)}
    serving = Serving(
        kv_bytes=budget,
        memory=handed_out,
        rows=rows,
        max_model_len=max_model_len,
        token_budget=rows,
        kv_format=fmt,
        rules=rules,
        replicate_kv_heads=replicate_kv_heads,
        kernels=KERNELS[topology.target.platform],
    )
    server = make_server(config, shape, serving, devices)
    return facts | _compiled(server, config, topology.target, facts, dump_dir)


def shard_bytes(tree: Any) -> int:
    """Bytes that each device holds of arrays, of which shapes and places are known."""
    return sum(math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize for x in jax.tree.leaves(tree))


def _compiled(
    server: Server, config: DecoderConfig, target: Target, facts: Mapping[str, Any], dump_dir: pathlib.Path
) -> dict[str, Any]:
    sharded, memory = server.sharded, server.memory
    arguments = deep_arguments(sharded, config)
    with choices.recording() as chosen:
        compiled = compile_absent(decode_step(sharded, deep=True), arguments, target, donate_argnums=(1,))
    text = offline_tpu.operations(compiled, dump_dir) if target.platform == "tpu" else compiled.as_text()
    if text is None:
        raise ValueError("the compiler lists no operations of its program")
    found = read_collectives(text, trips=config.layers)
    needs = program_metrics(compiled, None)
    weights, cache, *batch = arguments
    pools = [pool for layer in cache.layers for pool in (layer.k, layer.v)]
    small = [*batch, *(layer.clipped for layer in cache.layers)]
    # A TPU hands out memory in tiles.
    tile = _TILE_BYTES if target.platform == "tpu" else 1
    rest = sum(-(-shard_bytes(array) // tile) * tile for array in small)
    total = sum(needs[f"{name}_bytes"] for name in ("argument", "output", "temp", "code")) - needs["alias_bytes"]
    block_bytes = server.device_shape.block_bytes(memory.block_size)
    kv_parts, kv_bytes = sharded.mesh.shape["kv"], shard_bytes(pools)
    blocks = (facts["usable_bytes"] - (total - kv_bytes)) // block_bytes * kv_parts
    # By name, as the decoder's sums may have the size of one of a merge.
    merges = [one for one in found if MERGE in one.where]
    expected_merges = dict.fromkeys(merge_exchanges(sharded), config.layers)
    differences = (
        _differences(expected_exchanges(sharded), totals(found)),
        _differences(expected_merges, totals(merges)),
    )
    kernels = [f"{op}: {', '.join(c['backend'] for c in chosen[op])}" for op in ("paged_attention", "kv_write")]
    sums = {kind: sum(one.given_bytes for one in found if one.kind == kind) for kind in ("all-reduce", "all-gather")}
    fits = total <= facts["usable_bytes"]
    return {
        "fits": fits,
        "missing": ""
        if fits
        else f"the compiler needs {_gb(total)} of the {_gb(facts['usable_bytes'])} that are there",
        "blocks": memory.num_blocks,
        "blocks_by_compiler": blocks,
        "blocks_deviation": abs(memory.num_blocks - blocks) / blocks if blocks > 0 else 1.0,
        "capacity_tokens": memory.capacity * sharded.replicas,
        "kv_bytes_per_device": kv_bytes,
        "predicted_kv_bytes_per_device": server.kv_bytes_per_device,
        "compiled_kv_bytes_per_device": needs["argument_bytes"] - facts["weight_bytes_per_device"] - rest,
        **{f"{name}_bytes": needs[f"{name}_bytes"] for name in ("argument", "output", "alias", "temp")},
        "total_bytes": total,
        "collectives_per_step": sum(one.times for one in found),
        "collective_bytes_per_step": sum(one.given_bytes for one in found),
        "all_reduce_bytes_per_step": sums["all-reduce"],
        "all_gather_bytes_per_step": sums["all-gather"],
        "merge_bytes_per_step": sum(one.given_bytes for one in merges),
        "unexpected_exchanges": "; to merge: ".join(filter(None, differences)),
        "kernel": "; ".join(kernels),
        "work": dataclasses.asdict(work_of(server, weights, found)),
    }


def _differences(expected: Mapping[tuple[str, int], int], found: Mapping[tuple[str, int], int]) -> str:
    """In words, what is exchanged otherwise than it has to be; nothing if nothing is."""
    return "; ".join(
        f"{kind} of {size:,} bytes {found.get((kind, size), 0)} times instead of {expected.get((kind, size), 0)}"
        for kind, size in sorted({*expected, *found})
        if expected.get((kind, size), 0) != found.get((kind, size), 0)
    )


def _missing(facts: Mapping[str, Any], sequence: int, enough: int, target: Target) -> str:
    """Why nothing fits, and how many devices would do."""
    weights, usable, reserve = (facts[name] for name in ("weight_bytes_per_device", "usable_bytes", "reserve_bytes"))
    lacking = weights + reserve + sequence - usable
    if weights > usable:
        why = f"weights of {_gb(weights)} exceed the {_gb(usable)} that a device has for everything"
    else:
        why = (
            f"weights of {_gb(weights)} leave {_gb(usable - weights)} of the {_gb(usable)} of a device, less than the "
            f"{_gb(reserve)} in reserve and the {_gb(sequence)} of the longest sequence"
        )
    return f"{why}: {_gb(lacking)} are missing; at least {enough} {target.name} devices would have to share a replica"


def _gb(size: float) -> str:
    return f"{size / 1e9:.2f} GB"
