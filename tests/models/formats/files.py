"""Model files written by hand, independently of the loaders."""

import os
import pathlib
import struct

import gguf
import numpy as np

from tests.models.families import by_name, random_params

WEIGHTS = (
    pathlib.Path(os.environ.get("PAXKV_WEIGHTS_DIR", pathlib.Path(__file__).parents[3].parent / "shared" / "weights"))
    / "stories260K"
)


def interleaved(weight: np.ndarray) -> np.ndarray:
    """Our `[width, heads, head_dim]` as rows in which RoPE's pairs are neighbours."""
    d, heads, h = weight.shape
    rows = np.empty((heads * h, d), weight.dtype)
    for head in range(heads):
        for i in range(h // 2):
            rows[head * h + 2 * i] = weight[:, head, i]
            rows[head * h + 2 * i + 1] = weight[:, head, i + h // 2]
    return rows


def plain(weight: np.ndarray) -> np.ndarray:
    """Our `[width, heads, head_dim]` or `[width, inner]` as rows of a matrix that is applied from the left."""
    return weight.reshape(weight.shape[0], -1).T


def numpy_weights(config) -> dict[str, np.ndarray]:
    return {name: np.asarray(weight) for name, weight in by_name(random_params(config)).items()}


def write_llama2c(path, config) -> None:
    ours, layers = numpy_weights(config), range(config.layers)
    each = [
        [ours["embedding"]],
        [ours[f"layers.{i}.attention_norm.scale"] for i in layers],
        [interleaved(ours[f"layers.{i}.attention.q_proj"]) for i in layers],
        [interleaved(ours[f"layers.{i}.attention.k_proj"]) for i in layers],
        [plain(ours[f"layers.{i}.attention.v_proj"]) for i in layers],
        [ours[f"layers.{i}.attention.o_proj"].reshape(-1, config.width).T for i in layers],
        [ours[f"layers.{i}.ffn_norm.scale"] for i in layers],
        [plain(ours[f"layers.{i}.ffn.gate_proj"]) for i in layers],
        [plain(ours[f"layers.{i}.ffn.down_proj"]) for i in layers],
        [plain(ours[f"layers.{i}.ffn.up_proj"]) for i in layers],
        [ours["norm.scale"]],
        [np.full(config.max_len * config.head_dim, np.nan, np.float32)],
        [] if config.tied_embeddings else [ours["output"]],
    ]
    vocab = config.vocab if config.tied_embeddings else -config.vocab
    sizes = (config.width, config.ffn, config.layers, config.q_heads, config.kv_heads, vocab, config.max_len)
    floats = np.concatenate([np.ravel(weight) for kind in each for weight in kind])
    path.write_bytes(struct.pack("<7i", *sizes) + floats.astype("<f4").tobytes())


def gguf_tensors(kind: str, config) -> dict[str, np.ndarray]:
    """Our random weights under GGUF's names and in its order."""
    ours = numpy_weights(config)
    turned = interleaved if kind == "llama" else plain
    found = {"token_embd.weight": ours["embedding"], "output_norm.weight": ours["norm.scale"]}
    if not config.tied_embeddings:
        found["output.weight"] = ours["output"]
    for i in range(config.layers):
        layer = {name.removeprefix(f"layers.{i}."): w for name, w in ours.items() if name.startswith(f"layers.{i}.")}
        found |= {
            f"blk.{i}.attn_norm.weight": layer["attention_norm.scale"],
            f"blk.{i}.attn_q.weight": turned(layer["attention.q_proj"]),
            f"blk.{i}.attn_k.weight": turned(layer["attention.k_proj"]),
            f"blk.{i}.attn_v.weight": plain(layer["attention.v_proj"]),
            f"blk.{i}.attn_output.weight": layer["attention.o_proj"].reshape(-1, config.width).T,
            f"blk.{i}.ffn_norm.weight": layer["ffn_norm.scale"],
            f"blk.{i}.ffn_gate.weight": plain(layer["ffn.gate_proj"]),
            f"blk.{i}.ffn_up.weight": plain(layer["ffn.up_proj"]),
            f"blk.{i}.ffn_down.weight": plain(layer["ffn.down_proj"]),
        }
        for x in "qkv" if config.attention_bias else "":
            found[f"blk.{i}.attn_{x}.bias"] = layer[f"attention.{x}_bias"].reshape(-1)
        for x in "qk" if config.qk_norm else "":
            found[f"blk.{i}.attn_{x}_norm.weight"] = layer[f"attention.{x}_norm.scale"]
    return {name: np.ascontiguousarray(tensor) for name, tensor in found.items()}


def write_gguf(path, kind: str, config, tensors, *, leave_out=(), more=None) -> None:
    """`tensors` are arrays, or a GGMLQuantizationType and the bytes of one."""
    writer = gguf.GGUFWriter(path, kind)
    words = {
        "embedding_length": config.width,
        "block_count": config.layers,
        "attention.head_count": config.q_heads,
        "attention.head_count_kv": config.kv_heads,
        "attention.key_length": config.head_dim,
        "feed_forward_length": config.ffn,
        "context_length": config.max_len,
        "vocab_size": config.vocab,
    }
    for name, value in words.items():
        if name not in leave_out:
            writer.add_uint32(f"{kind}.{name}", value)
    writer.add_float32(f"{kind}.attention.layer_norm_rms_epsilon", config.norm_eps)
    writer.add_float32(f"{kind}.rope.freq_base", config.rope_theta)
    if more is not None:
        more(writer)
    for name, tensor in tensors.items():
        if isinstance(tensor, tuple):
            writer.add_tensor(name, tensor[1], raw_dtype=tensor[0])
        else:
            writer.add_tensor(name, tensor)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
