"""Which earlier tokens a layer can still see, and so which blocks it may let go.

All layers of a group have the same window. A sliding window counts the current token: with `window` W the token at
position p sees positions p - W + 1 to p. Chunked-local attention sees back to the beginning of its chunk only.
"""

import dataclasses
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int32

from paxkv.sizes import require_int


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class Group:
    """Layers that see the same tokens and therefore share a block table.

    Attributes:
      block_size: tokens in a block. The blocks of all groups have the same bytes, so layers of smaller tokens have
        larger blocks.
      window: of sliding-window layers; None for all tokens.
      chunk: of chunked-local layers; None for all tokens.
      layers: which they are, in the order of the entries of the KV cache that they store in. A group alone may leave
        them out: it then has all layers, each with its own entry.
    """

    block_size: int
    window: int | None = None
    chunk: int | None = None
    layers: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        """Refuses sizes that are not positive, a layer that is both, and one that is there twice."""
        require_int("block_size", self.block_size)
        for name in ("window", "chunk"):
            if getattr(self, name) is not None:
                require_int(name, getattr(self, name))
        if self.window is not None and self.chunk is not None:
            raise ValueError(
                f"window, chunk: expected at most one, got {self.window} and {self.chunk}; make a group of each"
            )
        for layer in self.layers:
            require_int("layers", layer, minimum=0)
        if len(set(self.layers)) < len(self.layers):
            raise ValueError(f"layers: expected none twice, got {self.layers}")

    @property
    def sees_all(self) -> bool:
        """Whether nothing ever leaves the view."""
        return self.window is None and self.chunk is None

    def out_of_view(self, stored: jax.Array) -> jax.Array:
        """Tokens at the beginning that no token after the first `stored` ones can see."""
        if self.window is not None:
            return jnp.maximum(stored - self.window + 1, 0)
        if self.chunk is not None:
            return stored // self.chunk * self.chunk
        return jnp.zeros_like(stored)

    def most_blocks(self, tokens: jax.Array, max_chunk: int) -> jax.Array:
        """Blocks that a sequence of so many tokens can come to hold at once, computing `max_chunk` in a step.

        A window that straddles a block boundary takes one block more than its size suggests.
        """
        blocks = -(-tokens // self.block_size)
        if self.window is not None:
            seen = jnp.minimum(self.window - 1 + max_chunk, tokens)
            return jnp.minimum(blocks, -(-seen // self.block_size) + 1)
        if self.chunk is not None:
            seen = jnp.minimum(self.chunk + max_chunk, tokens)
            straddles = int(self.chunk % self.block_size != 0)
            return jnp.minimum(blocks, -(-seen // self.block_size) + straddles)
        return blocks

    def can_continue(
        self, present: Bool[Array, " blocks"], linked: Bool[Array, " blocks"], hits: Int32[Array, ""]
    ) -> Bool[Array, " blocks_and_one"]:
        """For every number of blocks from none on: whether a prompt could continue after them with what is cached.

        Args:
          present: blocks of the prompt that are cached.
          linked: those that moreover continue the cached block before them.
          hits: blocks that are cached and linked from the first one on.
        """
        count = present.shape[0]
        ends = jnp.arange(count + 1, dtype=jnp.int32)
        if self.sees_all:
            return ends <= hits
        # The run of cached blocks that ends with each block: in a run, all but the first continue the one before.
        position = jnp.arange(count, dtype=jnp.int32)
        broken_at = jax.lax.cummax(jnp.where(present, -1, position))
        restarted_at = jax.lax.cummax(jnp.where(present & ~linked, position, 0))
        first = jnp.maximum(broken_at + 1, restarted_at)
        first = jnp.concatenate([jnp.zeros(1, jnp.int32), first])
        return (first * self.block_size <= self.out_of_view(ends * self.block_size)) | (ends == 0)


def group_layers(windows: Sequence[int | None], block_size: int) -> tuple[Group, ...]:
    """The groups of a model some of whose layers have a window.

    A block holds `block_size` tokens of as many layers as the largest group has, and any group may take any block:
    the first layers of all groups share one entry of the KV cache, the second ones another, and so on. What a window
    gives back thereby serves layers that have none. A group with fewer layers leaves entries of its blocks empty, so
    all are made as large as the rarest kind of layer is common, and a commoner kind is cut into several. Only where
    the kinds differ by less than half is every kind one group: cutting would leave more empty.

    Args:
      windows: of each layer, the tokens that it sees; None for all.
      block_size: tokens in a block, of every group.

    Returns:
      Those that see everything first, then from the widest window to the narrowest; nothing if no layer has a window.
    """
    kinds: dict[int | None, list[int]] = {}
    for layer, window in enumerate(windows):
        kinds.setdefault(window, []).append(layer)
    if set(kinds) <= {None}:
        return ()
    rarest, commonest = (of(map(len, kinds.values())) for of in (min, max))
    size = commonest if 2 * commonest < 3 * rarest else rarest
    return tuple(
        Group(block_size, window, layers=tuple(layers[first : first + size]))
        for window, layers in sorted(kinds.items(), key=lambda kind: (kind[0] is not None, -(kind[0] or 0)))
        for first in range(0, len(layers), size)
    )


def place_of(groups: Sequence[Group], layer: int) -> tuple[int, int]:
    """The group that a layer belongs to, and which entry of the KV cache it stores in.

    Raises:
      ValueError: it belongs to none.
    """
    if len(groups) == 1 and not groups[0].layers:
        return 0, layer
    for g, group in enumerate(groups):
        if layer in group.layers:
            return g, group.layers.index(layer)
    raise ValueError(f"layer: expected one of those in the memory's groups, got {layer}, which is in none of {groups}")


def num_places(groups: Sequence[Group], layers: int) -> int:
    """Entries that the KV cache of a model with so many layers has: one for each layer of the largest group."""
    return max(len(group.layers) or layers for group in groups)
