"""What a run of `prefix_sharing` shows: its tables, its figures, and what its metrics mean."""

import pathlib
from collections.abc import Mapping

import matplotlib.ticker
import polars as pl

from experiments import files, plots
from experiments.results import Results, Table

GLOSSARY: Mapping[str, str] = {
    "requests": "Prompts, in order of arrival.",
    "tokens": "Tokens of all prompts.",
    "hit_tokens": "Tokens whose keys and values were in the cache, so that they were not computed.",
    "token_hit_rate": "hit_tokens / tokens.",
    "recent_token_hit_rate": "token_hit_rate of the last 100 prompts: what the cache gives once it has filled.",
    "blocks": "Whole blocks of all prompts; what is left of a prompt is never shared.",
    "blocks_saved": "Blocks that were in the cache when a prompt asked for them, so that it took no new one.",
    "block_hit_rate": "blocks_saved / blocks.",
    "optimal_blocks_saved": "Most blocks that a cache of this size can save, for one that knows the future (Belady).",
    "optimal_block_hit_rate": "optimal_blocks_saved / blocks.",
    "miscounted_requests": "Prompts whose hits differ from a plain count of what a cache that forgets nothing holds.",
    "evictions": "Cached blocks that made way for others.",
    "cache_blocks": "Blocks of the pool. A cache without bound has as many as if nothing were shared.",
    "peak_blocks_held": "Most blocks in use by prompts at a time.",
    "peak_blocks_saved": "Most blocks that the prompts held at one time would have needed more without sharing.",
    "peak_bytes_saved": "peak_blocks_saved in bytes of the model's keys and values.",
    "shared_blocks": "Blocks that more than one prompt holds when the last one has been stored.",
    "most_sharers": "Prompts that hold the same block then.",
    "missed_below_block": "Tokens not hit as they lie in the last block of a prompt, which they do not fill.",
    "missed_last_token": "Tokens not hit though cached: their block holds the last token, which is always computed.",
    "missed_alignment": "Tokens not hit though cached, as groups of layers agree on a shorter prefix only.",
    "missed_hole": "Tokens not hit though cached, as a block before theirs is not.",
    "missed_evicted": "Tokens not hit as their block made way for another.",
    "missed_other_key": "Tokens not hit as they were cached for another adapter or salt; here all have the same.",
    "missed_cold": "Tokens not hit as they were never cached, or so long ago that the cache does not remember.",
}

REASONS = {
    "missed_cold": "never cached",
    "missed_evicted": "evicted",
    "missed_hole": "behind a hole",
    "missed_below_block": "below a block",
    "missed_last_token": "last token",
    "missed_alignment": "alignment",
    "missed_other_key": "other key",
}
STYLES = plots.memory_styles(("lru", "lfu", "fifo", "priority"))
GREY = "#999999"


def tables(results: Results) -> list[Table]:
    """A line a configuration; why tokens were not hit, if asked for; what prompts that were held together shared."""
    rows = [
        [
            name,
            f"{found['cache_blocks']:,}",
            f"{found['block_hit_rate']:.2%}",
            f"{found['optimal_block_hit_rate']:.2%}",
            f"{found['token_hit_rate']:.2%}",
            f"{found['blocks_saved']:,}",
            f"{found['blocks']:,}",
            f"{found['evictions']:,}",
        ]
        for name, found in results.items()
    ]
    headings = ("cache", "blocks", "block hit rate", "optimum", "token hit rate", "blocks saved", "of", "evictions")
    found = [Table(headings, rows, "Prompts found in the prefix cache")]
    # Not those that no configuration has: a cache of one model has no other keys, for one.
    reasons = [metric for metric in REASONS if any(values.get(metric) for values in results.values())]
    if reasons:
        shares = [[name, *(f"{_share(values, metric):.2%}" for metric in reasons)] for name, values in results.items()]
        headings = ("cache", *(REASONS[metric] for metric in reasons))
        found.append(Table(headings, shares, "Tokens not found in the prefix cache, by reason, of all tokens"))
    together = [[name, *_held_together(values)] for name, values in results.items() if values["shared_blocks"]]
    if together:
        headings = ("cache", "shared blocks", "blocks in use", "without sharing", "saved", "saved, GiB")
        found.append(Table(headings, together, "Held at one time"))
    return found


def _share(found: Mapping[str, object], metric: str) -> float:
    return int(str(found[metric])) / int(str(found["tokens"]))


def _held_together(found: Mapping[str, object]) -> list[str]:
    shared, sharers, held, saved, saved_bytes = (
        int(str(found[metric]))
        for metric in ("shared_blocks", "most_sharers", "peak_blocks_held", "peak_blocks_saved", "peak_bytes_saved")
    )
    return [
        # Exactly so many times if all of the saving is theirs.
        f"{shared:,} stored once instead of {'' if shared * (sharers - 1) == saved else 'up to '}{sharers} times",
        f"{held:,}",
        f"{held + saved:,}",
        f"{saved:,}",
        f"{saved_bytes / 2**30:.2f}",
    ]


def figures(run_path: pathlib.Path) -> list[plots.Figure]:
    """Hit rate over cache size and by block size, where there are several, and blocks stored against blocks asked."""
    caches = files.read_parquet(run_path / "caches.parquet")
    prompts = files.read_parquet(run_path / "prompts.parquet")
    found: list[plots.Figure] = []
    if caches["cache_tokens"].n_unique() > 2:
        found.append(_by_cache_size(caches))
    if caches["block_size"].n_unique() > 1:
        found.append(_by_block_size(caches))
    return [*found, _stored(caches, prompts)]


def _by_cache_size(caches: pl.DataFrame) -> plots.Figure:
    block_sizes = caches["block_size"].unique().sort().to_list()
    columns = min(2, len(block_sizes))
    figure, grid = plots.canvas(
        -(-len(block_sizes) // columns), columns, height=2.9, sharex=True, sharey=True, squeeze=False
    )
    sizes = caches["cache_tokens"].drop_nulls().unique().sort().to_list()
    for axes, block_size in zip(grid.flat, block_sizes, strict=False):
        own = caches.filter(pl.col("block_size") == block_size).sort("cache_tokens")
        finite = own.filter(pl.col("cache_tokens").is_not_null())
        for eviction, style in STYLES.items():
            line = finite.filter(pl.col("eviction") == eviction)
            if len(line):
                axes.plot(line["cache_tokens"], line["block_hit_rate"], marker="o", markersize=3.5, **style)
        best = finite.unique("cache_tokens", keep="first", maintain_order=True)
        axes.plot(best["cache_tokens"], best["optimal_block_hit_rate"], color=plots.INK, linestyle=":", label="optimum")
        for rate in own.filter(pl.col("cache_tokens").is_null())["block_hit_rate"]:
            axes.axhline(rate, color=GREY, linewidth=1, label="without bound")
        axes.set_title(f"blocks of {block_size}")
        axes.set_xscale("log")
        axes.set_xticks(sizes, [_size(size) for size in sizes])
        axes.minorticks_off()
        axes.set_ylim(bottom=0)
        axes.yaxis.set_major_formatter(matplotlib.ticker.PercentFormatter(1.0, decimals=0))
    for axes in grid[-1]:
        axes.set_xlabel("cache size in tokens")
    for axes in grid[:, 0]:
        axes.set_ylabel("block hit rate")
    for axes in list(grid.flat)[len(block_sizes) :]:
        axes.set_visible(False)
    figure.legend(*grid[0, 0].get_legend_handles_labels(), loc="outside upper left", ncols=6)
    return plots.Figure(
        "Hit rate over cache size",
        "No policy can rise above the optimum of its size, which knows the future.",
        figure,
    )


def _by_block_size(caches: pl.DataFrame) -> plots.Figure:
    """Groups of bars; of the finite sizes the smallest, where policies differ most."""
    smallest = caches["cache_tokens"].min()
    bars = {
        **{
            eviction: (
                style["color"],
                caches.filter(pl.col("eviction") == eviction, pl.col("cache_tokens") == smallest),
            )
            for eviction, style in STYLES.items()
            if smallest is not None
        },
        "without bound": (GREY, caches.filter(pl.col("cache_tokens").is_null())),
    }
    bars = {label: (color, shown) for label, (color, shown) in bars.items() if len(shown)}
    sizes = caches["block_size"].unique().sort().to_list()
    figure, axes = plots.canvas(height=2.9)
    width = 0.8 / len(bars)
    for index, (label, (color, shown)) in enumerate(bars.items()):
        at = [sizes.index(size) - 0.4 + width * (index + 0.5) for size in shown["block_size"]]
        axes.bar(at, shown["token_hit_rate"], width=0.92 * width, color=color, label=label)
    axes.set_xticks(range(len(sizes)), [str(size) for size in sizes])
    axes.grid(axis="x", visible=False)
    axes.set_xlabel("block size in tokens")
    axes.set_ylabel("token hit rate")
    axes.yaxis.set_major_formatter(matplotlib.ticker.PercentFormatter(1.0, decimals=0))
    plots.legend(axes)
    words = "" if smallest is None else f" Bars of a policy are of a cache of {smallest:,} tokens."
    return plots.Figure(
        "Hit rate by block size",
        f"Only whole blocks are shared, so that a large one loses more of where two prompts part.{words}",
        figure,
    )


def _stored(caches: pl.DataFrame, prompts: pl.DataFrame) -> plots.Figure:
    """One line a cache size, of the first block size and the first policy that it has."""
    first = caches.row(0, named=True)
    chosen = caches.filter(
        pl.col("block_size") == first["block_size"],
        (pl.col("eviction") == first["eviction"]) | pl.col("cache_tokens").is_null(),
    )
    labels = {
        name: "without bound" if size is None else f"{_size(size)} tokens"
        for name, size in chosen.select("cache", "cache_tokens").iter_rows()
    }
    figure, axes = plots.canvas(height=3.4)
    most = 0
    for (name, label), style in zip(labels.items(), plots.memory_styles(labels.values()).values(), strict=True):
        own = prompts.filter(pl.col("cache") == name)
        asked, stored = (
            pl.concat([pl.Series([0]), column.cast(pl.Int64).cum_sum()])
            for column in (own["blocks"], own["blocks"] - own["hit_blocks"])
        )
        step = max(1, len(asked) // 400)  # more points than a line can show
        axes.plot(asked[::step], stored[::step], **style | {"label": label})
        most = max(most, asked[-1])
    axes.plot([0, most], [0, most], color=GREY, linewidth=1, label="nothing shared")
    axes.set_xlabel("blocks asked for, from the first prompt on")
    axes.set_ylabel("blocks stored anew")
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_formatter(matplotlib.ticker.EngFormatter(sep=""))
    figure.legend(*axes.get_legend_handles_labels(), loc="outside upper left", ncols=5)
    policy = "" if first["cache_tokens"] is None else f", evicted by {first['eviction']}"
    return plots.Figure(
        "Blocks stored against blocks asked for",
        f"What lies below the line of nothing shared was saved. Blocks of {first['block_size']} tokens{policy}.",
        figure,
    )


def _size(tokens: int) -> str:
    if tokens % 1024 == 0:
        return f"{tokens // 1024}Ki"
    return f"{tokens / 10**6:g}M" if tokens >= 10**6 else f"{tokens / 1000:g}k"
