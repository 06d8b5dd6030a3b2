"""How long a decode step takes by arithmetic: what each device reads and multiplies, then what it sends.

A roofline: a device is as fast as its memory delivers or as its units multiply, whichever takes longer, and exchanges
are not hidden behind either. Bandwidths and peaks are those of `pallas_kernels.targets`, where their sources stand.
Launches, latencies of exchanges and everything that a program does besides are left out, so that a real step takes
longer; what two splits or two numbers of devices have to do for the same tokens can be compared.
"""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any, cast

import jax

from experiments.collectives import Collective
from experiments.sharded_setup import Server
from models.decoder import Decode
from pallas_kernels.targets import Target


@dataclasses.dataclass(frozen=True)
class StepWork:
    """What a device does in a decode step, in total and for each row of a replica."""

    weight_bytes: float  # that it reads once, however many rows there are
    kv_bytes_per_token: float  # of stored keys and values that it reads
    flops_per_row: float  # with weights
    flops_per_token: float  # for each stored token that a row attends to
    sent_bytes_per_row: float

    def seconds(self, target: Target, rows: int, context: int) -> float:
        """Of a step of `rows` tokens, each of a sequence with `context` stored ones."""
        read = self.weight_bytes + rows * context * self.kv_bytes_per_token
        flops = rows * (self.flops_per_row + context * self.flops_per_token)
        on_device = max(read / target.memory_bytes_per_s, flops / target.peak_flops["bfloat16"])
        return on_device + rows * self.sent_bytes_per_row / target.link_bytes_per_s


def work_of(server: Server, params: Any, collectives: Sequence[Collective]) -> StepWork:
    """The work of a step whose weights and exchanges these are.

    Args:
      server: whose step.
      params: the weights, as arrays or as shapes and dtypes and where they lie.
      collectives: of the step, of all rows.
    """
    sharded = server.sharded
    config = cast(Decode, sharded.engine.decode).config
    blocks_over = sharded.mesh.shape["kv"]
    # Of the embedding a step reads a few rows, unless it is the output projection as well.
    table = 0 if config.tied_embeddings else config.vocab * config.width
    weights = sum(math.prod(w.sharding.shard_shape(w.shape)) for w in jax.tree.leaves(params)) - table
    itemsize = jax.tree.leaves(params)[0].dtype.itemsize
    sent = sum(one.times * sent_bytes(one, sharded.mesh.size) for one in collectives)
    return StepWork(
        weight_bytes=float(weights * itemsize),
        kv_bytes_per_token=server.device_shape.token_bytes / blocks_over,
        flops_per_row=2.0 * weights,
        flops_per_token=4.0 * config.layers * config.q_heads * config.head_dim / blocks_over,
        sent_bytes_per_row=sent / server.memory.rows,
    )


def sent_bytes(collective: Collective, devices: int) -> float:
    """What each device sends in one run of an exchange in a ring, which moves no more than has to be moved.

    Args:
      collective: the exchange.
      devices: of the program.
    """
    group = devices if collective.group is None else collective.group
    rounds = {
        "all-reduce": 2 * (group - 1) / group,
        "reduce-scatter": (group - 1) / group,
        "all-to-all": (group - 1) / group,
        "all-gather": float(group - 1),
        "collective-broadcast": 1.0,
        "collective-permute": 1.0,
    }
    return rounds[collective.kind] * collective.operand_bytes
