"""What a run of `fp8_quality` shows: its tables, its figures, and what its metrics mean."""

import pathlib
from collections.abc import Mapping
from typing import Any

import polars as pl

from experiments import files, plots
from experiments.results import Results, Table

GLOSSARY: Mapping[str, str] = {
    "perplexity": "exp of the mean loss of the tokens that follow, over all windows of all texts",
    "delta_nll": "mean loss minus that of the reference on the same tokens, in nats",
    "delta_nll_se": "its standard error, from the means of the windows, which are independent where positions are not",
    "mean_kl": "mean over positions of KL(reference || scheme) over the whole vocabulary, in nats",
    "mean_kl_se": "its standard error, likewise",
    "kl_p99": "KL that one position in 100 exceeds",
    "kl_p999": "KL that one position in 1,000 exceeds",
    "kl_max": "the largest KL of any position",
    "top1_agreement": "share of positions at which the most likely token is the reference's",
    "rms_change": "root mean square change of the probability of the token that follows",
    "rms_top_change": "the same for the token that the reference finds most likely",
    "predictions": "positions that were compared",
    "n_nan": "of those, positions with a NaN among their logits; the other metrics leave them out",
    "clipped": "keys and values that were beyond what their scale reaches, and were clipped",
    "attention_error": "relative L2 error of a layer's attention output when only that layer stores in the scheme; "
    "mean over layers, on the first window of each text",
    "keys_over_values": "mean KL of quantising keys alone, as a multiple of that of values alone",
    "over_dense": "how much higher the perplexity of one text is than that of `dense_f32`, as a share; the latter is "
    "computed in float32 without any cache, window by window",
    "divergence_median": "tokens of a greedy continuation before the first one that is not the reference's, median "
    "over prompts; one that never parts counts as its length, so that the median is at least this",
    "never_diverged": "share of greedy continuations that are the reference's to their end",
    "divergence_gap": "how much larger the reference's best logit is than its second where a continuation parts, "
    "median: a near-tie parts at any rounding",
    "scheme": "that keys and values were stored in",
    "context": "tokens of a prompt in which pass keys are hidden",
    "keys": "pass keys that were asked for",
    "exact_match": "share of the keys of which every digit is the most likely token",
    "digit_logprob": "mean log-probability of a digit of a pass key in nats; -2.30 is a guess",
    "digit_logprob_change": "the same minus that of the reference on the same keys",
    "bytes_per_token": "keys, values and scales of all layers",
    "blocks": "blocks that `kv_memory` pays for",
    "blocks_per_bf16": "blocks for each one of bf16, exact: what the scales take is what is missing to 2 or 4",
    "peak_running": "most requests of the workload that ran at once in those blocks",
    "mean_running": "requests that ran, average over the time in which others were queueing",
    "preemptions": "how often a running request lost its blocks to another",
    "differing_logits": "logits of a window that are not bit for bit what they are with blocks of the usual size",
    "exact_match_se": "its standard error over keys",
    "digit_logprob_se": "its standard error over keys",
    "digit_logprob_change_se": "its standard error over keys",
    "texts": "what was read, with the beginnings of the texts' sha256",
}

Columns = Mapping[str, tuple[str, str]]  # heading and format by metric

_QUALITY: Columns = {
    "perplexity": ("perplexity", "{:.3f}"),
    "delta_nll": ("change of loss", "{:+.4f}"),
    "delta_nll_se": ("+-", "{:.4f}"),
    "mean_kl": ("mean KL", "{:.2e}"),
    "kl_p999": ("99.9 % KL", "{:.2e}"),
    "top1_agreement": ("same top", "{:.2%}"),
    "rms_change": ("RMS change", "{:.2%}"),
    "attention_error": ("attention", "{:.2%}"),
    "clipped": ("clipped", "{:,}"),
}
_OF_TEXT: Columns = {
    "perplexity": ("perplexity", "{:.3f}"),
    "over_dense": ("over float32", "{:+.2%}"),
    "mean_kl": ("mean KL", "{:.2e}"),
}
_GREEDY: Columns = {
    "divergence_median": ("median tokens", "{:.1f}"),
    "never_diverged": ("never part", "{:.0%}"),
    "divergence_gap": ("gap where they part", "{:.3f}"),
}
_PASSKEY: Columns = {
    "exact_match": ("told", "{:.0%}"),
    "exact_match_se": ("+-", "{:.0%}"),
    "digit_logprob": ("log-prob. of a digit", "{:.3f}"),
    "digit_logprob_se": ("+-", "{:.3f}"),
    "digit_logprob_change": ("change", "{:+.4f}"),
    "digit_logprob_change_se": ("+-", "{:.4f}"),
}
_CAPACITY: Columns = {
    "bytes_per_token": ("bytes a token", "{:,.1f}"),
    "blocks": ("blocks", "{:,}"),
    "blocks_per_bf16": ("for one of bf16", "{}"),
    "peak_running": ("peak requests", "{:,}"),
    "mean_running": ("on average", "{:.1f}"),
}


def tables(results: Results) -> list[Table]:
    """Quality by scheme and by text, what is generated, outliers, block sizes, and what each scheme saves."""
    plain = {name: found for name, found in results.items() if "/" not in name}
    outliers = {name: found for name, found in results.items() if name.startswith("lambda_")}
    passkeys = {name: found for name, found in results.items() if name.startswith("passkey_")}
    blocks = {name: found for name, found in results.items() if name.startswith("block_") and "mean_kl" in found}
    names = [metric.removeprefix("mean_kl_") for found in plain.values() for metric in found]
    texts = [name for name in dict.fromkeys(names) if f"perplexity_{name}" in next(iter(plain.values()), {})]
    by_text: Columns = {
        f"{metric}_{text}": (f"{heading}, {text}", form)
        for text in texts
        for metric, (heading, form) in _OF_TEXT.items()
    }
    shown = [
        (plain, _QUALITY, "What storing keys and values in another way does to a model"),
        (plain, by_text, "By text"),
        (plain, _GREEDY, "How far greedy continuations go before they part from the reference's"),
        (passkeys, _PASSKEY, "Pass keys told at the end of a context"),
        (outliers, _QUALITY, "With an outlier in the keys that changes nothing else"),
        (blocks, _QUALITY, "In blocks of another size"),
        (plain, _CAPACITY, "What fits into equal bytes"),
    ]
    made = (_table(found, columns, title) for found, columns, title in shown)
    return [table for table in made if table.rows]


def _table(results: Results, columns: Columns, title: str) -> Table:
    """A row for every result that has any of the metrics."""
    rows = [
        [name, *("-" if found.get(m) is None else form.format(found[m]) for m, (_, form) in columns.items())]
        for name, found in results.items()
        if columns.keys() & found.keys()
    ]
    return Table(["", *(heading for heading, _ in columns.values())], rows, title)


def figures(run_path: pathlib.Path) -> list[plots.Figure]:
    """Damage by scheme, text, outlier, layer and length of context, and beside what it saves.

    Args:
      run_path: directory of a finished run; nothing else is read.
    """
    cases = files.read_parquet(run_path / "cases.parquet")
    layers = files.read_parquet(run_path / "layers.parquet")
    passkeys = run_path / "passkeys.parquet"
    plain = cases.filter((pl.col("factor") == 1) & pl.col("block_size").is_null() & (pl.col("mean_kl") > 0))
    texts = [name.removeprefix("perplexity_") for name in cases.columns if name.startswith("perplexity_")]
    outliers = cases.filter((pl.col("factor") != 1) & (pl.col("mean_kl") > 0))
    return [
        _damage(plain),
        _by_text(plain, texts),
        *([_outliers(plain, outliers)] if len(outliers) else []),
        _layers(layers.filter(pl.col("case").is_in(plain["case"].to_list()) & (pl.col("attention_error") > 0))),
        *([_passkeys(files.read_parquet(passkeys))] if passkeys.exists() else []),
        _trade(plain),
    ]


def _damage(plain: pl.DataFrame) -> plots.Figure:
    figure, axes = plots.canvas(height=0.8 + 0.26 * len(plain))
    axes.barh(plain["case"], plain["mean_kl"], xerr=plain["mean_kl_se"].fill_null(0), ecolor=plots.INK, height=0.68)
    axes.set_xscale("log")
    axes.invert_yaxis()
    axes.grid(axis="y", visible=False)
    axes.set_xlabel("mean KL from the reference in nats")
    return plots.Figure(
        "Damage by scheme",
        "How far next-token distributions move, with the standard error over windows. Keys carry most of the damage.",
        figure,
    )


def _by_text(plain: pl.DataFrame, texts: list[str]) -> plots.Figure:
    figure, axes = plots.canvas(height=0.8 + 0.26 * len(plain))
    for place, text in enumerate(texts):
        axes.plot(
            plain[f"mean_kl_{text}"], plain["case"], linestyle="none", marker="osD^v"[place % 5], label=text,
            color=plots.PALETTE[place % len(plots.PALETTE)],
        )  # fmt: skip
    axes.set_xscale("log")
    axes.invert_yaxis()
    axes.set_xlabel("mean KL from the reference in nats")
    plots.legend(axes)
    return plots.Figure("Damage by text", "One kind of text alone would mislead: the damage depends on it.", figure)


def _outliers(plain: pl.DataFrame, outliers: pl.DataFrame) -> plots.Figure:
    names = outliers["scheme"].unique(maintain_order=True).to_list()
    figure, axes = plots.canvas()
    for name, style in plots.memory_styles(names).items():
        own = pl.concat([plain.filter(pl.col("case") == name), outliers.filter(pl.col("scheme") == name)]).sort(
            "factor"
        )
        axes.plot(own["factor"], own["mean_kl"], marker="o", **style)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xlabel("factor of one RoPE pair of the keys")
    axes.set_ylabel("mean KL in nats")
    plots.legend(axes)
    return plots.Figure(
        "An outlier in the keys",
        "The model computes the same with every factor. Integers need fine scales to bear it; what FP8 has is range.",
        figure,
    )


def _layers(layers: pl.DataFrame) -> plots.Figure:
    figure, axes = plots.canvas()
    for name, style in plots.memory_styles(layers["case"].unique(maintain_order=True)).items():
        own = layers.filter(pl.col("case") == name)
        axes.plot(own["layer"], own["attention_error"], marker=".", **style)
    axes.set_yscale("log")
    axes.set_xlabel("layer")
    axes.set_ylabel("relative error of\nattention's output")
    plots.legend(axes)
    return plots.Figure(
        "Error by layer",
        "Each layer by itself, given what it would get without the scheme: errors do not add up.",
        figure,
    )


def _passkeys(passkeys: pl.DataFrame) -> plots.Figure:
    figure, axes = plots.canvas()
    for name, style in plots.memory_styles(passkeys["scheme"].unique(maintain_order=True)).items():
        own = passkeys.filter(pl.col("scheme") == name).sort("context")
        axes.errorbar(
            own["context"], own["digit_logprob"], yerr=own["digit_logprob_se"].fill_null(0), marker="o", capsize=2,
            **style,
        )  # fmt: skip
    axes.set_xscale("log", base=2)
    axes.set_xlabel("tokens of the context")
    axes.set_ylabel("mean log-probability\nof a pass key's digit")
    plots.legend(axes)
    return plots.Figure(
        "Pass keys against context length",
        "Keys hidden at several depths are asked for at the end; bars are standard errors over keys. A guess has -2.3.",
        figure,
    )


def _trade(plain: pl.DataFrame) -> plots.Figure:
    figure, axes = plots.canvas()
    axes.plot(plain["bytes_per_token"], plain["mean_kl"], linestyle="none", marker="o")
    for row in plain.iter_rows(named=True):
        at: Any = (row["bytes_per_token"], row["mean_kl"])
        axes.annotate(row["case"], at, xytext=(4, 2), textcoords="offset points", fontsize=7.5)
    axes.set_yscale("log")
    axes.set_xlabel("bytes of a token's keys, values and scales")
    axes.set_ylabel("mean KL in nats")
    return plots.Figure("Bytes against damage", "Lower left is better: little memory, little damage.", figure)
