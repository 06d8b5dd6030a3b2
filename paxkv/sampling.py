"""From logits to tokens."""

import jax
from jaxtyping import Array, Float32, Int32, Key


def sample(
    logits: Float32[Array, "rows vocab"],
    temperatures: Float32[Array, " rows"],
    keys: Key[Array, " rows"],
) -> tuple[Int32[Array, " rows"], Float32[Array, " rows"]]:
    """Samples one token a row: the best one at temperature 0, else from `softmax(logits / temperature)`.

    The token is the best of `logits + temperature * noise` with Gumbel noise, which has that distribution (the
    Gumbel-max trick). Each row draws from its own key, so a request's tokens do not depend on who runs beside it.

    Returns:
      The tokens, and the margin: by how much the best of what was compared leads the second best. A token may differ
      between two correct runs only where this is within rounding.
    """
    noise = jax.vmap(lambda key: jax.random.gumbel(key, logits.shape[1:], logits.dtype))(keys)
    best, tokens = jax.lax.top_k(logits + temperatures[:, None] * noise, 2)
    return tokens[:, 0], best[:, 0] - best[:, 1]
