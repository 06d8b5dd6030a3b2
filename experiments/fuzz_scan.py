"""A long series of random operations on one memory, in compiled loops, every check after each of them."""

import zlib
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int32

from experiments import fuzz_misuse as misuse
from experiments import fuzz_operations as operations
from experiments.fuzz_draw import WORDS
from experiments.fuzz_operations import Operation
from experiments.fuzz_world import World, broken, init_world, settle
from paxkv.outcomes import Outcome
from paxkv.paged import Paged

_STEPS = 4096  # operations in a dispatch
_QUICKLY: dict[str, str | bool] = {
    "xla_backend_optimization_level": "0"
}  # tiny arrays gain nothing from the rest, and compile for minutes


class Kind(NamedTuple):
    """An operation, how often it is drawn, and the outcomes that it must come to in a long run."""

    run: Operation
    weight: int
    outcomes: tuple[Outcome, ...] = (Outcome.OK,)


class Fault(NamedTuple):
    """The first operation after which something was wrong."""

    step: int
    operation: str
    outcome: Outcome
    checks: dict[str, int]  # those that failed, and in how many places


class Played(NamedTuple):
    """What came of a series."""

    outcomes: dict[str, dict[Outcome, int]]  # by operation, how often it came to each; 0 where it should have
    faults: int  # operations after which something was wrong; after each the memory began anew, empty
    first: Fault | None
    seen: dict[str, int]  # what the memory did since it began


def kinds(memory: Paged) -> dict[str, Kind]:
    """What can be done to this memory, and what should not be."""
    ok, later, never = Outcome.OK, Outcome.LATER, Outcome.NEVER
    short, double_free, out_of_range = Outcome.OUT_OF_BLOCKS, Outcome.DOUBLE_FREE, Outcome.OUT_OF_RANGE
    waiting = (out_of_range,) if memory.forks else ()  # copies may be pending
    found = {
        "admit": Kind(operations.admit, 10, (ok, later, never)),
        "decode": Kind(operations.decode, 14, (ok, short)),
        "chunk": Kind(operations.chunk, 12, (ok, short)),
        "release": Kind(operations.release, 5),
        "release_twice": Kind(misuse.release_twice, 1, (double_free,)),
        "append_out_of_range": Kind(misuse.append_out_of_range, 1, (out_of_range,)),
        "give_back_twice": Kind(misuse.give_back_twice, 1, (double_free,)),
    }
    if not all(group.sees_all for group in memory.layer_groups):
        found["background"] = Kind(operations.background, 12)
    if memory.cache is not None:
        found |= {
            "publish_one": Kind(operations.publish_one, 8),
            "publish": Kind(operations.publish, 12),
            "evict": Kind(operations.evict, 1),
            "pin": Kind(operations.pin, 1, (ok, out_of_range)),
            "unpin": Kind(operations.unpin, 3),
            "reset": Kind(operations.reset, 1, (ok, later)),
            "bump_epoch": Kind(operations.bump_epoch, 1),
            "publish_too_much": Kind(misuse.publish_too_much, 1, (out_of_range,)),
            "pin_out_of_range": Kind(misuse.pin_out_of_range, 1, (out_of_range,)),
            "unpin_twice": Kind(misuse.unpin_twice, 1, (double_free,)),
        }
    if memory.forks:
        found |= {
            "fork": Kind(operations.fork, 6, (ok, later, out_of_range)),
            "reorder": Kind(operations.reorder, 2, (ok, out_of_range)),
            "copied": Kind(operations.copied, 3),
            "fork_out_of_range": Kind(misuse.fork_out_of_range, 1, (out_of_range,)),
            "reorder_out_of_range": Kind(misuse.reorder_out_of_range, 1, (out_of_range,)),
        }
    if memory.host_blocks:
        found |= {
            "swap_out": Kind(operations.swap_out, 3, (ok, later, never, *waiting)),
            "swap_in": Kind(operations.swap_in, 4, (ok, later, out_of_range)),
            "discard": Kind(operations.discard, 1, (ok, double_free)),
        }
    return found


def play(memory: Paged, name: str, seed: int, steps: int) -> Played:
    """Plays the first `steps` operations of the series that `name` and `seed` stand for.

    The operation at a step does not depend on how many follow: a fault can be played again up to its step.
    """
    key = jax.random.fold_in(jax.random.key(seed), zlib.crc32(name.encode()))
    names, checks = list(kinds(memory)), _names_of_checks(memory)
    carry = (
        init_world(memory),
        jnp.zeros((len(names), len(Outcome)), jnp.int32),
        jnp.int32(0),
        jnp.full(3 + len(checks), -1, jnp.int32),
    )
    dispatch = _dispatch.lower(memory, key, carry, jnp.int32(0), jnp.int32(0)).compile(_QUICKLY)
    for begin in range(0, steps, _STEPS):
        carry = dispatch(key, carry, jnp.int32(begin // _STEPS), jnp.int32(min(steps - begin, _STEPS)))
    world, counts, faults, first = carry
    first = np.asarray(first)
    outcomes = {
        operation: {outcome: int(n) for outcome, n in zip(Outcome, row, strict=True) if n or outcome in kind.outcomes}
        for (operation, kind), row in zip(kinds(memory).items(), np.asarray(counts), strict=True)
    }
    fault = None
    if first[0] >= 0:
        failed = {check: int(n) for check, n in zip(checks, first[3:], strict=True) if n}
        fault = Fault(int(first[0]), names[first[1]], Outcome(int(first[2])), failed)
    return Played(outcomes, int(faults), fault, _seen(memory, world))


def _seen(memory: Paged, world: World) -> dict[str, int]:
    """Counts of what only happens if the series is as hard as it should be."""
    found = {}
    if memory.cache is not None and world.state.stats is not None:
        found |= {"hit_tokens": world.state.stats.hits, "evictions": world.state.stats.evictions}
        if memory.cache.collide:
            found["unpublished"] = world.state.stats.unpublished
    if memory.forks and any(group.block_size > 1 for group in memory.layer_groups):
        found["copies"] = world.copies  # a block of one token is never half full
    if memory.host_blocks:
        found["moves"] = world.moves
    return {name: int(count) for name, count in found.items()}


def _names_of_checks(memory: Paged) -> list[str]:
    world = jax.eval_shape(lambda: init_world(memory))
    none = jax.ShapeDtypeStruct((), jnp.int32)
    found = jax.eval_shape(lambda w, o: broken(memory, w, w, o, o), world, none)
    return [*sorted(found), "expectations_are_met"]


@jax.jit(static_argnames="memory")
def _dispatch(memory: Paged, key: jax.Array, carry: tuple, number: Int32[Array, ""], steps: Int32[Array, ""]) -> tuple:
    """The next `steps` operations, `number` dispatches after the first."""
    every = kinds(memory)
    until = np.cumsum([kind.weight for kind in every.values()], dtype=np.int32)
    words = jax.random.bits(jax.random.fold_in(key, number), (_STEPS, WORDS + 1), jnp.uint32)
    branches = [lambda world, words, kind=kind: kind.run(memory, world, words) for kind in every.values()]

    def one(step: jax.Array, carry: tuple) -> tuple:
        world, counts, faults, first = carry
        drawn = (words[step, WORDS] % jnp.uint32(until[-1])).astype(jnp.int32)
        kind = jnp.sum(drawn >= jnp.asarray(until), dtype=jnp.int32)
        made = jax.lax.switch(kind, branches, world, words[step, :WORDS])
        found = broken(memory, made.before, made.after, made.outcome, made.faults)
        found = jnp.stack([*jax.tree.leaves(found), made.unmet])  # in the order of their names
        wrong = jnp.any(found != 0)
        this = jnp.concatenate([jnp.stack([number * _STEPS + step, kind, made.outcome]), found])
        world = jax.tree.map(
            lambda empty, now: jnp.where(wrong, empty, now), init_world(memory), settle(memory, made.after)
        )
        return (
            world,
            counts.at[kind, made.outcome].add(1),
            faults + wrong.astype(jnp.int32),
            jnp.where(wrong & (first[0] < 0), this, first),
        )

    return jax.lax.fori_loop(0, steps, one, carry)
