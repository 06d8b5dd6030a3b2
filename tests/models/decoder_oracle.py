"""A decoder of every family in float64 NumPy, written from the papers' formulas: one sequence, one head at a time."""

import math

import numpy as np

from models.config import DecoderConfig


def oracle_logits(config: DecoderConfig, weights: dict, tokens, positions=None) -> np.ndarray:
    """Logits after every token of one sequence.

    Args:
      config: of the decoder.
      weights: arrays under their paths in the model, such as `layers.0.attention.q_proj`.
      tokens: ids.
      positions: of the tokens, rising; 0, 1, ... if None.
    """
    weights = {name: np.asarray(array, np.float64) for name, array in weights.items()}
    positions = np.arange(len(tokens)) if positions is None else np.asarray(positions)
    x = weights["embedding"][np.asarray(tokens)]
    if config.embedding_scale:
        x = x * math.sqrt(config.width)
    for layer in range(config.layers):
        part = {name.removeprefix(f"layers.{layer}."): w for name, w in weights.items()}
        attended = _attention(config, part, layer, _norm(config, x, part["attention_norm.scale"]), positions)
        x = x + _post_norm(config, part, "attention", attended)
        fed = _feed_forward(config, part, _norm(config, x, part["ffn_norm.scale"]))
        x = x + _post_norm(config, part, "ffn", fed)
    output = weights["embedding" if config.tied_embeddings else "output"]
    return _cap(_norm(config, x, weights["norm.scale"]) @ output.T, config.final_soft_cap)


def frequency(head_dim: int, pair: int, theta: float, scaling=None) -> float:
    """Radians per position of one RoPE pair; the Llama 3.1 rule as its release has it, in wavelengths."""
    plain = theta ** (-2 * pair / head_dim)
    if scaling is None:
        return plain
    if scaling.kind == "linear":
        return plain / scaling.factor
    wavelength = 2 * math.pi / plain
    if wavelength < scaling.original_max_len / scaling.high_freq_factor:
        return plain
    if wavelength > scaling.original_max_len / scaling.low_freq_factor:
        return plain / scaling.factor
    smooth = (scaling.original_max_len / wavelength - scaling.low_freq_factor) / (
        scaling.high_freq_factor - scaling.low_freq_factor
    )
    return (1 - smooth) * plain / scaling.factor + smooth * plain


def is_windowed(config: DecoderConfig, layer: int) -> bool:
    """Gemma's pattern: so many windowed layers, then one that sees all, and again."""
    if config.window is None:
        return False
    return config.full_every is None or layer % config.full_every < config.full_every - 1


def _attention(config, part, layer, h, positions):
    local = is_windowed(config, layer)
    theta, scaling = config.rope_theta, config.rope_scaling
    if local and config.local_rope_theta is not None:
        theta, scaling = config.local_rope_theta, None

    def turned(x):
        half = config.head_dim // 2
        angles = np.outer(positions, [frequency(config.head_dim, i, theta, scaling) for i in range(half)])
        y = (x[:, :half] + 1j * x[:, half:]) * np.exp(1j * angles)
        return np.concatenate([y.real, y.imag], -1)

    def head(kind, index):
        x = h @ part[f"attention.{kind}_proj"][:, index]
        if config.attention_bias:
            x = x + part[f"attention.{kind}_bias"][index]
        if config.qk_norm and kind in "qk":
            x = _norm(config, x, part[f"attention.{kind}_norm.scale"])
        return x

    scale = 1 / math.sqrt(config.head_dim) if config.query_scale is None else config.query_scale
    out = 0
    for q_head in range(config.q_heads):
        kv_head = q_head // (config.q_heads // config.kv_heads)
        q, k, v = turned(head("q", q_head)), turned(head("k", kv_head)), head("v", kv_head)
        logits = _cap(q @ k.T * scale, config.attention_soft_cap)
        for i, at in enumerate(positions):
            for j, of in enumerate(positions):
                if of > at or (local and of <= at - config.window):
                    logits[i, j] = -math.inf
        p = np.exp(logits - logits.max(-1, keepdims=True))
        out = out + p / p.sum(-1, keepdims=True) @ v @ part["attention.o_proj"][q_head]
    return out


def _feed_forward(config, part, h):
    gate, up = h @ part["ffn.gate_proj"], h @ part["ffn.up_proj"]
    if config.activation == "silu":
        gate = gate / (1 + np.exp(-gate))
    else:
        gate = gate / 2 * (1 + np.tanh(math.sqrt(2 / math.pi) * (gate + 0.044715 * gate**3)))
    return (gate * up) @ part["ffn.down_proj"]


def _norm(config, x, scale):
    normal = x / np.sqrt((x**2).mean(-1, keepdims=True) + config.norm_eps)
    return normal * (1 + scale if config.norm_plus_one else scale)


def _post_norm(config, part, name, x):
    return _norm(config, x, part[f"{name}_post_norm.scale"]) if config.post_norms else x


def _cap(x, cap):
    return x if cap is None else cap * np.tanh(x / cap)
