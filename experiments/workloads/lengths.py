"""Prompt and output lengths drawn from truncated distributions whose means are exactly the ones asked for."""

import numpy as np
from jaxtyping import Float64, Int32
from scipy import optimize

# Mean prompt and output tokens of the two datasets in Kwon et al., "Efficient Memory Management for Large Language
# Model Serving with PagedAttention" (SOSP 2023), figure 11.
PRESETS = {"sharegpt": (161.31, 337.99), "alpaca": (19.31, 58.45)}

Lengths = tuple[Int32[np.ndarray, " requests"], Int32[np.ndarray, " requests"]]


def exponential_lengths(
    rng: np.random.Generator,
    num_requests: int,
    prompt_mean: float,
    output_mean: float,
    max_prompt: int,
    max_total: int,
) -> Lengths:
    """Draws lengths from the truncated exponential with the given means.

    The distribution over whole numbers is `p(prompt, output) ~ exp(a * prompt + b * output)` on `1 <= prompt <=
    max_prompt`, `1 <= output`, `prompt + output <= max_total`, with a and b solved so that the means *after* both
    cuts are `prompt_mean` and `output_mean`. (Cutting two exponentials of those means would shift them instead.)
    What is guaranteed is the distribution's mean; a sample's mean varies around it.

    Args:
        rng: Source of randomness.
        num_requests: Requests to draw. Drawing more leaves the first ones as they were.
        prompt_mean: Mean prompt length in tokens.
        output_mean: Mean output length in tokens.
        max_prompt: Longest prompt in tokens.
        max_total: Longest prompt + output in tokens.

    Returns:
        Prompt and output lengths.

    Raises:
        ValueError: If no such distribution has the means.
    """
    a, b = solve_exponential(prompt_mean, output_mean, max_prompt, max_total)
    prompt_probability, _ = _marginal(a, b, max_prompt, max_total)
    cdf = np.cumsum(prompt_probability)
    u, v = rng.random((num_requests, 2)).T
    prompt = 1 + np.searchsorted(cdf / cdf[-1], u, side="right")
    output = _truncated_geometric(v, b, max_total - prompt)
    return prompt.astype(np.int32), output.astype(np.int32)


def solve_exponential(prompt_mean: float, output_mean: float, max_prompt: int, max_total: int) -> tuple[float, float]:
    """The exponents (a, b) per token of `exponential_lengths`.

    The means determine them: the two-parameter exponential family on the allowed lengths reaches every pair of
    means inside the lengths' convex hull exactly once.

    Raises:
        ValueError: If the means lie outside the hull, or so near its edge that the exponents cannot be found.
    """
    asked = np.array([prompt_mean, output_mean])
    if not (1 < prompt_mean < max_prompt and output_mean > 1 and prompt_mean + output_mean < max_total):
        raise ValueError(
            "exponential lengths need 1 < prompt_mean < max_prompt, output_mean > 1 and prompt_mean + output_mean < "
            f"max_total, got means {prompt_mean} and {output_mean}, max_prompt {max_prompt}, max_total {max_total}"
        )

    def error(exponents: Float64[np.ndarray, "2"]) -> Float64[np.ndarray, "2"]:
        probability, output_given_prompt = _marginal(
            exponents[0] / asked[0], exponents[1] / asked[1], max_prompt, max_total
        )
        prompts = np.arange(1, len(probability) + 1)
        return np.array([probability @ prompts, probability @ output_given_prompt]) / asked - 1

    solution = optimize.root(error, x0=np.array([-1.0, -1.0]), tol=1e-13)
    if not np.abs(error(solution.x)).max() < 1e-9:
        raise ValueError(
            f"no exponents found for means {prompt_mean} and {output_mean} under max_prompt {max_prompt} and "
            f"max_total {max_total}: move the means away from the limits"
        )
    return float(solution.x[0] / prompt_mean), float(solution.x[1] / output_mean)


def uniform_lengths(rng: np.random.Generator, num_requests: int, prompt_mean: float, output_mean: float) -> Lengths:
    """Draws lengths uniformly from 1 to 2 * mean - 1, each end included, so that the mean is exact.

    Raises:
        ValueError: If twice a mean is not a whole number of at least 2.
    """
    high = [2 * mean - 1 for mean in (prompt_mean, output_mean)]
    if not all(1 <= h < 2**31 and h == int(h) for h in high):
        raise ValueError(
            f"uniform lengths need means that are multiples of 0.5 and at least 1, got {prompt_mean} and {output_mean}"
        )
    drawn = 1 + np.floor(rng.random((num_requests, 2)) * high).astype(np.int32)
    return drawn[:, 0].copy(), drawn[:, 1].copy()


def constant_lengths(num_requests: int, prompt_len: float, output_len: float) -> Lengths:
    """The same lengths for every request.

    Raises:
        ValueError: If a length is not a whole number of at least 1.
    """
    if not all(1 <= length < 2**31 and length == int(length) for length in (prompt_len, output_len)):
        raise ValueError(f"constant lengths must be whole numbers >= 1, got {prompt_len} and {output_len}")
    return (
        np.full(num_requests, int(prompt_len), np.int32),
        np.full(num_requests, int(output_len), np.int32),
    )


def _marginal(
    a: float, b: float, max_prompt: int, max_total: int
) -> tuple[Float64[np.ndarray, " prompts"], Float64[np.ndarray, " prompts"]]:
    """Probability of each prompt length 1, 2, ..., and the mean output length given it.

    In logarithms: near the limits an exponent times a length exceeds what a float64 can raise e to.
    """
    outputs = np.arange(1, max_total)
    log_sum = np.logaddexp.accumulate(b * outputs)  # of exp(b * output) up to each output
    log_moment = np.logaddexp.accumulate(b * outputs + np.log(outputs))
    prompts = np.arange(1, min(max_prompt, max_total - 1) + 1)
    longest = max_total - prompts - 1  # index of the longest output that still fits
    log_weight = a * prompts + log_sum[longest]
    weight = np.exp(log_weight - log_weight.max())
    return weight / weight.sum(), np.exp(log_moment[longest] - log_sum[longest])


def _truncated_geometric(u: Float64[np.ndarray, " requests"], b: float, longest: np.ndarray) -> np.ndarray:
    """Inverse of the distribution p(k) ~ exp(b * k), 1 <= k <= longest, at u in [0, 1)."""
    if b == 0:
        return 1 + np.floor(u * longest).astype(np.int64)
    # Written for decay; growth is decay counted from the other end.
    decay = -abs(b)
    k = np.ceil(np.log1p(u * np.expm1(decay * longest)) / decay)
    k = np.clip(k, 1, longest).astype(np.int64)  # u = 0 gives 0, and rounding can pass the end by one
    return k if b < 0 else longest + 1 - k
