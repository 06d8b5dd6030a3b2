"""The shape of a decoder: every number and choice in which the families differ, checked once, on the host."""

import dataclasses
import math
import types
from collections.abc import Mapping
from typing import Any, Literal, get_args

from paxkv.sizes import require_bool, require_int

Activation = Literal["silu", "gelu_tanh"]
Dtype = Literal["float32", "bfloat16", "float16"]


@dataclasses.dataclass(frozen=True)
class RopeScaling:
    """How RoPE's angles are slowed down, so that a model reads further than its first training taught it.

    `linear` divides every angle by `factor`. `llama3` divides those of long waves only: a pair that turns at most
    `low_freq_factor` times over `original_max_len` tokens is divided, one that turns at least `high_freq_factor` times
    is left alone, and between the two the frequency moves from one to the other in proportion.

    Raises:
      ValueError: A value is unknown or out of range.
    """

    kind: Literal["linear", "llama3"]
    factor: float
    low_freq_factor: float = 1.0  # llama3 only, as are the next two
    high_freq_factor: float = 4.0
    original_max_len: int = 8192  # tokens of context before the scaling

    def __post_init__(self) -> None:
        """A scaling that exists is a valid one."""
        _require_one_of("kind", self.kind, ("linear", "llama3"))
        for name in ("factor", "low_freq_factor"):
            _require_above_zero(name, getattr(self, name))
        if not self.high_freq_factor > self.low_freq_factor:
            raise ValueError(
                f"high_freq_factor must be above low_freq_factor={self.low_freq_factor}, got {self.high_freq_factor}"
            )
        require_int("original_max_len", self.original_max_len)


@dataclasses.dataclass(frozen=True)
class DecoderConfig:
    """The static shape of a decoder; hashable, so it can key a compiled program.

    The defaults are a Llama's. Fields after `tied_embeddings` are features of other families, off unless given.

    Raises:
      ValueError: A size is not positive, `kv_heads` does not divide `q_heads`, `head_dim` is odd, a choice is unknown,
        or a field says something about a feature that is off.
    """

    vocab: int  # distinct token ids
    width: int  # of the residual stream
    layers: int
    q_heads: int
    kv_heads: int  # each serves q_heads / kv_heads consecutive query heads
    head_dim: int  # need not be width / q_heads
    ffn: int  # inner width of the gated feed-forward block
    max_len: int = 1024  # tokens of context the weights were trained for
    rope_theta: float = 10_000.0
    norm_eps: float = 1e-5
    tied_embeddings: bool = True  # the embedding is also the output projection
    attention_bias: bool = False  # added to queries, keys and values before anything else (Qwen2)
    qk_norm: bool = False  # RMS norm of every query and key head before RoPE (Qwen3, Gemma 3)
    rope_scaling: RopeScaling | None = None  # of layers that turn by rope_theta
    window: int | None = None  # positions a query of a windowed layer sees, its own included (Mistral, Gemma)
    full_every: int | None = (
        None  # layers full_every - 1, 2 * full_every - 1, ... see all positions; None: no layer does
    )
    local_rope_theta: float | None = None  # of windowed layers, never scaled; None: they turn as all others (Gemma 3)
    query_scale: float | None = None  # factor of the attention logits; None: head_dim ** -0.5 (Gemma)
    attention_soft_cap: float | None = None  # attention logits become cap * tanh(logits / cap) (Gemma 2)
    final_soft_cap: float | None = None  # the same of the output logits (Gemma 2)
    norm_plus_one: bool = False  # norms multiply by 1 + scale (Gemma)
    post_norms: bool = False  # norms also behind attention and feed-forward, before the residual sum (Gemma)
    embedding_scale: bool = False  # embeddings are multiplied by sqrt(width) (Gemma)
    activation: Activation = "silu"  # of the gate; gelu_tanh is Gemma's
    dtype: Dtype = "float32"  # of activations; norms, RoPE, softmax and logits are float32 in any case
    param_dtype: Dtype = "float32"  # weights are stored in

    def __post_init__(self) -> None:
        """A config that exists is a valid one, however it was made."""
        for name in ("vocab", "width", "layers", "q_heads", "kv_heads", "head_dim", "ffn", "max_len"):
            require_int(name, getattr(self, name))
        for name in ("window", "full_every"):
            if getattr(self, name) is not None:
                require_int(name, getattr(self, name))
        for name in ("rope_theta", "norm_eps"):
            _require_above_zero(name, getattr(self, name))
        for name in ("local_rope_theta", "query_scale", "attention_soft_cap", "final_soft_cap"):
            if getattr(self, name) is not None:
                _require_above_zero(name, getattr(self, name))
        for name in (
            "tied_embeddings", "attention_bias", "qk_norm", "norm_plus_one", "post_norms", "embedding_scale",
        ):  # fmt: skip
            require_bool(name, getattr(self, name))
        if self.rope_scaling is not None and not isinstance(self.rope_scaling, RopeScaling):
            raise ValueError(f"rope_scaling must be a RopeScaling or None, got {self.rope_scaling!r}")
        if self.q_heads % self.kv_heads:
            raise ValueError(f"kv_heads must divide q_heads, got q_heads={self.q_heads} and kv_heads={self.kv_heads}")
        if self.head_dim % 2:
            raise ValueError(f"head_dim must be even, RoPE turns pairs; got {self.head_dim}")
        for name in ("full_every", "local_rope_theta"):
            if self.window is None and getattr(self, name) is not None:
                raise ValueError(f"{name} is of models with windowed layers, got {getattr(self, name)} and no window")
        _require_one_of("activation", self.activation, get_args(Activation))
        for name in ("dtype", "param_dtype"):
            _require_one_of(name, getattr(self, name), get_args(Dtype))

    def window_of(self, layer: int) -> int | None:
        """Positions a query of this layer sees, its own included; None for all."""
        sees_all = self.full_every is not None and (layer + 1) % self.full_every == 0
        return None if sees_all else self.window

    @property
    def windows(self) -> tuple[int | None, ...]:
        """`window_of` each layer, which is what `paxkv.windows.group_layers` wants to know."""
        return tuple(map(self.window_of, range(self.layers)))

    def as_dict(self) -> dict[str, Any]:
        """The config as JSON holds it: Llama's fields, and those features that are not as the defaults have them.

        A feature that is off goes without saying, so that the description of a model, and with it the model's
        identity, is the same after the decoder has learned another family.
        """
        described = dataclasses.asdict(self)
        # A required field differs from its default: it has none.
        return {
            field.name: described[field.name]
            for field in dataclasses.fields(self)
            if field.name in _ALWAYS_DESCRIBED or getattr(self, field.name) != field.default
        }

    @classmethod
    def of_dict(cls, described: Mapping[str, Any]) -> "DecoderConfig":
        """The config that `as_dict` described.

        Raises:
          ValueError: A field is unknown or missing, or the config is not valid.
        """
        fields = {field.name: field for field in dataclasses.fields(cls)}
        required = {name for name, field in fields.items() if field.default is dataclasses.MISSING}
        if not isinstance(described, Mapping):
            raise ValueError(f"expected the fields of a {cls.__name__}, got {described!r}")
        if described.keys() - fields.keys() or required - described.keys():
            raise ValueError(
                f"expected the fields of a {cls.__name__}; unknown: {sorted(described.keys() - fields.keys())}, "
                f"missing: {sorted(required - described.keys())}"
            )
        scaling = described.get("rope_scaling")
        try:
            rope_scaling = None if scaling is None else RopeScaling(**scaling)
        except TypeError as error:  # of fields that it has not
            raise ValueError(
                f"rope_scaling: expected the fields of a {RopeScaling.__name__}, got {scaling!r}"
            ) from error
        return cls(**{**described, "rope_scaling": rope_scaling})

    @classmethod
    def llama2_7b(cls) -> "DecoderConfig":
        """Llama 2 7B (Touvron et al., arXiv:2307.09288)."""
        return cls(32_000, 4096, 32, 32, 32, 128, 11_008, 4096, tied_embeddings=False)

    @classmethod
    def llama2_13b(cls) -> "DecoderConfig":
        """Llama 2 13B."""
        return cls(32_000, 5120, 40, 40, 40, 128, 13_824, 4096, tied_embeddings=False)

    @classmethod
    def llama2_70b(cls) -> "DecoderConfig":
        """Llama 2 70B."""
        return cls(32_000, 8192, 80, 64, 8, 128, 28_672, 4096, tied_embeddings=False)

    @classmethod
    def llama3_8b(cls) -> "DecoderConfig":
        """Llama 3 8B (arXiv:2407.21783)."""
        return cls(128_256, 4096, 32, 32, 8, 128, 14_336, 8192, **_LLAMA3, tied_embeddings=False)

    @classmethod
    def llama3_70b(cls) -> "DecoderConfig":
        """Llama 3 70B."""
        return cls(128_256, 8192, 80, 64, 8, 128, 28_672, 8192, **_LLAMA3, tied_embeddings=False)

    @classmethod
    def llama3_1_8b(cls) -> "DecoderConfig":
        """Llama 3.1 8B."""
        return dataclasses.replace(cls.llama3_8b(), max_len=131_072, rope_scaling=RopeScaling("llama3", 8.0))

    @classmethod
    def llama3_1_70b(cls) -> "DecoderConfig":
        """Llama 3.1 70B."""
        return dataclasses.replace(cls.llama3_70b(), max_len=131_072, rope_scaling=RopeScaling("llama3", 8.0))

    @classmethod
    def llama3_2_1b(cls) -> "DecoderConfig":
        """Llama 3.2 1B."""
        return cls(128_256, 2048, 16, 32, 8, 64, 8192, 131_072, **_LLAMA3, rope_scaling=RopeScaling("llama3", 32.0))

    @classmethod
    def llama3_2_3b(cls) -> "DecoderConfig":
        """Llama 3.2 3B."""
        return cls(128_256, 3072, 28, 24, 8, 128, 8192, 131_072, **_LLAMA3, rope_scaling=RopeScaling("llama3", 32.0))

    @classmethod
    def smollm2_135m(cls) -> "DecoderConfig":
        """SmolLM2 135M (arXiv:2502.02737)."""
        return cls(49_152, 576, 30, 9, 3, 64, 1536, 8192, rope_theta=100_000.0)

    @classmethod
    def smollm2_360m(cls) -> "DecoderConfig":
        """SmolLM2 360M."""
        return cls(49_152, 960, 32, 15, 5, 64, 2560, 8192, rope_theta=100_000.0)

    @classmethod
    def smollm2_1_7b(cls) -> "DecoderConfig":
        """SmolLM2 1.7B."""
        return cls(49_152, 2048, 24, 32, 32, 64, 8192, 8192, rope_theta=130_000.0)

    @classmethod
    def qwen2_5_0_5b(cls) -> "DecoderConfig":
        """Qwen2.5 0.5B (arXiv:2412.15115)."""
        return cls(151_936, 896, 24, 14, 2, 64, 4864, 32_768, **_QWEN2)

    @classmethod
    def qwen2_5_1_5b(cls) -> "DecoderConfig":
        """Qwen2.5 1.5B."""
        return cls(151_936, 1536, 28, 12, 2, 128, 8960, 131_072, **_QWEN2)

    @classmethod
    def qwen2_5_7b(cls) -> "DecoderConfig":
        """Qwen2.5 7B."""
        return cls(152_064, 3584, 28, 28, 4, 128, 18_944, 131_072, **_QWEN2, tied_embeddings=False)

    @classmethod
    def qwen3_0_6b(cls) -> "DecoderConfig":
        """Qwen3 0.6B (arXiv:2505.09388)."""
        return cls(151_936, 1024, 28, 16, 8, 128, 3072, 40_960, **_QWEN3)

    @classmethod
    def qwen3_1_7b(cls) -> "DecoderConfig":
        """Qwen3 1.7B."""
        return cls(151_936, 2048, 28, 16, 8, 128, 6144, 40_960, **_QWEN3)

    @classmethod
    def qwen3_4b(cls) -> "DecoderConfig":
        """Qwen3 4B."""
        return cls(151_936, 2560, 36, 32, 8, 128, 9728, 40_960, **_QWEN3)

    @classmethod
    def qwen3_8b(cls) -> "DecoderConfig":
        """Qwen3 8B."""
        return cls(151_936, 4096, 36, 32, 8, 128, 12_288, 40_960, **_QWEN3, tied_embeddings=False)

    @classmethod
    def qwen3_14b(cls) -> "DecoderConfig":
        """Qwen3 14B."""
        return cls(151_936, 5120, 40, 40, 8, 128, 17_408, 40_960, **_QWEN3, tied_embeddings=False)

    @classmethod
    def mistral_7b(cls) -> "DecoderConfig":
        """Mistral 7B v0.1 (Jiang et al., arXiv:2310.06825)."""
        return cls(32_000, 4096, 32, 32, 8, 128, 14_336, 32_768, window=4096, tied_embeddings=False)

    @classmethod
    def gemma2_2b(cls) -> "DecoderConfig":
        """Gemma 2 2B (arXiv:2408.00118)."""
        return cls(256_000, 2304, 26, 8, 4, 256, 9216, 8192, **_GEMMA2)

    @classmethod
    def gemma2_9b(cls) -> "DecoderConfig":
        """Gemma 2 9B."""
        return cls(256_000, 3584, 42, 16, 8, 256, 14_336, 8192, **_GEMMA2)

    @classmethod
    def gemma2_27b(cls) -> "DecoderConfig":
        """Gemma 2 27B; width / q_heads takes the place of head_dim in the scale of its logits."""
        return cls(256_000, 4608, 46, 32, 16, 128, 36_864, 8192, **_GEMMA2, query_scale=(4608 / 32) ** -0.5)

    @classmethod
    def gemma3_270m(cls) -> "DecoderConfig":
        """Gemma 3 270M (arXiv:2503.19786)."""
        return cls(262_144, 640, 18, 4, 1, 256, 2048, 32_768, **_GEMMA3, window=512)

    @classmethod
    def gemma3_1b(cls) -> "DecoderConfig":
        """Gemma 3 1B."""
        return cls(262_144, 1152, 26, 4, 1, 256, 6912, 32_768, **_GEMMA3, window=512)

    @classmethod
    def gemma3_4b(cls) -> "DecoderConfig":
        """The text decoder of Gemma 3 4B."""
        return cls(
            262_208,
            2560,
            34,
            8,
            4,
            256,
            10_240,
            131_072,
            **_GEMMA3,
            window=1024,
            rope_scaling=RopeScaling("linear", 8.0),
        )

    @classmethod
    def gemma3_12b(cls) -> "DecoderConfig":
        """The text decoder of Gemma 3 12B."""
        return cls(
            262_208,
            3840,
            48,
            16,
            8,
            256,
            15_360,
            131_072,
            **_GEMMA3,
            window=1024,
            rope_scaling=RopeScaling("linear", 8.0),
        )

    @classmethod
    def gemma3_27b(cls) -> "DecoderConfig":
        """The text decoder of Gemma 3 27B; width / q_heads takes the place of head_dim in the scale of its logits."""
        return cls(
            262_208,
            5376,
            62,
            32,
            16,
            128,
            21_504,
            131_072,
            **_GEMMA3,
            window=1024,
            rope_scaling=RopeScaling("linear", 8.0),
            query_scale=(5376 / 32) ** -0.5,
        )


# Of the fields with a default, those that describe every decoder.
_ALWAYS_DESCRIBED = ("max_len", "rope_theta", "norm_eps", "tied_embeddings")

# What the models of a family have in common.
_LLAMA3: Mapping[str, Any] = types.MappingProxyType({"rope_theta": 500_000.0})
_QWEN2: Mapping[str, Any] = types.MappingProxyType(
    {"rope_theta": 1_000_000.0, "norm_eps": 1e-6, "attention_bias": True}
)
_QWEN3: Mapping[str, Any] = types.MappingProxyType({"rope_theta": 1_000_000.0, "norm_eps": 1e-6, "qk_norm": True})
_GEMMA: Mapping[str, Any] = types.MappingProxyType(
    {
        "norm_eps": 1e-6,
        "norm_plus_one": True,
        "post_norms": True,
        "embedding_scale": True,
        "activation": "gelu_tanh",
    }
)
_GEMMA2: Mapping[str, Any] = types.MappingProxyType(
    {**_GEMMA, "window": 4096, "full_every": 2, "attention_soft_cap": 50.0, "final_soft_cap": 30.0}
)
_GEMMA3: Mapping[str, Any] = types.MappingProxyType(
    {**_GEMMA, "qk_norm": True, "full_every": 6, "rope_theta": 1_000_000.0, "local_rope_theta": 10_000.0}
)


def _require_above_zero(name: str, value: object) -> None:
    # Written so that NaN fails too.
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError(f"{name} must be a number, got {value!r}")
    if not value > 0:
        raise ValueError(f"{name} must be above 0, got {value}")
    if value == math.inf:
        raise ValueError(f"{name} must be above 0 and finite, got {value}")


def _require_one_of(name: str, value: str, known: tuple[str, ...]) -> None:
    if value not in known:
        raise ValueError(f"{name} must be one of {', '.join(known)}, got {value!r}")
