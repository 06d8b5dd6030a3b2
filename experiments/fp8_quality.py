"""What a KV cache in 8 or 4 bits does to a trained model's next-token distributions, beside what it saves."""

import dataclasses
import itertools
import math
from collections.abc import Iterator, Sequence
from typing import Any

import polars as pl

from experiments import fp8_quality_figures, quality_evaluate, quality_greedy, quality_metrics, quality_passkey
from experiments.progress import Progress
from experiments.quality_capacity import capacity_of, running_requests
from experiments.quality_config import Config, all_schemes, cases, check
from experiments.quality_evaluate import Evaluation
from experiments.results import Results
from experiments.run_directory import RunDirectory
from experiments.workloads.config import load_workload, with_sha256
from paxkv.capacity import kv_budget, parse_size
from paxkv.kv_format import KVFormat, scheme

DESCRIPTION = "KV cache in FP8, INT8 and INT4: what it does to a trained model's distributions, and what it saves."
GLOSSARY = fp8_quality_figures.GLOSSARY
"""What each metric means, in a sentence."""
tables = fp8_quality_figures.tables
figures = fp8_quality_figures.figures

ORDER = ("bf16", "int8_token_head", "e4m3_token_head", "e4m3_layer", "e5m2_none")
"""Schemes by the damage they do, the least first."""
CLOSE = 0.03
"""How far the perplexity over a cache that is not quantised may be from that without a cache."""
_SOUND = ("f32", "bf16")


def parts(config: Config) -> list[str]:
    """Each case is evaluated, and can be resumed, by itself."""
    return [*(case.part for case in cases(config)), "reference", "capacity"]


def resolve(config: Config) -> Config:
    """Names model and texts by their hashes, so that the run's identity covers them; refuses what cannot run.

    Raises:
      ValueError: naming the field, what was expected and what came.
      OSError: a file is missing.
    """
    check(config)
    found = quality_evaluate.load(config)
    for factor in config.outlier_factors:
        found.with_outlier(factor)
    model = found.subject.decode.config
    for name in all_schemes(config):
        scheme(name).shape(model.layers, model.kv_heads, model.head_dim)
    for name in config.schemes:
        _capacity(config, found, scheme(name))
    texts = {name: dataclasses.replace(text, sha256=found.texts[name].sha256) for name, text in config.texts.items()}
    workload = with_sha256(config.workload)
    return dataclasses.replace(config, model_sha256=found.model_sha256, texts=texts, workload=workload)


def run(config: Config, run_dir: RunDirectory, progress: Progress) -> dict[str, dict[str, Any]]:
    """Reads all texts in every way and without a cache, counts what fits, and puts it together."""
    evaluation = quality_evaluate.load(config)
    run_dir.add_manifest(**evaluation.facts)
    with progress.task("cases", total=len(cases(config))) as advance:
        for case in cases(config):
            if run_dir.finished_part(case.part) is None:
                positions, found = evaluation.evaluate(case)
                with run_dir.part(case.part) as part:
                    part.write_parquet("positions", positions)
                    part.write_json("found", found)
                    for name, table in evaluation.generate(case).items():
                        part.write_parquet(name, table)
            advance(note=case.name)
    if run_dir.finished_part("reference") is None:
        with run_dir.part("reference") as part:
            part.write_parquet("dense", evaluation.dense())
            if config.passkey_contexts:
                part.write_parquet("passkey", evaluation.passkey(config.reference))
    if run_dir.finished_part("capacity") is None:
        with run_dir.part("capacity") as part:
            part.write_json("found", _capacities(config, evaluation))
    return _collect(config, evaluation, run_dir)


def _collect(config: Config, evaluation: Evaluation, run_dir: RunDirectory) -> dict[str, dict[str, Any]]:
    """Results from finished parts, and the tables that figures are drawn from."""
    reference = run_dir.require_part("reference")
    capacities = run_dir.require_part("capacity").read_json("found")
    results: dict[str, dict[str, Any]] = {
        "dense_f32": quality_metrics.summarise_losses(reference.read_parquet("dense"))
    }
    passkeys: dict[str, dict[str, Any]] = {}
    layers: list[dict[str, Any]] = []
    for case in cases(config):
        part = run_dir.require_part(case.part)
        found = part.read_json("found")
        errors = found.pop("attention_errors")
        layers += [{"case": case.name, "layer": i, "attention_error": error} for i, error in enumerate(errors)]
        results[case.name] = evaluation.summary(part.read_parquet("positions"), found, errors)
        results[case.name] |= capacities.get(case.name, {})
        if case.is_continued(config):
            results[case.name] |= quality_greedy.summarise(part.read_parquet("greedy"))
        if case.is_asked(config):
            told, expected = (folder.read_parquet("passkey") for folder in (part, reference))
            passkeys |= quality_passkey.summarise(case.scheme, told, expected)
    results |= passkeys
    run_dir.write_parquet("layers", pl.DataFrame(layers))
    _compare_with_dense(results, list(config.texts))
    _compare_keys_with_values(results)
    results = {name: values | _unmet(name, values, config.expected.get(name, {})) for name, values in results.items()}
    rows = [{"case": c.name, **c.labels, **_plain(results[c.name])} for c in cases(config)]
    run_dir.write_parquet("cases", pl.DataFrame(rows, infer_schema_length=None))
    if passkeys:
        run_dir.write_parquet("passkeys", pl.DataFrame(list(passkeys.values()), infer_schema_length=None))
    return results


def _capacity(config: Config, evaluation: Evaluation, fmt: KVFormat) -> Any:
    budget = kv_budget(parse_size(config.kv_memory, "kv_memory"), "1")
    return capacity_of(fmt, evaluation.subject.decode.config, config.block_size, budget, config.rows)


def _capacities(config: Config, evaluation: Evaluation) -> dict[str, dict[str, Any]]:
    """Bytes, blocks and running requests of every scheme; schemes of equal blocks are served once."""
    workload = load_workload(config.workload, config.max_model_len, config.seed)
    found = {name: _capacity(config, evaluation, scheme(name)) for name in config.schemes}
    running = {
        blocks: running_requests(
            blocks, config.block_size, workload, config.rows, config.max_model_len, config.token_budget
        )
        for blocks in sorted({capacity.blocks for capacity in found.values()})
    }
    return {name: capacity.as_dict() | running[capacity.blocks] for name, capacity in found.items()}


def _compare_with_dense(results: dict[str, dict[str, Any]], texts: Sequence[str]) -> None:
    """How much higher the perplexity of each scheme is than without a cache, as a share."""
    dense = results["dense_f32"]
    for name, found in results.items():
        for text in texts if "/" not in name and name != "dense_f32" else ():
            own = found[f"perplexity_{text}"]
            found[f"over_dense_{text}"] = None if own is None else own / dense[f"perplexity_{text}"] - 1


def _compare_keys_with_values(results: dict[str, dict[str, Any]]) -> None:
    """How many times the damage of quantising keys alone is that of values alone, beside that of keys alone."""
    for name in _keys_alone(results):
        keys, values = (results[n]["mean_kl"] for n in (name, f"{name[:-2]}_v"))
        results[name]["keys_over_values"] = keys / values if keys is not None and values else None


def _unmet(name: str, found: dict[str, Any], expected: dict[str, tuple[float, float]]) -> dict[str, str]:
    """Expectations that do not hold, as `<metric>_expected`."""
    unmet = {}
    for metric, (least, most) in expected.items():
        if metric not in found:
            raise ValueError(f"expected.{name}: expected metrics ({', '.join(found)}), got {metric!r}")
        value = found[metric]
        if value is None or not least <= value <= most:
            unmet[f"{metric}_expected"] = f"{least:g} to {most:g}"
    return unmet


def failed_checks(results: Results) -> list[str]:
    """What must hold for any model: no NaN, an outlier that f32 does not see, and the order of damage."""
    failures: list[str] = []
    for name, found in results.items():
        for metric in found:
            if name in _SOUND and metric.startswith("over_dense_") and not abs(_number(found, metric)) <= CLOSE:
                failures.append(
                    f"{name}: expected a perplexity within {CLOSE:.0%} of that without a cache, got {metric} = "
                    f"{_number(found, metric):.3g}"
                )
        if found.get("n_nan"):
            failures.append(f"{name}: {found['n_nan']} positions are NaN")
        if found.get("differing_logits"):
            failures.append(f"{name}: {found['differing_logits']} logits depend on the size of a block, and should not")
        if name.startswith("lambda_") and name.endswith("/f32") and found["kl_max"] != 0:
            failures.append(
                f"{name}: expected logits bit-identical to those without the outlier, got a KL of {found['kl_max']}"
            )
        for metric in found:
            if (expected := found.get(f"{metric}_expected")) is not None:
                failures.append(f"{name}: {metric} is {_number(found, metric):.3g}, expected {expected}")
    for less, more in _expected_order(results):
        below, above = (_number(results[name], "mean_kl") for name in (less, more))
        if not below < above:
            failures.append(f"{more}: mean KL is {above:.3g}, not above the {below:.3g} of {less}")
    return failures


def _expected_order(results: Results) -> Iterator[tuple[str, str]]:
    """Pairs of which the second does more damage: neighbours of `ORDER`, and keys above values."""
    yield from itertools.pairwise(name for name in ORDER if name in results)
    yield from ((f"{n[:-2]}_v", n) for n in _keys_alone(results))


def _keys_alone(results: Results) -> list[str]:
    """Schemes that quantise keys alone and have a fellow that does so with values."""
    return [n for n in results if "/" not in n and n.endswith("_k") and f"{n[:-2]}_v" in results]


def _number(found: Any, metric: str) -> float:
    return math.nan if found[metric] is None else float(found[metric])


def _plain(found: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in found.items() if not name.endswith("_expected")}
