"""What the scheduler may choose, as words for people and as values for compiled programs."""

import dataclasses
import typing
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int32

from paxkv.memory import KVMemory
from paxkv.sizes import require_bool, require_int

Order = Literal["first_come", "shortest", "priority", "deadline"]
First = Literal["decode", "prefill"]
Victim = Literal["last_arrived", "least_work", "priority"]
Preemption = Literal["recompute", "swap"]


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class Policy:
    """What the scheduler may choose.

    Attributes:
      order: who is admitted first: who came first; who is predicted to be shortest, prompt and output together; who has
        the highest priority; whose deadline for the first token comes first. Among equals who came first.
      overtake: whether a request may be admitted before another one, first in this order, for which there is no room.
        Memory is used better, and large requests may wait for as long as small ones keep coming.
      first: who gets the tokens of a step. "decode": those who are being answered, and prompts what is left, in chunks.
        "prefill": prompts, and as long as there are any nobody is answered.
      chunked: whether a prompt may be computed in several steps. If not, it waits for a step that has room for all of
        it; a prompt longer than any step is still cut.
      reserve_output: whether a request is admitted only if there is room for its predicted output, too. Not for
        sequences of one prompt that share it, of which each waits for all others.
      max_adapters: most adapters of weights that run together, 0 for none counting as one; None for any number.
      victim: whom to preempt when memory runs out: who arrived last, who has the fewest tokens stored (and so the
        least to recompute), or who has the lowest priority. Among equals who arrived last. Where that could preempt
        everybody in turn, someone always gets on: the oldest, the one with most work, the most important one.
      preemption: what becomes of what a victim has stored. It is computed again, or, with a memory that has host
        blocks, it goes to the host and comes back; where the host has no room it is computed again.
    """

    order: Order = "first_come"
    overtake: bool = False
    first: First = "decode"
    chunked: bool = True
    reserve_output: bool = False
    max_adapters: int | None = None
    victim: Victim = "last_arrived"
    preemption: Preemption = "recompute"

    def __post_init__(self) -> None:
        """Refuses policies that there are not."""
        for name, kind in (("order", Order), ("first", First), ("victim", Victim), ("preemption", Preemption)):
            if getattr(self, name) not in typing.get_args(kind):
                raise ValueError(
                    f"{name}: expected one of {', '.join(typing.get_args(kind))}, got {getattr(self, name)!r}"
                )
        for name in ("overtake", "chunked", "reserve_output"):
            require_bool(name, getattr(self, name))
        if self.max_adapters is not None:
            require_int("max_adapters", self.max_adapters)

    def swaps(self, memory: KVMemory[Any]) -> bool:
        """Whether victims go to the host."""
        return self.preemption == "swap" and memory.host_blocks > 0


def require_schedulable(memory: KVMemory[Any], token_budget: object, policy: object) -> None:
    """Refuses what the scheduler could not serve with, in an engine or a simulator.

    Raises:
      ValueError: for a budget that could leave a running request without its token, for what is no policy, or for one
        that swaps with a memory that has nowhere to swap to.
    """
    if require_int("token_budget", token_budget) < memory.rows:
        raise ValueError(
            f"token_budget: expected at least rows = {memory.rows}, so that every running request gets its token in "
            f"each step, got {token_budget}; raise it, or lower rows"
        )
    if not isinstance(policy, Policy):
        raise ValueError(f"policy: expected a Policy, got {policy!r}")
    if policy.preemption == "swap" and memory.host_blocks == 0:
        raise ValueError(
            "policy.preemption: 'swap' needs a memory with host blocks, such as Paged(..., host_blocks=...), got none"
        )


FIRST_COME = Policy()
"""First come, first served, and the last to come is the first to go."""


@typing.no_type_check
@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Choices:
    """The same as values, so that one compiled program serves many policies; all i32[] or bool[].

    Of what is left out of the program it is known beforehand that nobody chooses it: a program for one policy holds no
    other.
    """

    order: jax.Array  # place in Order
    overtake: jax.Array
    prefill_first: jax.Array
    chunked: jax.Array
    reserve_output: jax.Array
    max_adapters: jax.Array
    victim: jax.Array  # place in Victim
    static: tuple[Policy, ...] = dataclasses.field(metadata={"static": True}, default=(FIRST_COME,))
    """Policies that may be chosen."""

    def may(self, name: str, *values: object) -> bool:
        """Whether any of the policies has one of these values."""
        return any(getattr(policy, name) in values for policy in self.static)

    @property
    def limits_adapters(self) -> bool:
        """Whether any of the policies does."""
        return any(policy.max_adapters is not None for policy in self.static)

    def swaps(self, memory: KVMemory[Any]) -> bool:
        """Whether victims go to the host."""
        return self.static[0].swaps(memory)


def choices(policy: Policy, among: tuple[Policy, ...] = ()) -> Choices:
    """A policy as values, for a program that serves all of `among`.

    Raises:
      ValueError: if the policy is not among them, so that the program might not hold what it chooses; or they differ
        in `preemption`, which changes what a program has to hold.
    """
    among = among or (policy,)
    kinds = sorted({some.preemption for some in (policy, *among)})
    if len(kinds) > 1:
        raise ValueError(f"among: expected policies of one kind of preemption, got {' and '.join(kinds)}")
    if policy not in among:
        raise ValueError(f"among: expected every policy that is chosen, got {len(among)} without {policy}")
    return Choices(
        order=jnp.int32(typing.get_args(Order).index(policy.order)),
        overtake=jnp.bool(policy.overtake),
        prefill_first=jnp.bool(policy.first == "prefill"),
        chunked=jnp.bool(policy.chunked),
        reserve_output=jnp.bool(policy.reserve_output),
        max_adapters=jnp.int32(2**31 - 1 if policy.max_adapters is None else policy.max_adapters),
        victim=jnp.int32(typing.get_args(Victim).index(policy.victim)),
        static=tuple(dict.fromkeys(among)),
    )


def as_choices(policy: Policy | Choices) -> Choices:
    """Whichever it is, as values."""
    return choices(policy) if isinstance(policy, Policy) else policy


def select(place: Int32[Array, ""], *options: Int32[Array, "*shape"]) -> Int32[Array, "*shape"]:
    """The option at this place."""
    chosen = options[0]
    for index, option in enumerate(options[1:], 1):
        chosen = jnp.where(place == index, option, chosen)
    return chosen
