"""How large keys and values get on a text, from which static scales of any granularity follow."""

import dataclasses
import json
import os
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float32

from pallas_kernels.kv_write.quantise import largest, scale_up
from paxkv.kv_format import TensorFormat
from paxkv.kv_store import reduce_amax

Amax = Float32[np.ndarray, "layers kv_heads head_dim"]


@dataclasses.dataclass(frozen=True, eq=False)
class Calibration:
    """The largest absolute value of every channel, of keys after RoPE and of values, rounded to bfloat16.

    Raises:
      ValueError: a number is no finite one or negative, or the shapes differ.
    """

    k_amax: Amax
    v_amax: Amax
    tokens: int  # that were looked at
    rotated: bool  # whether keys were multiplied by the Hadamard matrix
    skipped_tokens: int = 0  # at the beginning of each window: what a format keeps as it is needs no scale

    def __post_init__(self) -> None:
        for name in ("k_amax", "v_amax"):
            amax = getattr(self, name)
            if amax.shape != self.k_amax.shape or amax.ndim != 3:
                raise ValueError(f"{name}: expected [layers, kv_heads, head_dim], equal for both, got {amax.shape}")
            if not (np.isfinite(amax) & (amax >= 0)).all():
                at = np.argwhere(~(np.isfinite(amax) & (amax >= 0)))[0]
                layer, head, channel = at.tolist()
                raise ValueError(
                    f"{name}: expected finite numbers, 0 or more, got {amax[layer, head, channel]} in layer {layer}, "
                    f"head {head}, channel {channel}; calibrate again"
                )

    def factor(self, fmt: TensorFormat, layer: int, tensor: str) -> Float32[Array, "..."]:
        """The static scale of one tensor: [], [kv_heads] or [kv_heads, head_dim], by the granularity of `fmt`.

        Args:
          fmt: of the tensor.
          layer: which.
          tensor: `k` or `v`.

        Raises:
          ValueError: a scale would be 0: nothing but zeros was seen of all that shares it.
        """
        with jax.ensure_compile_time_eval():
            amax = reduce_amax(fmt, jnp.asarray(getattr(self, f"{tensor}_amax")[layer]))
            scale = scale_up(amax / largest(fmt.dtype), fmt.scale_dtype).astype(jnp.float32)
            positive = bool(jnp.all(amax > 0))
        if not positive:
            raise ValueError(
                f"{tensor}_amax: expected positive numbers for scales of granularity {fmt.granularity!r}, got 0 in "
                f"layer {layer}; calibrate on more text, or use a coarser granularity"
            )
        return scale


def save_calibration(path: str | os.PathLike[str], calibration: Calibration) -> None:
    """Writes a calibration as JSON."""
    fields = dataclasses.asdict(calibration)
    plain = {name: value.tolist() if isinstance(value, np.ndarray) else value for name, value in fields.items()}
    pathlib.Path(path).write_text(json.dumps(plain) + "\n")


def load_calibration(path: str | os.PathLike[str]) -> Calibration:
    """Reads what `save_calibration` wrote.

    Raises:
      ValueError: the file is no calibration, or holds numbers that no scale can come from.
      OSError: it cannot be read.
    """
    names = [field.name for field in dataclasses.fields(Calibration)]
    try:
        found = json.loads(pathlib.Path(path).read_text())
        arrays = {name: np.asarray(found[name], np.float32) for name in ("k_amax", "v_amax")}
        return Calibration(
            **arrays,
            tokens=int(found["tokens"]),
            rotated=bool(found["rotated"]),
            skipped_tokens=int(found["skipped_tokens"]),
        )
    except (json.JSONDecodeError, KeyError, TypeError) as error:
        raise ValueError(f"{path}: expected a calibration with {', '.join(names)}, got {error!r}") from error
