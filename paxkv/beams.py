"""Beam search: of everything that could come next, the sequences of a group go on with the likeliest."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float32, Int32


class Beams(NamedTuple):
    """How each row goes on."""

    sources: Int32[Array, " rows"]  # whose sequence it continues; itself where it can
    tokens: Int32[Array, " rows"]
    scores: Float32[Array, " rows"]  # log probability of what it then has generated


def choose_beams(
    logits: Float32[Array, "rows vocab"],
    scores: Float32[Array, " rows"],
    members: Int32[Array, "rows width"],
    member: Int32[Array, " rows"],
    begins: Bool[Array, " rows"],
) -> Beams:
    """The `width` likeliest continuations of each group, dealt out so that as few rows as possible change.

    Every row that has children keeps its likeliest one; the rows without children take the others, in order.

    Args:
      logits: of each row's next token.
      scores: log probability of what each row has generated.
      members: the rows of each row's group, itself among them.
      member: which of them it is.
      begins: groups that have generated nothing, all of whose rows are equal: the first one's children count.
    """
    width = members.shape[1]
    log_p, tokens = jax.lax.top_k(jax.nn.log_softmax(logits, axis=-1), width)
    totals = (scores[:, None] + log_p)[members]  # [rows, width, width]
    redundant = begins[:, None] & (jnp.arange(width) > 0)[None, :]
    totals = jnp.where(redundant[:, :, None], -jnp.inf, totals)
    best, flat = jax.lax.top_k(totals.reshape(-1, width * width), width)  # of equals the first
    parent, place = flat // width, flat % width  # of each child, likeliest first

    child = jnp.arange(width, dtype=jnp.int32)
    same = parent[:, :, None] == parent[:, None, :]  # [rows, child, earlier child]
    is_first = ~jnp.any(same & (child[None, None, :] < child[None, :, None]), axis=2)
    has_child = jnp.any(parent[:, :, None] == child[None, None, :], axis=1)  # [rows, member]
    own = jnp.argmax(parent == member[:, None], axis=1)  # its first child
    childless_before = jnp.sum(~has_child & (child[None, :] < member[:, None]), axis=1)
    orphan_rank = jnp.cumsum(~is_first, axis=1) - 1
    adopted = jnp.argmax(~is_first & (orphan_rank == childless_before[:, None]), axis=1)
    takes_own = jnp.take_along_axis(has_child, member[:, None], axis=1)[:, 0]
    chosen = jnp.where(takes_own, own, adopted)[:, None]

    source = jnp.take_along_axis(members, jnp.take_along_axis(parent, chosen, axis=1), axis=1)[:, 0]
    token = tokens[source, jnp.take_along_axis(place, chosen, axis=1)[:, 0]]
    return Beams(source, token, jnp.take_along_axis(best, chosen, axis=1)[:, 0])
