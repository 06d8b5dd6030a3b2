"""What a trained model is served with: its weights, its prompts, and what a manifest says of both."""

import dataclasses
import hashlib
import pathlib
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Int32

from experiments.workloads.config import WorkloadConfig, load_workload
from experiments.workloads.tokens import prompt_tokens
from experiments.workloads.workload import Workload
from models.checkpoint import load_checkpoint, load_record, model_sha256
from models.decoder import Decode, Params, make_decode
from models.text import load_corpus
from paxkv.engine import PLAIN_F32
from paxkv.kv_format import KVFormat, scheme
from paxkv.model_shapes import KVShape


class Inputs(NamedTuple):
    """A model and what it is asked."""

    decode: Decode
    params: Params
    shape: KVShape  # of its keys and values
    workload: Workload
    prompts: Int32[np.ndarray, "requests max_prompt"]
    facts: dict[str, Any]  # for the manifest


def uncalibrated_format(name: str) -> KVFormat:
    """The format of a name, for a server that reads no text beforehand.

    Raises:
      ValueError: the name is none, or its scales need a calibration.
    """
    try:
        fmt = scheme(name)
    except ValueError as error:
        raise ValueError(f"kv_format: {error}") from error
    if "static" in (fmt.k.calibration, fmt.v.calibration):
        raise ValueError(
            f"kv_format: expected one whose scales need no calibration, such as e4m3_token_head, got {name!r}"
        )
    return fmt


def load_inputs(
    path: pathlib.Path,
    sha256: str,
    workload: WorkloadConfig,
    max_model_len: int,
    seed: int,
    kv_format: KVFormat = PLAIN_F32,
) -> Inputs:
    """Loads a checkpoint, and reads or draws requests whose prompts are pieces of its held-out text.

    Args:
      path: folder of the checkpoint.
      sha256: expected hash of its config and weights; empty accepts any.
      workload: what is asked.
      max_model_len: most tokens of one sequence.
      seed: of lengths, arrivals and prompts, a stream each.
      kv_format: how keys and values are stored.

    Raises:
      ValueError: the model is another one, or was not trained for so long sequences; or the workload contradicts
        itself.
      OSError: a file is missing.
    """
    model = load_checkpoint(path)
    digest = model_sha256(model)
    if sha256 not in ("", digest):
        raise ValueError(
            f"model_sha256: expected the model {sha256}, got {digest} in {path}; restore the checkpoint, or leave "
            "model_sha256 out"
        )
    if max_model_len > model.config.max_len:
        raise ValueError(
            f"max_model_len: expected at most {model.config.max_len}, the context that {path} was trained for, got "
            f"{max_model_len}; scale the workload's lengths down instead"
        )
    shape = kv_format.shape(model.config.layers, model.config.kv_heads, model.config.head_dim)
    requests = load_workload(workload, max_model_len, seed)
    corpus = load_corpus()
    prompts = prompt_tokens(requests, seed, corpus.heldout.tobytes())
    facts = {
        "workload": dataclasses.asdict(requests.provenance),
        "prompt_text_sha256": corpus.sha256,
        "prompts_sha256": hashlib.sha256(np.ascontiguousarray(prompts).tobytes()).hexdigest(),
        "model_sha256": digest,
        "model": load_record(path),
        "kv_bytes_per_token": shape.token_bytes,
    }
    decode, params = make_decode(model)
    return Inputs(decode, params, shape, requests, prompts, facts)
