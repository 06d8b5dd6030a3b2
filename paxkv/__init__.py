"""How a KV cache is handed out: memories, scheduling and the engine as pure functions of state.

memory = make_memory(MemoryConfig(kind="paged"), shape, budget_bytes, rows=32, max_len=1024)
engine = Engine(memory, decode, token_budget=128)
state = init_engine(engine, requests, cache)
state, records = run_steps(engine, params, requests, state, num_steps=64)

`decode` is a model's forward pass (`models/decoder.py` has one), `requests` come from `make_requests`, `cache` from
`init_kv_cache`. The README shows a memory by itself.
"""

from paxkv.block_pool import BlockPool
from paxkv.capacity import BlockPlan, kv_budget, plan_blocks
from paxkv.checks import require_invariants, violations
from paxkv.config import MemoryConfig, make_memory
from paxkv.contiguous import VAttention, VAttentionState
from paxkv.cost_model import StepCost
from paxkv.engine import Decode, Engine, EngineState, all_ended, init_engine, output_tokens, run_steps
from paxkv.events import events_between, read_events
from paxkv.init_cache import init_kv_cache
from paxkv.kv_cache import Attend, KVCache
from paxkv.kv_format import KVFormat, TensorFormat, scheme
from paxkv.memory import Ask, Content, KVMemory, MapCalls, Usage, content
from paxkv.model_shapes import KVShape, model_shape
from paxkv.model_sizes import ModelSize, model_size
from paxkv.outcomes import Faults, MemoryFaultError, Outcome, raise_on_fault
from paxkv.page_groups import PageGroups
from paxkv.paged import Paged
from paxkv.paged_state import PagedState
from paxkv.policy import Policy
from paxkv.prefix_cache import PrefixCache
from paxkv.requests import Progress, Reason, Requests, Status, make_requests
from paxkv.reserved import Reserved, ReservedState
from paxkv.roofline import Efficiencies, Roofline, make_roofline
from paxkv.scheduler import commit, schedule
from paxkv.scheduler_state import Plan, SchedulerState, init_scheduler
from paxkv.simulate import Simulated, Simulator
from paxkv.sizes import parse_fraction, parse_size
from paxkv.steps import StepRecord
from paxkv.windows import Group

__all__ = [
    "Ask",
    "Attend",
    "BlockPlan",
    "BlockPool",
    "Content",
    "Decode",
    "Efficiencies",
    "Engine",
    "EngineState",
    "Faults",
    "Group",
    "KVCache",
    "KVFormat",
    "KVMemory",
    "KVShape",
    "MapCalls",
    "MemoryConfig",
    "MemoryFaultError",
    "ModelSize",
    "Outcome",
    "PageGroups",
    "Paged",
    "PagedState",
    "Plan",
    "Policy",
    "PrefixCache",
    "Progress",
    "Reason",
    "Requests",
    "Reserved",
    "ReservedState",
    "Roofline",
    "SchedulerState",
    "Simulated",
    "Simulator",
    "Status",
    "StepCost",
    "StepRecord",
    "TensorFormat",
    "Usage",
    "VAttention",
    "VAttentionState",
    "all_ended",
    "commit",
    "content",
    "events_between",
    "init_engine",
    "init_kv_cache",
    "init_scheduler",
    "kv_budget",
    "make_memory",
    "make_requests",
    "make_roofline",
    "model_shape",
    "model_size",
    "output_tokens",
    "parse_fraction",
    "parse_size",
    "plan_blocks",
    "raise_on_fault",
    "read_events",
    "require_invariants",
    "run_steps",
    "schedule",
    "scheme",
    "violations",
]
