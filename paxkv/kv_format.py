"""In which form keys and values are stored: element type, scales, and what is kept as it is."""

import dataclasses
import re
import typing
from collections.abc import Callable
from fractions import Fraction
from typing import Any, Literal

import jax.numpy as jnp

from paxkv.model_shapes import KVShape
from paxkv.sizes import require_bool, require_int

Element = Literal["f32", "bf16", "f16", "e4m3", "e5m2", "int8", "int4"]
Granularity = Literal["none", "layer", "head", "channel", "block_head", "token_head"]
ScaleType = Literal["f32", "bf16", "pow2"]
Calibration = Literal["static", "first_write", "dynamic"]

_DTYPES: dict[str, str] = {
    "f32": "float32",
    "bf16": "bfloat16",
    "f16": "float16",
    "e4m3": "float8_e4m3fn",
    "e5m2": "float8_e5m2",
    "int8": "int8",
    "int4": "int4",
}
_SCALE_DTYPES: dict[str, str] = {"f32": "float32", "bf16": "bfloat16", "pow2": "float8_e8m0fnu"}
PLAIN: tuple[Element, ...] = ("f32", "bf16", "f16")
# How the scales of each granularity can come about, the usual way first.
CALIBRATIONS: dict[Granularity, tuple[Calibration, ...]] = {
    "none": (),
    "layer": ("static", "first_write"),
    "head": ("static", "first_write"),
    "channel": ("static", "first_write"),
    "block_head": ("dynamic", "first_write"),
    "token_head": ("dynamic",),
}


@dataclasses.dataclass(frozen=True)
class TensorFormat:
    """How the keys, or the values, of a layer are stored.

    Attributes:
      element: type of what is stored. Anything narrower than 16 bits is quantised from bfloat16, as a server would.
      granularity: what shares a scale: everything, without one (`none`, scale 1); a layer; a KV head; `channels`
        neighbouring channels of a KV head (keys only); a block and KV head; or a token and KV head.
      scale_type: of the scales: f32, bf16, or powers of two (`pow2`, one byte). Rounded up, so that nothing is clipped.
      calibration: where scales come from: `static`, from a calibration that was made before; `first_write`, from the
        first step that stores anything they apply to, after which larger values are clipped; `dynamic`, from the values
        themselves: a block's scale grows with them, and what the block holds is quantised anew. None for the usual
        one of the granularity.
      channels: with granularity `channel`: how many share a scale; must divide head_dim.
    """

    element: Element = "bf16"
    granularity: Granularity = "none"
    scale_type: ScaleType = "f32"
    calibration: Calibration | None = None
    channels: int = 1

    def __post_init__(self) -> None:
        """Refuses words that are none and combinations that mean nothing; fills in the usual calibration."""
        words = {"element": Element, "granularity": Granularity, "scale_type": ScaleType}
        for name, choices in words.items():
            if getattr(self, name) not in typing.get_args(choices):
                raise ValueError(
                    f"{name}: expected one of {', '.join(typing.get_args(choices))}, got {getattr(self, name)!r}"
                )
        if self.element in PLAIN and self.granularity != "none":
            raise ValueError(
                f"granularity: expected 'none' for elements of {self.element}, which are stored as they are, got "
                f"{self.granularity!r}"
            )
        if self.element in ("int8", "int4") and self.granularity == "none":
            raise ValueError(
                f"granularity: expected one with scales for {self.element}, which without one holds whole numbers "
                "only, got 'none'"
            )
        ways = CALIBRATIONS[self.granularity]
        if self.calibration is None and ways:
            object.__setattr__(self, "calibration", ways[0])
        if self.calibration is not None and self.calibration not in ways:
            raise ValueError(
                f"calibration: expected {' or '.join(ways) or 'None'} for scales of granularity "
                f"{self.granularity!r}, got {self.calibration!r}"
            )
        require_int("channels", self.channels)
        if self.channels != 1 and self.granularity != "channel":
            raise ValueError(
                f"channels: expected 1 unless granularity is 'channel', got {self.channels} with {self.granularity!r}"
            )
        if self.scale_type != "f32" and self.granularity == "none":
            raise ValueError(f"scale_type: expected 'f32' without scales, got {self.scale_type!r}")

    @property
    def name(self) -> str:
        """What tells this format from every other, in short: `e4m3_token_head`, `int8_head:pow2:first_write`."""
        usual = (CALIBRATIONS[self.granularity] or (None,))[0]
        marks = [self.element if self.granularity == "none" else f"{self.element}_{self.granularity}"]
        marks += [self.scale_type] if self.scale_type != "f32" else []
        marks += [str(self.calibration)] if self.calibration != usual else []
        marks += [str(self.channels)] if self.channels != 1 else []
        return ":".join(marks)

    @property
    def quantised(self) -> bool:
        """Whether values lose more than a rounding to 16 bits."""
        return self.element not in PLAIN

    @property
    def dtype(self) -> jnp.dtype:
        """Of the elements."""
        return jnp.dtype(_DTYPES[self.element])

    @property
    def scale_dtype(self) -> jnp.dtype:
        """Of the scales."""
        return jnp.dtype(_SCALE_DTYPES[self.scale_type])

    @property
    def element_bytes(self) -> int | Fraction:
        """Bytes of an element, half a byte for 4-bit integers."""
        return Fraction(1, 2) if self.element == "int4" else self.dtype.itemsize

    def scale_bytes(self, granularity: Granularity) -> int:
        """Bytes of one scale if they have this granularity, else 0."""
        return self.scale_dtype.itemsize if self.granularity == granularity else 0


@dataclasses.dataclass(frozen=True)
class KVFormat:
    """How the keys and values of a model are stored.

    Attributes:
      k: of the keys, after RoPE.
      v: of the values.
      precise: what is kept as it is, is kept in this.
      precise_layers: layers whose keys and values are kept so.
      precise_tokens: first tokens of every sequence whose keys and values are kept so, beside the blocks; many heads
        look at them most of the time (Xiao et al. 2023, arXiv 2309.17453). Their slots in the blocks stay unused.
      rotate: multiply keys and queries by an orthonormal Hadamard matrix, which spreads outliers over the head and
        leaves their products as they are; head_dim must be a power of two.
    """

    k: TensorFormat = TensorFormat()
    v: TensorFormat = TensorFormat()
    precise: Element = "bf16"
    precise_layers: tuple[int, ...] = ()
    precise_tokens: int = 0
    rotate: bool = False

    def __post_init__(self) -> None:
        """Refuses what cannot be."""
        if self.precise not in PLAIN:
            raise ValueError(f"precise: expected one of {', '.join(PLAIN)}, got {self.precise!r}")
        if self.v.granularity == "channel":
            raise ValueError(
                "v.granularity: expected another than 'channel', which is of keys: their factor goes into the queries, "
                "and values have nothing like it"
            )
        for layer in self.precise_layers:
            require_int("precise_layers", layer, minimum=0)
        if list(self.precise_layers) != sorted(set(self.precise_layers)):
            raise ValueError(f"precise_layers: expected each once and in order, got {list(self.precise_layers)}")
        if require_int("precise_tokens", self.precise_tokens, minimum=0) and not (self.k.quantised or self.v.quantised):
            raise ValueError(
                f"precise_tokens: expected 0 where all are stored as they are, got {self.precise_tokens} with "
                f"{self.k.name}"
            )
        if self.precise_tokens and (self.k.granularity, self.k.calibration) == ("channel", "first_write"):
            raise ValueError(
                "k.calibration: expected 'static' for channels with precise_tokens, whose keys are divided by the "
                "factors that the queries are multiplied by before any other key is seen, got 'first_write'"
            )
        if self.precise != "bf16" and not (self.precise_layers or self.precise_tokens):
            raise ValueError(f"precise: expected 'bf16' where nothing is kept in it, got {self.precise!r}")
        require_bool("rotate", self.rotate)

    @property
    def name(self) -> str:
        """What tells this format from every other, in short; `scheme` reads it."""
        words = [self.k.name if self.k == self.v else f"{self.k.name}+{self.v.name}"]
        words += [f"first{self.precise_tokens}"] if self.precise_tokens else []
        words += ["layers" + "-".join(map(str, self.precise_layers))] if self.precise_layers else []
        words += [f"precise_{self.precise}"] if self.precise != "bf16" else []
        words += ["rotated"] if self.rotate else []
        return ":".join(words)

    def of_layer(self, layer: int) -> "KVFormat":
        """The format of one layer: equal for all that store alike."""
        if layer in self.precise_layers:
            return KVFormat(TensorFormat(self.precise), TensorFormat(self.precise), rotate=self.rotate)
        return dataclasses.replace(self, precise_layers=(), precise=self.precise if self.precise_tokens else "bf16")

    def shape(self, layers: int, kv_heads: int, head_dim: int) -> KVShape:
        """What a token takes in this format, scales that lie beside the blocks included.

        Raises:
          ValueError: a precise layer does not exist, channels do not divide head_dim, or head_dim is odd in 4 bits.
        """
        check_shape(self, layers, head_dim)
        return KVShape(
            layers=layers,
            kv_heads=kv_heads,
            head_dim=head_dim,
            element_bytes=self.k.element_bytes,
            scale_bytes_per_token_head=self.k.scale_bytes("token_head"),
            scale_bytes_per_block_head=self.k.scale_bytes("block_head"),
            v_element_bytes=self.v.element_bytes,
            v_scale_bytes_per_token_head=self.v.scale_bytes("token_head"),
            v_scale_bytes_per_block_head=self.v.scale_bytes("block_head"),
            precise_layers=len(self.precise_layers),
            precise_tokens=self.precise_tokens,
            precise_element_bytes=TensorFormat(self.precise).dtype.itemsize,
        )


def check_shape(fmt: KVFormat, layers: int, head_dim: int) -> None:
    """Refuses a format that a model of this shape cannot have.

    Raises:
      ValueError: see `KVFormat.shape`.
    """
    beyond = [layer for layer in fmt.precise_layers if layer >= layers]
    if beyond:
        raise ValueError(f"precise_layers: expected layers below {layers}, got {beyond}")
    if fmt.k.granularity == "channel" and head_dim % fmt.k.channels:
        raise ValueError(f"k.channels: expected a divisor of head_dim = {head_dim}, got {fmt.k.channels}")
    if fmt.rotate and head_dim & (head_dim - 1):
        raise ValueError(f"rotate: expected False unless head_dim is a power of two, got True with {head_dim}")
    if "int4" in (fmt.k.element, fmt.v.element) and head_dim % 2:
        raise ValueError(f"element: 'int4' packs pairs, so head_dim must be even, got {head_dim}")


_TENSOR = re.compile(
    rf"({'|'.join(typing.get_args(Element))})(?:_({'|'.join(typing.get_args(Granularity))}))?(?:_(k|v))?"
)
_WORDS = re.compile(
    rf"(?P<scale_type>{'|'.join(typing.get_args(ScaleType))})"
    rf"|(?P<calibration>{'|'.join(typing.get_args(Calibration))})"
    r"|(?P<channels>\d+)"
    r"|first(?P<precise_tokens>\d+)"
    r"|layers(?P<precise_layers>\d+(?:-\d+)*)"
    rf"|precise_(?P<precise>{'|'.join(PLAIN)})"
    r"|(?P<rotate>rotated)"
)
_READ: dict[str, Callable[[str], Any]] = {
    "channels": int,
    "precise_tokens": int,
    "precise_layers": lambda word: tuple(int(layer) for layer in word.split("-")),
    "rotate": bool,
}
_OF_TENSOR = ("scale_type", "calibration", "channels")


def scheme(name: str) -> KVFormat:
    """The format of a name.

    An element, what shares a scale, and `_k` or `_v` if it is of keys or values alone, the other being bf16: `bf16`,
    `e4m3_none`, `int8_token_head`, `e4m3_layer_k`. Or keys and values apart: `int8_head+e4m3_layer`. Behind each, after
    colons, what is not as usual: the type of scales, how they come about, channels that share one (`int8_head:pow2`,
    `e4m3_channel:first_write:8`); and behind the last what is kept in high precision, the first tokens (`first4`) or
    layers (`layers0-29`), in `precise_f32` if not in bf16, and `rotated`.

    Raises:
      ValueError: the name is none, or what it says cannot be.
    """
    tensors, options, only = [], {}, None
    parts = name.split("+")
    for part in parts:
        first, *words = part.split(":")
        match = _TENSOR.fullmatch(first)
        found = [_WORDS.fullmatch(word) for word in words]
        if match is None or None in found or len(parts) > 2 or (match[3] and len(parts) > 1):
            raise _no_scheme(name)
        named = {key: word for m in found if m is not None for key, word in m.groupdict().items() if word is not None}
        if len(named) < len(words) or (part is not parts[-1] and named.keys() - set(_OF_TENSOR)):
            raise _no_scheme(name)
        fields = {key: _READ.get(key, str)(word) for key, word in named.items()}
        # The patterns let nothing but the literals through.
        own: dict[str, Any] = {key: fields.pop(key) for key in _OF_TENSOR if key in fields}
        tensors.append(TensorFormat(match[1], match[2] or "none", **own))  # pyright: ignore[reportArgumentType]
        options, only = fields, match[3]
    k, v = tensors[0], tensors[-1]
    return KVFormat(TensorFormat() if only == "v" else k, TensorFormat() if only == "k" else v, **options)


def _no_scheme(name: str) -> ValueError:
    return ValueError(
        "scheme: expected ELEMENT or ELEMENT_GRANULARITY, either with _k or _v, or two of them with a + between, of "
        f"the elements {', '.join(typing.get_args(Element))} and granularities "
        f"{', '.join(typing.get_args(Granularity))}, and behind colons {', '.join(typing.get_args(ScaleType))}, "
        f"{', '.join(typing.get_args(Calibration))}, a number of channels, first<tokens>, layers<i>-<j>, precise_f32 "
        f"or rotated, got {name!r}"
    )
