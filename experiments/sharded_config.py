"""What `sharded_serving` can be asked."""

import dataclasses
import pathlib

from experiments.sharded_offline import Offline
from experiments.workloads.config import WorkloadConfig
from paxkv.config import MemoryConfig
from paxkv.cost_model import StepCost
from paxkv.policy import Policy
from paxkv.split_paged import Dealing


@dataclasses.dataclass(frozen=True)
class Config:
    """One comparison of meshes.

    Attributes:
      experiment: `sharded_serving`.
      seed: of arrivals, lengths, prompts and sampling, a stream each.
      model: folder of the checkpoint.
      model_sha256: expected hash of its config and weights; empty accepts any, and the run fills it in.
      workload: what is asked of all replicas together.
      meshes: what is compared, such as `d1m8k1`: replicas, parts of the heads, parts of the blocks. The first one is
        the reference for the tokens.
      pairs: two meshes each, such as `d1m2k1+d1m4k1`: the first reads prompts, the second answers, and keys and values
        move between them. Their memory needs `prefix_caching`, by which blocks that move are known.
      link_bytes_per_s: of the modelled link between the two, from each device of the first to one of the second.
      cpu_devices: that a CPU is made to look like; none if there is another device.
      ffn: which of `model` and `kv` the inner width of feed-forward blocks is split over.
      vocab: the same for the vocabulary.
      replicate_kv_heads: whether several devices may store the same KV head, where there are fewer than devices.
      dealing: which device has a block: ids in turn (`round_robin`) or in equal runs (`by_shard`).
      kv_memory: budget for keys and values of each device.
      memory: how a replica's is handed out; a paged one, whose `num_blocks` are those of each device.
      rows: most requests that run at once in a replica.
      max_model_len: most tokens of one sequence.
      token_budget: most tokens a replica computes in a step.
      temperature: of all requests; 0 samples greedily.
      near_tie: a first difference between two runs' tokens is accepted where the best two choices lie within this, in
        logits.
      steps_per_dispatch: steps between two looks of the host.
      max_host_share: a run fails if devices wait longer for the host, as a share of the time of steps that only decode;
        None for any.
      kernels: backend of attention and cache writes; None picks the best for the device.
      kv_format: how keys and values are stored; its scales must need no calibration.
      policy: whom the scheduler preempts and admits, and how.
      cost: the modelled clock.
      process_time_limit_s: of several processes, longest that one waits for another, a compilation or a step.
      offline: compile for devices that are not there, instead of serving on those that are; None serves. Model,
        workload and `kv_memory` then mean nothing.
    """

    experiment: str = "sharded_serving"
    seed: int = 0
    model: pathlib.Path = pathlib.Path("models/checkpoints/byte_llama")
    model_sha256: str = ""
    workload: WorkloadConfig = dataclasses.field(default_factory=WorkloadConfig)
    meshes: tuple[str, ...] = ("d1m1k1", "d1m2k1", "d1m1k2", "d2m1k1")
    pairs: tuple[str, ...] = ()
    link_bytes_per_s: float = 50e9
    cpu_devices: int = 8
    ffn: tuple[str, ...] = ("model", "kv")
    vocab: tuple[str, ...] = ("model", "kv")
    replicate_kv_heads: bool = True
    dealing: Dealing = "round_robin"
    kv_memory: str = "1 MiB"
    memory: MemoryConfig = dataclasses.field(default_factory=MemoryConfig)
    rows: int = 16
    max_model_len: int = 512
    token_budget: int = 64
    temperature: float = 0.0
    near_tie: float = 1e-4
    steps_per_dispatch: int = 16
    max_host_share: float | None = None
    kernels: str | None = None
    kv_format: str = "f32"
    policy: Policy = dataclasses.field(default_factory=Policy)
    cost: StepCost = dataclasses.field(default_factory=StepCost)
    process_time_limit_s: float = 600.0
    offline: Offline | None = None
