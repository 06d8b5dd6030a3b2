"""Arrival times of a renewal process with gamma gaps; Poisson is the case `burstiness = 1`."""

import math

import numpy as np
from jaxtyping import Float64


def gamma_arrivals(
    rng: np.random.Generator, num_requests: int, rate: float, burstiness: float = 1.0, *, rescale: bool = False
) -> Float64[np.ndarray, " requests"]:
    """Draws arrival times with independent gamma gaps of mean 1 / rate.

    The gaps have shape `burstiness` and scale `1 / (rate * burstiness)`, as in vLLM's serving benchmark, so their
    coefficient of variation is `1 / sqrt(burstiness)`. Unlike there, the times are not rescaled to end at
    `num_requests / rate` unless asked for, and no gap is clipped: both bend the process that was asked for. The first
    request arrives after the first gap.

    Args:
        rng: Source of randomness.
        num_requests: Requests to draw. Drawing more leaves the first ones as they were.
        rate: Mean requests per second, > 0; infinity puts every arrival at 0.
        burstiness: Shape of the gaps, > 0: 1 is a Poisson process, less comes in bursts, more is more regular,
            infinity makes every gap 1 / rate.
        rescale: Stretch the times so that the last one is `num_requests / rate`, as vLLM's benchmark does: runs of
            few requests then have the load that was asked for, but more requests do not begin like fewer.

    Returns:
        Arrival times in milliseconds, never decreasing.

    Raises:
        ValueError: If `rate` or `burstiness` is not positive, or all gaps are so short that nothing can be stretched.
    """
    if not rate > 0:
        raise ValueError(f"rate must be > 0 requests per second, got {rate}")
    if not burstiness > 0:
        raise ValueError(f"burstiness must be > 0, got {burstiness}")
    if math.isinf(rate):
        return np.zeros(num_requests)
    if math.isinf(burstiness):
        return np.arange(1, num_requests + 1) * (1e3 / rate)
    times = np.cumsum(rng.gamma(burstiness, 1e3 / (rate * burstiness), num_requests))
    if not rescale or num_requests == 0:
        return times
    if times[-1] == 0:
        raise ValueError(f"burstiness must be larger for {num_requests} requests to be rescaled, got {burstiness}")
    return times * (num_requests * 1e3 / rate / times[-1])
