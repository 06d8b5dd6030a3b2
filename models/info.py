"""What a model is: a table of its config, its size and its tokenizer."""

import os

import jax
from rich.table import Table

from models.decoder import make_decode
from models.formats import load_model, load_tokenizer, recognise
from paxkv.kv_format import scheme

_FORMATS = ("bf16", "e4m3_token_head", "int4_token_head")


def describe(path: str | os.PathLike[str]) -> dict[str, str]:
    """What there is to say of the model at `path`, in words.

    Raises:
      FileNotFoundError: Nothing is there.
      ValueError: What is there is no whole model.
    """
    model = load_model(path)
    config, weights = model.config, jax.tree.leaves(make_decode(model)[1])
    try:
        tokenizer = load_tokenizer(path)
        words = f"{type(tokenizer).__name__}, {tokenizer.vocab:,} ids, bos {tokenizer.bos}, eos {tokenizer.eos}"
    except ValueError as error:
        words = f"none: {error}"
    per_token = ", ".join(
        f"{scheme(name).shape(config.layers, config.kv_heads, config.head_dim).token_bytes:,} in {name}"
        for name in _FORMATS
    )
    return {
        "format": recognise(path),
        **{name: str(value) for name, value in config.as_dict().items()},
        "parameters": f"{sum(weight.size for weight in weights):,}",
        "bytes in memory": f"{sum(weight.nbytes for weight in weights):,}",
        "dtype of weights": config.param_dtype,
        "KV bytes per token": per_token,
        "tokenizer": words,
    }


def as_table(path: str | os.PathLike[str], described: dict[str, str]) -> Table:
    """The same to look at."""
    table = Table(title=str(path), show_header=False)
    for name, value in described.items():
        table.add_row(name, value)
    return table
