"""From logits to tokens."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float32, Int32, Key


def sample(
    logits: Float32[Array, "rows vocab"],
    temperatures: Float32[Array, " rows"],
    keys: Key[Array, " rows"],
) -> tuple[Int32[Array, " rows"], Float32[Array, " rows"]]:
    """Samples one token a row: the best one at temperature 0, else from `softmax(logits / temperature)`.

    Each row draws from its own key, so a request's tokens do not depend on who runs beside it.

    Returns:
      The tokens, and the margin: by how much the best logit leads the second best. A greedy token may differ between
      two correct runs only where this is within rounding.
    """
    best = jax.lax.top_k(logits, 2)[0]
    greedy = temperatures == 0
    # Relative to the best, so that a small temperature overflows for none but the hopeless.
    scaled = (logits - best[:, :1]) / jnp.where(greedy, 1.0, temperatures)[:, None]
    drawn = jax.vmap(jax.random.categorical)(keys, scaled)
    tokens = jnp.where(greedy, jnp.argmax(logits, axis=-1), drawn)
    return tokens.astype(jnp.int32), best[:, 0] - best[:, 1]
