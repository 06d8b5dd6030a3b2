"""The shape of a decoder: every number a Llama-family model needs, checked once, on the host."""

import dataclasses


@dataclasses.dataclass(frozen=True)
class DecoderConfig:
    """The static shape of a Llama-architecture decoder; hashable, so it can key a compiled program.

    Raises:
      ValueError: A size is not positive, `kv_heads` does not divide `q_heads`, or `head_dim` is odd.
    """

    vocab: int  # distinct token ids
    width: int  # of the residual stream
    layers: int
    q_heads: int
    kv_heads: int  # each serves q_heads / kv_heads consecutive query heads
    head_dim: int
    ffn: int  # inner width of the SwiGLU block
    max_len: int = 1024  # tokens of context the weights were trained for
    rope_theta: float = 10_000.0
    norm_eps: float = 1e-5
    tied_embeddings: bool = True  # the embedding is also the output projection

    def __post_init__(self) -> None:
        """A config that exists is a valid one, however it was made."""
        for name in ("vocab", "width", "layers", "q_heads", "kv_heads", "head_dim", "ffn", "max_len"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        for name in ("rope_theta", "norm_eps"):
            # Written so that NaN fails too.
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} must be above 0, got {getattr(self, name)}")
        if self.q_heads % self.kv_heads:
            raise ValueError(f"kv_heads must divide q_heads, got q_heads={self.q_heads} and kv_heads={self.kv_heads}")
        if self.head_dim % 2:
            raise ValueError(f"head_dim must be even, RoPE turns pairs; got {self.head_dim}")
