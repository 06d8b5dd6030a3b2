"""A run that takes a second: two phases, evaluated and saved out of step with one another but for step 24."""

import numpy as np

from models.config import DecoderConfig
from models.text import Corpus
from models.training import OptimizerConfig, Phase, TrainConfig

CONFIG = TrainConfig(
    model=DecoderConfig(vocab=256, width=16, layers=1, q_heads=2, kv_heads=1, head_dim=8, ffn=24, max_len=64),
    phases=(Phase(steps=30, context=16, batch=8), Phase(steps=3, context=64, batch=2)),
    optimizer=OptimizerConfig(
        peak_learning_rate=1e-2,
        final_fraction=0.1,
        warmup_steps=3,
        b1=0.9,
        b2=0.99,
        weight_decay=0.1,
        clip_norm=1.0,
    ),
    seed=3,
    out_dir="unused",
    evaluate_every=12,
    evaluate_windows=5,
    checkpoint_every=8,
)
CORPUS = Corpus(
    train=np.frombuffer(b"one block, two blocks, three blocks, four. " * 30, np.uint8),
    heldout=np.frombuffer(b"four blocks, three blocks, two blocks, one. " * 4, np.uint8),
    sha256="of the two",
)

# The same, as small as may be and as a file.
YAML = """
model: {vocab: 256, width: 8, layers: 1, q_heads: 2, kv_heads: 1, head_dim: 4, ffn: 8, max_len: 32}
phases: [{steps: 4, context: 16, batch: 2}]
optimizer: {peak_learning_rate: 1.0e-2, final_fraction: 0.1, warmup_steps: 1, b1: 0.9, b2: 0.99,
            weight_decay: 0.1, clip_norm: 1.0}
seed: 0
evaluate_every: 3
"""
