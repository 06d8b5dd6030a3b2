"""Which earlier tokens a layer can still see, and so which blocks it may let go.

All layers of a group have the same window. A sliding window counts the current token: with `window` W the token at
position p sees positions p - W + 1 to p. Chunked-local attention sees back to the beginning of its chunk only.
"""

import dataclasses

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
    """

    block_size: int
    window: int | None = None
    chunk: int | None = None

    def __post_init__(self) -> None:
        """Refuses sizes that are not positive, and a layer that is both."""
        require_int("block_size", self.block_size)
        for name in ("window", "chunk"):
            if getattr(self, name) is not None:
                require_int(name, getattr(self, name))
        if self.window is not None and self.chunk is not None:
            raise ValueError(
                f"window, chunk: expected at most one, got {self.window} and {self.chunk}; make a group of each"
            )

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
