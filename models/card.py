"""The model card: a training record as a page to read."""

import json
import math
from typing import Any


def render_card(name: str, record: dict[str, Any]) -> str:
    """Markdown for the model called `name`; every figure comes from `record`, as training writes it."""
    shape, versions, heldout = record["config"]["model"], record["versions"], list(record["results"].values())
    by_context = "\n".join(
        f"| {h['context']} | {h['bytes']:,} | {h['nats']:.4f} | {h['bits_per_byte']:.4f} "
        f"| {h['trigram_bits_per_byte']:.4f} |"
        for h in heldout
    )
    longest = heldout[-1]
    by_position = "\n".join(
        f"| {part + 1} of {len(longest['bits_by_position'])} | {bits:.4f} |"
        for part, bits in enumerate(longest["bits_by_position"])
    )
    train_bits = record["train_nats"] / math.log(2)
    passes = record["bytes_seen"] / record["train_bytes"]
    return f"""\
# {name}

A byte-level Llama-architecture decoder (RoPE, RMSNorm, SwiGLU) of {record["parameters"]:,} parameters in float32:
{shape["layers"]} layers, width {shape["width"]}, {shape["q_heads"]} query heads and {shape["kv_heads"]} KV heads \
of {shape["head_dim"]}, context {shape["max_len"]}. It reads and writes bytes;
there is no stop token. Small enough to train on a laptop and real enough to judge a KV cache by; of no use as a
language model.

## Held-out loss

| context in bytes | bytes scored | nats per byte | bits per byte | byte trigram, bits per byte |
|---|---|---|---|---|
{by_context}

Training loss over the last {record["train_nats_steps"]} steps: {record["train_nats"]:.4f} nats, \
{train_bits:.4f} bits per byte.
The trigram model is fitted on the same training text and scored on the same bytes (`models/trigram.py`).

By position in the window of {longest["context"]}:

| part of the window | bits per byte |
|---|---|
{by_position}

To check these figures: `uv run python -m models evaluate`, with the path of this folder. The text, and with it the
figures, differs a little between Python versions; the command says whether the text is the one trained on.
{_curves(record)}
## Training

`{record["command"]}`; to train it again beside this one:
`uv run {record["command"]} --out_dir runs/{name}`

- Text: `{record["text"]}` of Python {versions["python"]}, sha256
  `{record["text_sha256"]}`.
  {record["train_bytes"]:,} bytes to train on and {record["heldout_bytes"]:,} held out: one topic in ten by the hash \
of its name,
  no paragraph twice or on both sides.
- {record["steps"]:,} steps over {record["bytes_seen"]:,} bytes ({passes:.1f} passes), {record["train_seconds"]:,} s \
on {record["cpu_count"]} CPU cores ({record["platform"]}){_since(record)}.
- {", ".join(f"{package} {version}" for package, version in versions.items())}.

```json
{json.dumps(record["config"], indent=2)}
```
"""


def _curves(record: dict[str, Any]) -> str:
    """The picture, where the record is of a training that drew one."""
    if "evaluations" not in record:
        return ""
    evaluations = record["evaluations"]
    nats = list(evaluations["nats"].values())
    heldout = (
        f" Held-out loss is that of {evaluations['windows']} windows of {evaluations['context']} bytes, {nats[0]:.4f} "
        f"nats at first and {nats[-1]:.4f} at last."
        if nats
        else ""
    )
    return f"""
![Loss, learning rate and gradient norm by step](curves.svg)

The same by numbers: `curves.jsonl`, a line for each step.{heldout}
"""


def _since(record: dict[str, Any]) -> str:
    step = record.get("resumed_after_step")
    return f" after step {step:,}, where it went on from a checkpoint" if step else ""
