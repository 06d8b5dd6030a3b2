"""What the three memories have in common: one interface, so that they differ in nothing else.

A memory is a static description (hashable, so a jitted function is compiled once for it) and a state. Its
methods are pure functions of the state; they allocate, they never touch the data. Memory is counted in the
units in which a memory hands it out (blocks, page groups, reserved ranges), and the scheduler only ever
compares units of the same memory.
"""

import dataclasses
import typing
from collections.abc import Sequence
from typing import Literal, NamedTuple, Protocol, TypeVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int32

from paxkv.kv_cache import AttentionSpec, KVCache, KVPool
from paxkv.seqs import Seqs
from paxkv.sizes import require_int
from paxkv.swap_state import Moves
from paxkv.windows import Group

State = TypeVar("State")


class Content(NamedTuple):
    """What a request's keys and values depend on, for memories that share what is equal."""

    tokens: Int32[Array, " width"]  # all that are known, then anything
    adapter: Int32[Array, ""]  # of the weights, 0 for none
    salt: Int32[Array, ""]  # keeps apart who must not learn from hits what others asked
    priority: Int32[Array, ""]  # of what it leaves in the cache; lower goes first
    resumed: Bool[Array, ""]  # it was preempted: its hits are counted apart
    lookup: Bool[Array, ""]  # whether to look for what is cached, for one who wants all tokens computed


def content(tokens: Int32[Array, " width"], adapter: int = 0, salt: int = 0, priority: int = 0) -> Content:
    """The content of a request that is admitted for the first time."""
    return Content(
        tokens=tokens,
        adapter=jnp.int32(adapter),
        salt=jnp.int32(salt),
        priority=jnp.int32(priority),
        resumed=jnp.bool(False),
        lookup=jnp.bool(True),
    )


class Ask(NamedTuple):
    """What a request wants from memory when it asks to be admitted."""

    known_tokens: Int32[Array, ""]  # prompt, and what it had generated before it was preempted
    prompt_tokens: Int32[Array, ""]
    final_tokens: Int32[Array, ""]  # what it will have stored when it ends; NEVER if longer than a sequence may be
    content: Content | None = None  # needed by memories with a prefix cache
    sequences: Int32[Array, ""] | int = 1  # that will share the prompt and must run together, itself included
    room_tokens: Int32[Array, ""] | None = None  # that it wants room for now, if more than it knows

    @property
    def promised_tokens(self) -> Int32[Array, ""]:
        """What it is promised room for if it is admitted."""
        return self.known_tokens if self.room_tokens is None else self.room_tokens

    @property
    def most_tokens(self) -> Int32[Array, ""]:
        """The most it can come to hold: an end before what is known already would be a mistake, not a limit."""
        return jnp.maximum(self.known_tokens, self.final_tokens)


@typing.no_type_check
@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Limits:
    """How much of a memory may be used. Values, not shapes: one compiled program serves many budgets."""

    units: jax.Array  # i32[]; from 1 to the memory's `num_units`
    watermark: jax.Array  # i32[]; units kept back from admissions while anything runs


def limits(units: int, watermark: int = 0) -> Limits:
    """Host side: these limits.

    Raises:
      ValueError: there would be no unit, or less than none kept back.
    """
    require_int("units", units)
    require_int("watermark", watermark, minimum=0)
    require_int32(units=units, watermark=watermark)
    return Limits(units=jnp.int32(units), watermark=jnp.int32(watermark))


@typing.no_type_check
@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Usage:
    """Where the slots of a memory are, in tokens. The four kinds add up to its capacity.

    The kinds are those of PagedAttention (SOSP'23), section 3.1: `reserved` slots will be filled by their owner
    later, `internal` ones belong to a request that ends before it fills them, and `external` is all the rest: free,
    lost to rounding, or held by nobody.
    """

    tokens: jax.Array  # i32[]; slots that hold a token; one that several sequences share counts once
    reserved: jax.Array  # i32[]
    internal: jax.Array  # i32[]
    external: jax.Array  # i32[]
    allocated: jax.Array  # i32[]; slots that no other request can have now, rounding included
    saved: jax.Array  # i32[]; slots that sequences would hold beyond those if nothing were shared


@typing.no_type_check
@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class MapCalls:
    """Calls into the virtual-memory driver since the start. Paged and reserved memory make none.

    The counts wrap around at 2**31; the difference of two readings stays right.
    """

    sync: jax.Array  # i32[]; maps that a step had to wait for
    background: jax.Array  # i32[]; maps made ahead, beside the computation
    unmap: jax.Array  # i32[]


def no_map_calls() -> MapCalls:
    """A count of zero."""
    return MapCalls(sync=jnp.int32(0), background=jnp.int32(0), unmap=jnp.int32(0))


def require_int32(**sizes: int) -> None:
    """Host side: refuses a memory whose sizes cannot be counted in int32.

    Raises:
      ValueError: naming the size.
    """
    for name, size in sizes.items():
        if size >= 2**31:
            raise ValueError(f"{name} must be below 2**31 = {2**31}, as it is counted in int32, got {size}")


@typing.runtime_checkable
class KVMemory(Protocol[State]):
    """A way to hand out the slots of a KV cache to at most `rows` sequences of at most `max_len` tokens."""

    @property
    def rows(self) -> int:
        """Most sequences in flight."""
        ...

    @property
    def max_len(self) -> int:
        """Most tokens of one sequence."""
        ...

    @property
    def num_slots(self) -> int:
        """Slots of the KV arrays: the first axis of every layer of a `KVCache`."""
        ...

    @property
    def capacity(self) -> int:
        """Tokens that the memory budget pays for; less than `num_slots` where addresses are only virtual."""
        ...

    @property
    def num_units(self) -> int:
        """Units that the budget pays for."""
        ...

    @property
    def layer_groups(self) -> tuple[Group, ...]:
        """The layers that see the same tokens, group by group: one of all layers unless some have a window."""
        ...

    @property
    def own_limits(self) -> Limits:
        """All units, and the watermark that the memory was made with."""
        ...

    def with_units(self, units: int) -> "KVMemory[State]":
        """The same memory of another size and without a watermark, both of which `limits` can say instead."""
        ...

    def init(self, limits: Limits | None = None) -> State:
        """The empty memory; `own_limits` hold unless `limits` says otherwise."""
        ...

    def seqs(self, state: State) -> Seqs:
        """The sequences in flight."""
        ...

    def admit(self, state: State, ask: Ask) -> tuple[State, Int32[Array, ""], Int32[Array, ""]]:
        """Finds a row for a request, and room for all tokens it already has.

        Returns:
          The state, the row (`rows` if none) and the `Outcome`: `OK`, `LATER` or `NEVER`. Unless it is `OK`, nothing
          changed.
        """
        ...

    def demand(self, state: State, new_lengths: Int32[Array, " rows"]) -> Int32[Array, " rows"]:
        """Units each sequence must newly get before it can hold `new_lengths` tokens."""
        ...

    def held(self, state: State) -> Int32[Array, " rows"]:
        """Units each sequence would give back if it were released."""
        ...

    def available(self, state: State) -> Int32[Array, ""]:
        """Units that the sequences in flight can still get without a release."""
        ...

    @property
    def has_steady_steps(self) -> bool:
        """Whether `steady_steps` may be asked: not of a memory that publishes, copies or gives back in any step."""
        ...

    def steady_steps(self, state: State, grows: Bool[Array, " rows"], steps: Int32[Array, ""]) -> Int32[Array, ""]:
        """How many steps, at most `steps`, in each of which these rows store a token, can be one `append`.

        Afterwards the memory is as if `append` and `background` had been called once a step, but for which of its units
        serves whom. The answer may be too small.
        """
        ...

    def look_ahead(self, state: State, grows: Bool[Array, " rows"], steps: Int32[Array, ""]) -> State:
        """The state after so many steady steps, as far as `usage` looks at it."""
        ...

    def append(
        self, state: State, new_tokens: Int32[Array, " rows"], max_new_tokens: int
    ) -> tuple[State, Int32[Array, ""]]:
        """Makes room for new tokens and counts them as stored: all sequences are served, or none.

        `max_new_tokens` is a static bound of each entry of `new_tokens`.

        Returns:
          The state and the `Outcome`: `OK`, `OUT_OF_BLOCKS` or `OUT_OF_RANGE`. The last two are also recorded as
          faults, since a scheduler that compared `demand` with `available` never sees them.
        """
        ...

    @property
    def publishes(self) -> Literal["on_schedule", "on_compute"] | None:
        """When `publish` is to be called: after `append`, once the step was computed, or never."""
        ...

    @property
    def can_fork(self) -> bool:
        """Whether `fork`, `reorder` and `settle` are there."""
        ...

    def fork(
        self,
        state: State,
        parent: Int32[Array, ""],
        length: Int32[Array, ""],
        promised: Int32[Array, ""],
        content: Content | None,
    ) -> tuple[State, Int32[Array, ""], Int32[Array, ""]]:
        """Starts a sequence that shares the first `length` tokens of the one in row `parent`.

        Returns:
          The state, the row (`rows` if none) and the `Outcome`: `OK`, `LATER` or `OUT_OF_RANGE`. Unless it is `OK`,
          nothing changed.
        """
        ...

    def reorder(self, state: State, sources: Int32[Array, " rows"]) -> State:
        """Every row becomes a fork of row `sources[row]`, which may be itself. All must be active and as long."""
        ...

    @property
    def host_blocks(self) -> int:
        """Blocks of the pool on the host to which `swap_out` and `swap_in` move sequences; 0 if they are not there."""
        ...

    def swap_out(
        self, state: State, rows: Bool[Array, " rows"]
    ) -> tuple[State, Int32[Array, " rows"], Int32[Array, ""], Moves]:
        """Parks the masked sequences on the host: see `paxkv.swap.swap_out`."""
        ...

    def swap_in(
        self, state: State, place: Int32[Array, ""], keep_back: Bool[Array, ""] | bool = True
    ) -> tuple[State, Int32[Array, ""], Int32[Array, ""], Moves]:
        """Lets a parked sequence go on: see `paxkv.swap.swap_in`."""
        ...

    def parked(self, state: State) -> Int32[Array, " places"]:
        """Tokens of the sequence that is parked at each place on the host; 0 at a free one."""
        ...

    def discard(self, state: State, place: Int32[Array, ""]) -> tuple[State, Int32[Array, ""]]:
        """Ends a parked sequence: see `paxkv.swap.discard`."""
        ...

    def vacated(self, before: State, after: State) -> Bool[Array, " units"]:
        """Units that hold nothing of use in `after`, and did in `before`: what a server may want to wipe."""
        ...

    def settle(self, state: State, cache: KVCache) -> tuple[State, KVCache, Int32[Array, ""]]:
        """Copies the blocks that earlier transitions left to be copied, and counts them. Before anything is written."""
        ...

    def publish(
        self,
        state: State,
        tokens: Int32[Array, " tokens"],
        cu_lens: Int32[Array, " rows_and_one"],
        max_new_tokens: int,
    ) -> State:
        """Tells which tokens were stored last, row after row, so that a memory can share what is equal.

        `max_new_tokens` is a static bound of each row's share.
        """
        ...

    def release(self, state: State, rows: Bool[Array, " rows"]) -> State:
        """Takes back everything that the masked sequences hold. A masked row without one is a `DOUBLE_FREE` fault."""
        ...

    def background(self, state: State) -> State:
        """What the memory does while the model computes: vAttention maps ahead."""
        ...

    def of_group(self, state: State, group: int) -> State:
        """The state as the layers of one group see it: what `slots` and `attend` are to be given for them."""
        ...

    def slots(
        self, state: State, row: Int32[Array, " tokens"], position: Int32[Array, " tokens"]
    ) -> Int32[Array, " tokens"]:
        """Where each token's key and value lie; `num_slots` for a row or a position that has no slot."""
        ...

    def attend(
        self,
        state: State,
        q: Float[Array, "tokens q_heads head_dim"],
        k: KVPool,
        v: KVPool,
        cu_q_lens: Int32[Array, " rows_and_one"],
        spec: AttentionSpec,
        *,
        max_q_len: int,
        backend: str | Sequence[str] | None = None,
    ) -> Float[Array, "tokens q_heads head_dim"]:
        """Causal attention of a ragged batch, row by row, over what each row has stored."""
        ...

    def usage(self, state: State, final_lengths: Int32[Array, " rows"]) -> Usage:
        """Splits the capacity into tokens and three kinds of waste.

        `final_lengths` are the tokens that each sequence will have stored when it ends; ignored for free rows.
        """
        ...

    def owners(self, state: State) -> Int32[Array, " units"]:
        """The row that holds each unit, `rows` for a free one: a picture of the memory, one cell a unit."""
        ...

    def map_calls(self, state: State) -> MapCalls:
        """Driver calls since the start."""
        ...


class SharesNothing:
    """What the protocol asks of memories that can share, for those that cannot."""

    @property
    def layer_groups(self) -> tuple[Group, ...]:
        return (Group(1),)

    def of_group(self, state: State, group: int) -> State:
        del group
        return state

    @property
    def has_steady_steps(self) -> bool:
        return True

    @property
    def publishes(self) -> None:
        return None

    @property
    def can_fork(self) -> bool:
        return False

    def publish(self, state: State, tokens: jax.Array, cu_lens: jax.Array, max_new_tokens: int) -> State:
        del tokens, cu_lens, max_new_tokens
        return state

    @property
    def host_blocks(self) -> int:
        return 0

    def swap_out(self, state: State, rows: jax.Array) -> tuple[State, jax.Array, jax.Array, Moves]:
        raise NotImplementedError(f"{type(self).__name__} memory cannot swap")

    def swap_in(
        self, state: State, place: jax.Array, keep_back: jax.Array | bool = True
    ) -> tuple[State, jax.Array, jax.Array, Moves]:
        raise NotImplementedError(f"{type(self).__name__} memory cannot swap")

    def parked(self, state: object) -> jax.Array:
        raise NotImplementedError(f"{type(self).__name__} memory cannot swap")

    def discard(self, state: State, place: jax.Array) -> tuple[State, jax.Array]:
        raise NotImplementedError(f"{type(self).__name__} memory cannot swap")

    def vacated(self, before: State, after: State) -> jax.Array:
        raise NotImplementedError(f"{type(self).__name__} memory has no blocks that could be wiped one by one")

    def settle(self, state: State, cache: KVCache) -> tuple[State, KVCache, jax.Array]:
        return state, cache, jnp.int32(0)

    def fork(
        self, state: State, parent: jax.Array, length: jax.Array, promised: jax.Array, content: Content | None
    ) -> tuple[State, jax.Array, jax.Array]:
        raise NotImplementedError(f"{type(self).__name__} memory cannot fork: its sequences are contiguous")

    def reorder(self, state: State, sources: jax.Array) -> State:
        raise NotImplementedError(f"{type(self).__name__} memory cannot reorder: its sequences are contiguous")


def usage_of_rows(
    capacity: int | Int32[Array, ""],
    seqs: Seqs,
    given: Int32[Array, " rows"],
    taken: Int32[Array, " rows"],
    final_lengths: Int32[Array, " rows"],
) -> Usage:
    """The usage of a memory whose sequences share nothing.

    Args:
      capacity: tokens that the budget pays for.
      seqs: the sequences.
      given: slots each sequence was given.
      taken: slots that are thereby out of reach of others, at least as many.
      final_lengths: tokens that each sequence will have stored when it ends; ignored for free rows.
    """
    fillable = jnp.minimum(given, jnp.maximum(final_lengths, seqs.lengths))
    tokens = jnp.sum(jnp.where(seqs.active, seqs.lengths, 0))
    reserved = jnp.sum(jnp.where(seqs.active, fillable - seqs.lengths, 0))
    internal = jnp.sum(jnp.where(seqs.active, given - fillable, 0))
    return Usage(
        tokens=tokens,
        reserved=reserved,
        internal=internal,
        external=capacity - tokens - reserved - internal,
        allocated=jnp.sum(jnp.where(seqs.active, taken, 0)),
        saved=jnp.int32(0),
    )
