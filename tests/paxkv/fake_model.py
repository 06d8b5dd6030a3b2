"""The smallest model that an engine can serve: what a token does to attention is looked up in random tables.

Query, key and value depend on the token, its position and, beyond the first layer, on what was attended below; so a
key in a wrong slot, a wrong position or a token that is not the sequence's own shows in the logits. The same in
float64 and without any cache is `reference_logits`.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from paxkv.kv_cache import AttentionSpec, attend_layer

VOCAB, Q_HEADS, KV_HEADS, HEAD_DIM = 17, 2, 1, 4
WIDTH = (Q_HEADS + 2 * KV_HEADS) * HEAD_DIM


def make_tables(seed: int, layers: int, max_len: int) -> list[dict[str, np.ndarray]]:
    rng = np.random.default_rng(seed)
    tables = [
        {
            "token": rng.normal(size=(VOCAB, WIDTH)) * 1.2,  # peaked attention, logits far apart
            "position": rng.normal(size=(max_len, WIDTH)) * 1.2,
            "below": rng.normal(size=(Q_HEADS * HEAD_DIM, WIDTH)) * (0.5 if layer else 0.0),
        }
        for layer in range(layers)
    ]
    tables[-1]["out"] = rng.normal(size=(Q_HEADS * HEAD_DIM, VOCAB)) * 2
    return tables


def as_params(tables):
    return [{name: jnp.asarray(table, jnp.float32) for name, table in layer.items()} for layer in tables]


traces = []  # one entry each time that JAX traces the model


@dataclasses.dataclass(frozen=True)
class Model:
    """The model; a layer beyond the `windows` that are given sees everything."""

    windows: tuple[int | None, ...] = ()

    def __call__(self, params, tokens, positions, select, cache, attend) -> Any:
        traces.append(len(tokens))
        below = jnp.zeros((len(tokens), Q_HEADS * HEAD_DIM), jnp.float32)
        for layer, table in enumerate(params):
            x = table["token"].at[tokens].get(mode="fill", fill_value=jnp.nan)
            x += table["position"].at[positions].get(mode="fill", fill_value=jnp.nan)
            x += jnp.dot(below, table["below"], precision="highest")
            q, k, v = jnp.split(x.reshape(len(tokens), -1, HEAD_DIM), [Q_HEADS, Q_HEADS + KV_HEADS], axis=1)
            spec = AttentionSpec(window=window_of(self.windows, layer))
            below, cache = attend_layer(
                attend, layer, cache, lambda of_layer, kept, qkv=(q, k, v), spec=spec: of_layer(*qkv, kept, spec)
            )
            below = below.reshape(len(tokens), -1)
        chosen = below.at[select].get(mode="fill", fill_value=0)
        return jnp.dot(chosen, params[-1]["out"], precision="highest"), cache


decode = Model()


def window_of(windows: Sequence[int | None], layer: int) -> int | None:
    return windows[layer] if layer < len(windows) else None


def reference_logits(tables, tokens: list[int], windows: Sequence[int | None] = ()) -> np.ndarray:
    """Logits of the token after `tokens`: causal attention in float64, everything computed anew."""
    count = len(tokens)
    below = np.zeros((count, Q_HEADS * HEAD_DIM))
    ago = np.arange(count)[:, None] - np.arange(count)
    for layer, table in enumerate(tables):
        x = table["token"][tokens] + table["position"][:count] + below @ table["below"]
        q, k, v = np.split(x.reshape(count, -1, HEAD_DIM), [Q_HEADS, Q_HEADS + KV_HEADS], axis=1)
        scores = np.einsum("qhd,kd->hqk", q, k[:, 0]) * HEAD_DIM**-0.5
        scores = np.where((ago >= 0) & (ago < (window_of(windows, layer) or count)), scores, -np.inf)
        weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
        weights /= weights.sum(axis=-1, keepdims=True)
        below = np.einsum("hqk,kd->qhd", weights, v[:, 0]).reshape(count, -1)
    return below[-1] @ tables[-1]["out"]


def reference_output(
    tables, prompt: list[int], count: int, choose, windows: Sequence[int | None] = ()
) -> tuple[list[int], list[float]]:
    """`count` tokens after `prompt`, each `choose(index, logits)`, and by how much the best logit led each time."""
    tokens, margins = list(prompt), []
    for index in range(count):
        logits = reference_logits(tables, tokens, windows)
        tokens.append(int(choose(index, logits)))
        second, first = np.sort(logits)[-2:]
        margins.append(float(first - second))
    return tokens[len(prompt) :], margins
