"""What a change to a model's memory does to its next-token distributions.

Two sets of logits over the same tokens are compared position by position; only a few numbers of each position are
kept, since logits are as wide as the vocabulary. With p the reference's distribution, q the other one and t the token
that really follows:

- loss: -log q(t), in nats. Perplexity is exp of its mean.
- KL: sum over the vocabulary of p (log p - log q), never below 0. It sees what happens to tokens that do not follow.
- top-1 agreement: whether p and q have the same most likely token; of equal ones, the first.
- RMS change: root mean square over positions of q(t) - p(t), as llama.cpp reports it; and of the same for the
  reference's most likely token, whatever follows.

Differences of losses are paired: the reference reads the same tokens, so that what makes a text hard cancels. Positions
of one window read each other's text and are not independent; windows are. The standard error is therefore that of the
windows' means, s / sqrt(windows), which a bootstrap over windows estimates as well.
"""

import dataclasses
import typing

import jax
import jax.numpy as jnp
import numpy as np
import polars as pl
from jaxtyping import Array, Bool, Float, Float32, Int32

COLUMNS = ("nll", "reference_nll", "kl", "agrees", "change", "top_change", "is_nan")
"""Of a table of positions, beside `text`, `window` and `position`."""


@typing.no_type_check
@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Positions:
    """How one window's next-token distributions differ from the reference's, position by position."""

    nll: jax.Array  # f32[tokens]; loss of the token that follows, in nats
    reference_nll: jax.Array  # f32[tokens]; the same under the reference
    kl: jax.Array  # f32[tokens]; of the reference from this, in nats
    agrees: jax.Array  # bool[tokens]; the most likely token is the same
    change: jax.Array  # f32[tokens]; of the probability of the token that follows
    top_change: jax.Array  # f32[tokens]; of the probability of the token that the reference finds most likely
    is_nan: jax.Array  # bool[tokens]; any logit here is NaN


@jax.jit
def compare(
    reference: Float32[Array, "tokens vocab"],
    logits: Float32[Array, "tokens vocab"],
    following: Int32[Array, " tokens"],
) -> Positions:
    """Compares logits of one window with the reference's.

    Args:
      reference: logits of the reference, finite.
      logits: logits of what is judged; a position with a NaN among them is NaN in all but `agrees`, which is false.
      following: the token that follows each position.

    Returns:
      A few numbers a position, computed in float32 over the full vocabulary. The terms of the KL are summed as
      p * ((log p - log q) - 1 + q / p), which are none below 0 and add up to the same: a difference of two numbers near
      1 would lose a KL of 1e-6 in float32.
    """
    log_p, log_q = jax.nn.log_softmax(reference), jax.nn.log_softmax(logits)
    p, q = jnp.exp(log_p), jnp.exp(log_q)
    top = jnp.argmax(reference, axis=-1)
    is_nan = jnp.any(jnp.isnan(logits), axis=-1)
    return Positions(
        nll=-_pick(log_q, following),
        reference_nll=-_pick(log_p, following),
        kl=jnp.sum(_kl_terms(p, log_p - log_q), axis=-1),
        agrees=(jnp.argmax(logits, axis=-1) == top) & ~is_nan,
        change=_pick(q, following) - _pick(p, following),
        top_change=_pick(q, top) - _pick(p, top),
        is_nan=is_nan,
    )


def _kl_terms(
    p: Float32[Array, "tokens vocab"], lead: Float32[Array, "tokens vocab"]
) -> Float32[Array, "tokens vocab"]:
    """Terms p * (lead + exp(-lead) - 1), where lead = log p - log q: by its series where both parts nearly cancel."""
    series = lead * lead * (0.5 - lead / 6 + lead * lead / 24)
    return p * jnp.where(jnp.abs(lead) < 0.03, series, lead + jnp.expm1(-lead))


def _pick(values: Float32[Array, "tokens vocab"], token: Int32[Array, " tokens"]) -> Float32[Array, " tokens"]:
    return jnp.take_along_axis(values, token[:, None], axis=-1)[:, 0]


def table(positions: Positions, text: str, window: int) -> pl.DataFrame:
    """The numbers of one window as a table with a row a position."""
    columns = {name: np.asarray(getattr(positions, name)) for name in COLUMNS}
    place = [pl.lit(text).alias("text"), pl.lit(window, pl.Int32).alias("window")]
    return pl.DataFrame(columns).with_row_index("position").select(*place, pl.all())


def summarise(positions: pl.DataFrame) -> dict[str, float | int | None]:
    """Metrics of all positions of some windows.

    Args:
      positions: with `text`, `window` and `COLUMNS`, a row a position; windows of equal length.

    Returns:
      Metrics by name. A position that is NaN is counted, and makes no number NaN: all but `n_nan` are of the others,
      and None if there are none. `delta_nll_se` is None for a single window.
    """
    sound = positions.filter(~pl.col("is_nan"))
    found: dict[str, float | int | None] = {"predictions": len(positions), "n_nan": len(positions) - len(sound)}
    if sound.is_empty():
        return dict.fromkeys(_SUMMARY) | found
    sound = sound.with_columns(pl.col(*COLUMNS).cast(pl.Float64))
    sound = sound.with_columns(delta=pl.col("nll") - pl.col("reference_nll"))
    of_windows = sound.group_by("text", "window", maintain_order=True).agg(pl.col("delta", "kl").mean())
    columns = {name: sound[name].to_numpy() for name in sound.columns}
    kl = columns["kl"]
    return found | {
        "perplexity": float(np.exp(columns["nll"].mean())),
        "delta_nll": float(columns["delta"].mean()),
        "delta_nll_se": standard_error(of_windows["delta"].to_numpy()),
        "mean_kl": float(kl.mean()),
        "mean_kl_se": standard_error(of_windows["kl"].to_numpy()),
        "kl_p99": float(np.quantile(kl, 0.99)),
        "kl_p999": float(np.quantile(kl, 0.999)),
        "kl_max": float(kl.max()),
        "top1_agreement": float(columns["agrees"].mean()),
        "rms_change": float(np.sqrt(np.mean(columns["change"] ** 2))),
        "rms_top_change": float(np.sqrt(np.mean(columns["top_change"] ** 2))),
    }


def summarise_losses(losses: pl.DataFrame) -> dict[str, float | int]:
    """Perplexity of all texts together and of each by itself, from a row a position with `text` and `nll`."""
    of_texts = {str(text): own for (text,), own in losses.group_by("text", maintain_order=True)}
    found: dict[str, float | int] = {"predictions": len(losses), "perplexity": _perplexity(losses)}
    return found | {f"perplexity_{text}": _perplexity(own) for text, own in of_texts.items()}


def _perplexity(losses: pl.DataFrame) -> float:
    return float(np.exp(losses["nll"].cast(pl.Float64).to_numpy().mean()))


_SUMMARY = (
    "perplexity", "delta_nll", "delta_nll_se", "mean_kl", "mean_kl_se", "kl_p99", "kl_p999", "kl_max", "top1_agreement",
    "rms_change", "rms_top_change",
)  # fmt: skip


def standard_error(means: Float[np.ndarray, " windows"]) -> float | None:
    """Standard error of the mean of independent windows; None if there is one alone."""
    return None if len(means) < 2 else float(np.std(means, ddof=1) / np.sqrt(len(means)))


def relative_error(out: Float32[Array, "..."], reference: Float32[Array, "..."]) -> Float32[Array, ""]:
    """L2 norm of the difference over that of the reference."""
    return jnp.linalg.norm(jnp.ravel(out - reference)) / jnp.linalg.norm(jnp.ravel(reference))


def first_difference(tokens: Int32[np.ndarray, " steps"], reference: Int32[np.ndarray, " steps"]) -> int:
    """Steps before the first token that differs; all if none does."""
    differs: Bool[np.ndarray, " steps"] = tokens != reference
    return int(np.argmax(differs)) if differs.any() else len(tokens)
