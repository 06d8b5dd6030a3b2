"""The same requests and the same memory on each device, under every way of splitting a server over devices."""

import dataclasses
import math
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import polars as pl

from experiments import jax_setup, metrics, plots, sharded_figures, sharded_offline
from experiments.collectives import read_collectives
from experiments.disaggregated_serve import Side, serve_pair
from experiments.inputs import Inputs, load_inputs, uncalibrated_format
from experiments.lifeline import agreed
from experiments.progress import Advance, Progress
from experiments.results import Results, Table, columns
from experiments.run_directory import RunDirectory
from experiments.sharded_config import Config
from experiments.sharded_serve import serve
from experiments.sharded_setup import Server, Serving, device_bytes, make_server, parse_mesh, part_of
from experiments.sharded_step import batch_of, decode_step
from experiments.token_check import compare_tokens
from experiments.workloads.config import with_sha256
from models.split import place_weights
from paxkv.capacity import parse_size
from paxkv.disaggregated import check_pair
from paxkv.kv_format import scheme
from paxkv.requests import Requests, make_requests
from paxkv.sharding import Rules
from paxkv.sizes import require_int
from paxkv.split_paged import MERGE

DESCRIPTION = "A server split over devices: replicas, KV heads and KV blocks, on the same requests."
MODELLED = metrics.MODELLED | sharded_offline.MODELLED | {"link_ms_mean"}
GLOSSARY: Mapping[str, str] = {
    **metrics.GLOSSARY,
    "devices": "of the mesh: replicas (d) times parts of the heads (m) times parts of the blocks (k)",
    "tokens_equal": "whether every request got the tokens that the first mesh gave it, near ties aside; - if there "
    "are none to compare",
    "blocks": "of one replica, over all its devices",
    "capacity_tokens": "tokens that all replicas hold together",
    "kv_bytes_per_device": "keys, values and scales that lie on the fullest device",
    "weight_bytes_per_device": "weights on the fullest device",
    "collectives_per_step": "exchanges between devices in one decode step",
    "collective_bytes_per_step": "what each device gives into them",
    "merge_bytes_per_step": "of that, to merge the attention of devices that share blocks",
    "moved_blocks": "blocks that went from the server that reads prompts to the one that answers",
    "blocks_there": "blocks of prompts that did not have to move, as they were there",
    "moved_bytes": "keys, values and scales of the blocks that moved",
    "link_ms_mean": "mean time of a request's blocks on the link between the two servers",
    **sharded_offline.GLOSSARY,
    "fits": "whether keys and values lie within `kv_memory` on every device; of what is compiled, whether all that the "
    "step needs lies within the device's memory, with room for a sequence of `max_model_len`",
    "wall_step_ms": "median time of a step on this machine, whose devices may share its cores",
    "host_share": "of steps that only decode: share of their time on this machine in which the devices waited for the "
    "host; what is compiled is not among it",
}


def parts(config: Config) -> list[str]:
    """Each mesh, or pair, is served or compiled, and can be resumed, by itself."""
    if config.offline is not None:
        return [case.part for case in sharded_offline.cases(config)]
    return [*config.meshes, *map(part_of, config.pairs)]


def resolve(config: Config) -> Config:
    """Names model and trace by their hashes; refuses what cannot run.

    Raises:
      ValueError: a value is out of range, a mesh does not suit the model or the devices, or nothing fits.
      OSError: a file is missing.
    """
    require_int("steps_per_dispatch", config.steps_per_dispatch)
    if not config.meshes or len(set(config.meshes)) < len(config.meshes):
        raise ValueError(f"meshes: expected at least one, and none twice, got {list(config.meshes)}")
    if config.offline is not None:
        sharded_offline.check(config)
        return config
    _check(config)
    jax_setup.use_cpu_devices(require_int("cpu_devices", config.cpu_devices))
    inputs = _inputs(config)
    for name in config.meshes:
        _server(config, inputs, name)
    for pair in config.pairs:
        try:
            reads, answers = _pair(config, inputs, pair)
            check_pair(reads.sharded, answers.sharded)
        except ValueError as error:
            raise ValueError(f"pairs: {pair}: {error}") from error
    return dataclasses.replace(config, model_sha256=inputs.facts["model_sha256"], workload=with_sha256(config.workload))


def _check(config: Config) -> None:
    """Refuses numbers and pairs with which nothing can be served."""
    for name, least in (("temperature", 0.0), ("near_tie", 0.0)):
        if not least <= getattr(config, name) < math.inf:
            raise ValueError(f"{name}: expected a finite number, 0 or more, got {getattr(config, name)}")
    for name in ("link_bytes_per_s", "process_time_limit_s"):
        if not 0 < getattr(config, name) < math.inf:
            raise ValueError(f"{name}: expected a finite number above 0, got {getattr(config, name)}")
    if config.max_host_share is not None and not 0 <= config.max_host_share <= 1:
        raise ValueError(f"max_host_share: expected a share from 0 to 1, or null, got {config.max_host_share}")
    if len(set(config.pairs)) < len(config.pairs):
        raise ValueError(f"pairs: expected none twice, got {list(config.pairs)}")
    if config.pairs and config.temperature > 0:
        raise ValueError(f"temperature: expected 0 where pairs serve, which answer greedily, got {config.temperature}")


def run(config: Config, run_dir: RunDirectory, progress: Progress) -> dict[str, dict[str, Any]]:
    """Serves the workload on each mesh in turn, then compares what they did; or compiles a step for each."""
    if config.offline is not None:
        return sharded_offline.run(config, run_dir, progress)
    inputs = _inputs(config)
    run_dir.add_manifest(**inputs.facts, devices=[str(device) for device in jax.devices()])
    requests = make_requests(
        inputs.prompts,
        inputs.workload.prompt_len,
        inputs.workload.output_len,
        inputs.workload.arrival_ms,
        seed=config.seed,
        temperature=config.temperature,
    )
    finished = agreed([run_dir.finished_part(name) is not None for name in config.meshes])
    for name in (name for name, done in zip(config.meshes, finished, strict=True) if not done):
        server = _server(config, inputs, name)
        params = place_weights(inputs.params, server.sharded.mesh, server.sharded.rules)
        with progress.task(name, total=inputs.workload.num_requests) as advance:
            served = serve(server, params, requests, inputs.workload, config.steps_per_dispatch, advance)
        with run_dir.part(name) as part:
            part.write_parquet("steps.parquet", served.steps)
            part.write_parquet("requests.parquet", served.requests)
            facts = _device_facts(server, params, served.state.cache)
            part.write_json("devices.json", facts | {"wall_compile_s": served.wall_compile_s})
    for pair in config.pairs:
        if run_dir.finished_part(part_of(pair)) is None:
            with progress.task(pair, total=inputs.workload.num_requests) as advance:
                _serve_pair(config, inputs, requests, pair, run_dir, advance)
    if jax.process_index() > 0:
        return {}  # the first process has what was finished before
    for table in ("steps", "requests"):
        frames = [
            run_dir.require_part(part_of(name))
            .read_parquet(f"{table}.parquet")
            .select(pl.lit(name).alias("mesh"), pl.all())
            for name in (*config.meshes, *config.pairs)
        ]
        run_dir.write_parquet(f"{table}.parquet", pl.concat(frames))
    return _results(config, run_dir)


def _pair(config: Config, inputs: Inputs, pair: str) -> tuple[Server, Server]:
    """The two servers of a pair, on devices of their own."""
    names = pair.split("+")
    if len(names) != 2:
        raise ValueError(f"expected two meshes with a + between, such as d1m2k1+d1m4k1, got {pair!r}")
    if jax.process_count() > 1:
        raise ValueError(f"expected no pairs with several processes, got {jax.process_count()} processes")
    first = parse_mesh(names[0]).size
    return _server(config, inputs, names[0]), _server(config, inputs, names[1], jax.devices()[first:])


def _serve_pair(
    config: Config, inputs: Inputs, requests: Requests, pair: str, run_dir: RunDirectory, advance: Advance
) -> None:
    reads, answers = (
        Side(server, place_weights(inputs.params, server.sharded.mesh, server.sharded.rules))
        for server in _pair(config, inputs, pair)
    )
    rate = config.link_bytes_per_s
    served = serve_pair(reads, answers, requests, inputs.workload, rate, config.steps_per_dispatch, advance)
    with run_dir.part(part_of(pair)) as part:
        part.write_parquet("steps.parquet", served.steps)
        part.write_parquet("requests.parquet", served.requests)
        part.write_parquet("moves.parquet", served.moves)
        facts = _device_facts(answers.server, answers.params, served.state.cache)
        facts["devices"] += reads.server.sharded.mesh.size
        moves = {"moved_blocks": "blocks", "blocks_there": "there", "moved_bytes": "bytes"}
        facts |= {name: int(served.moves[column].sum()) for name, column in moves.items()}
        facts["link_ms_mean"] = served.moves["link_ms"].mean() if len(served.moves) else None
        part.write_json("devices.json", facts)


def _inputs(config: Config) -> Inputs:
    fmt = uncalibrated_format(config.kv_format)
    return load_inputs(config.model, config.model_sha256, config.workload, config.max_model_len, config.seed, fmt)


def _server(config: Config, inputs: Inputs, mesh: str, devices: Sequence[Any] | None = None) -> Server:
    serving = Serving(
        kv_bytes=parse_size(config.kv_memory, "kv_memory"),
        memory=config.memory,
        rows=config.rows,
        max_model_len=config.max_model_len,
        token_budget=config.token_budget,
        kv_format=scheme(config.kv_format),
        rules=Rules(config.ffn, config.vocab),
        dealing=config.dealing,
        replicate_kv_heads=config.replicate_kv_heads,
        policy=config.policy,
        cost=config.cost,
        kernels=config.kernels,
    )
    shape = parse_mesh(mesh)
    if jax.process_count() > 1 and shape.size != jax.device_count():
        raise ValueError(
            f"{mesh}: expected {jax.device_count()} devices, all that {jax.process_count()} processes have, got "
            f"{shape.size}"
        )
    try:
        return make_server(inputs.decode.config, shape, serving, devices)
    except ValueError as error:
        raise ValueError(f"{mesh}: {error}") from error


def _device_facts(server: Server, params: Any, cache: Any) -> dict[str, Any]:
    """What lies on a device, and what devices exchange in a decode step."""
    memory = server.memory
    batch = [jnp.zeros(x.shape, x.dtype) for x in batch_of(memory)]
    compiled = jax.jit(decode_step(server.sharded), donate_argnums=1).lower(params, cache, *batch).compile()
    found = read_collectives(compiled.as_text() or "")
    counters = sum(layer.clipped.addressable_shards[0].data.nbytes for layer in cache.layers)
    return {
        "devices": server.sharded.mesh.size,
        "replicas": server.sharded.replicas,
        "blocks": memory.num_blocks,
        "capacity_tokens": memory.capacity * server.sharded.replicas,
        "kv_bytes_per_device": device_bytes(cache) - counters,
        "predicted_kv_bytes_per_device": server.kv_bytes_per_device,
        "weight_bytes_per_device": device_bytes(params),
        "collectives_per_step": sum(one.times for one in found),
        "collective_bytes_per_step": sum(one.given_bytes for one in found),
        "merge_bytes_per_step": sum(one.given_bytes for one in found if MERGE in one.where),
    }


def _results(config: Config, run_dir: RunDirectory) -> dict[str, dict[str, Any]]:
    steps, requests = run_dir.read_parquet("steps.parquet"), run_dir.read_parquet("requests.parquet")
    budget = parse_size(config.kv_memory, "kv_memory")
    reference = requests.filter(pl.col("mesh") == config.meshes[0])
    compared = metrics.served_by_all(requests)
    found: dict[str, dict[str, Any]] = {}
    for name in (*config.meshes, *config.pairs):
        facts = run_dir.require_part(part_of(name)).read_json("devices.json")
        own, own_steps = requests.filter(pl.col("mesh") == name), steps.filter(pl.col("mesh") == name)
        served = ~reference["reason"].str.starts_with("refused") & ~own["reason"].str.starts_with("refused")
        ours, theirs = own.filter(served), reference.filter(served)
        same = compare_tokens(theirs, ours, config.near_tie)
        any_tokens = any(bool((table["generated"] > 0).any()) for table in (ours, theirs))
        busy = own_steps.filter(pl.col("new_tokens") > 0)
        found[name] = {
            **facts,
            "fits": facts["kv_bytes_per_device"] <= budget,
            "tokens_equal": same.unexplained == 0 if any_tokens else None,
            "near_tie_differences": same.near_ties,
            "unexplained_differences": same.unexplained,
            "peak_running": int(own_steps.group_by("step").agg(pl.col("running").sum())["running"].max()),  # pyright: ignore
            "steps": len(busy),
            "hit_tokens": int(busy["hit_tokens"].sum()),
            "wall_step_ms": busy["wall_ms"].median(),
            "host_share": _host_share(busy.filter(pl.col("prefill_tokens") == 0)),
            "max_host_share": config.max_host_share,
            **metrics.request_metrics(own, compared.filter(pl.col("mesh") == name)),
        }
    return found


def _host_share(steps: pl.DataFrame) -> float | None:
    host_ms, devices_ms = (float(steps[name].sum()) for name in ("host_ms", "wall_ms"))
    return host_ms / (host_ms + devices_ms) if len(steps) else None


def failed_checks(results: Results) -> list[str]:
    """What every run must show, whatever the workload."""
    if _compiled(results):
        return sharded_offline.failed_checks(results)
    failures = [
        f"{name}: {values['unexplained_differences']} requests got other tokens than on {next(iter(results))}"
        for name, values in results.items()
        if values["tokens_equal"] is False
    ]
    for name, values in results.items():
        predicted, held = values["predicted_kv_bytes_per_device"], values["kv_bytes_per_device"]
        if predicted != held:
            failures.append(f"{name}: a device holds {held} bytes of keys and values instead of {predicted}")
        if not values["fits"]:
            failures.append(f"{name}: keys and values of a device exceed kv_memory")
        share, limit = values["host_share"], values["max_host_share"]
        if isinstance(limit, float) and not (isinstance(share, float) and share <= limit):
            failures.append(f"{name}: host_share is {share}, more than max_host_share = {limit}")
    return failures


def _compiled(results: Results) -> bool:
    return bool(results) and all("target" in values for values in results.values())


_ROWS = {
    "devices": ("devices", "{:,}"),
    "blocks": ("blocks of a replica", "{:,}"),
    "capacity_tokens": ("capacity in tokens", "{:,}"),
    "kv_bytes_per_device": ("KV bytes of a device", "{:,}"),
    "weight_bytes_per_device": ("weight bytes of a device", "{:,}"),
    "collectives_per_step": ("exchanges in a decode step", "{:,}"),
    "collective_bytes_per_step": ("bytes given into them", "{:,}"),
    "merge_bytes_per_step": ("of that, to merge attention", "{:,}"),
    "served": ("requests served", "{:,}"),
    "peak_running": ("peak running requests", "{:,}"),
    "preemptions": ("preemptions", "{:,}"),
    "steps": ("steps of all replicas", "{:,}"),
    "ttft_ms_p50": ("TTFT p50, ms (modelled)", "{:,.0f}"),
    "tpot_ms_p50": ("TPOT p50, ms (modelled)", "{:.2f}"),
    "output_tokens_per_s": ("tokens per s (modelled)", "{:,.0f}"),
    "moved_blocks": ("blocks moved", "{:,}"),
    "blocks_there": ("blocks there already", "{:,}"),
    "moved_bytes": ("bytes moved", "{:,}"),
    "link_ms_mean": ("on the link, ms (modelled)", "{:,.3f}"),
    "wall_step_ms": ("step here, ms", "{:,.1f}"),
    "host_share": ("of a decode step, on the host", "{:.1%}"),
    "fits": ("fits", "{}"),
    "tokens_equal": ("same tokens", "{}"),
}


def tables(results: Results) -> list[Table]:
    """A column for each mesh; of what is compiled, a line."""
    if _compiled(results):
        return sharded_offline.tables(results)
    shown = {m: row for m, row in _ROWS.items() if any(m in values for values in results.values())}
    return [columns(results, shown, "The same requests, and the same memory on each device, on each mesh")]


def figures(run_path: pathlib.Path) -> list[plots.Figure]:
    """Capacity and exchange by mesh, and requests over time; of what is compiled, how it scales.

    Args:
      run_path: directory of a finished run; nothing else is read.
    """
    if (run_path / "compiled.json").exists():
        return sharded_figures.scaling(run_path)
    return sharded_figures.served(run_path)
