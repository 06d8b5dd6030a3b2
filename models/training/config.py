"""What a training run is: the model, its phases, the optimizer, and what is looked at and kept on the way."""

import dataclasses
from typing import Any

from models.config import DecoderConfig
from models.text import VOCAB


@dataclasses.dataclass(frozen=True)
class Phase:
    """A stretch of steps on windows of one length."""

    steps: int
    context: int  # bytes predicted per window
    batch: int  # windows per step


@dataclasses.dataclass(frozen=True)
class OptimizerConfig:
    """AdamW with linear warm-up, cosine decay and clipping; norms and biases are not decayed."""

    peak_learning_rate: float
    final_fraction: float  # of the peak, at the last step
    warmup_steps: int
    b1: float
    b2: float
    weight_decay: float
    clip_norm: float


@dataclasses.dataclass(frozen=True)
class TrainConfig:
    """One training run.

    Raises:
      ValueError: It cannot be trained.
    """

    model: DecoderConfig
    phases: tuple[Phase, ...]
    optimizer: OptimizerConfig
    seed: int  # of the initial weights and of the windows drawn
    out_dir: str
    overwrite: bool = False  # replace a checkpoint that is there
    evaluate_every: int = 0  # steps between looks at held-out text, one more behind the last step; 0: none
    evaluate_windows: int = 16  # looked at each time: the first ones, of the shortest phase's context
    checkpoint_every: int = 0  # steps between checkpoints that an interrupted run goes on from; 0: none

    def __post_init__(self) -> None:
        """A config that exists can be trained."""
        if self.model.vocab < VOCAB:
            raise ValueError(f"model.vocab must hold every byte, {VOCAB}; got {self.model.vocab}")
        if not 0 <= self.seed < 2**32:
            raise ValueError(f"seed must be from 0 to {2**32 - 1}, got {self.seed}")
        if not self.out_dir:
            raise ValueError("out_dir must name a folder for the model, got ''")
        if not self.phases:
            raise ValueError("phases must be at least one, got none")
        for i, phase in enumerate(self.phases):
            if min(phase.steps, phase.context, phase.batch) < 1:
                raise ValueError(f"phases[{i}]: steps, context and batch must be at least 1, got {phase}")
            if phase.context > self.model.max_len:
                raise ValueError(
                    f"phases[{i}].context must not exceed model.max_len={self.model.max_len}, got {phase.context}"
                )
        if self.optimizer.warmup_steps >= self.steps:
            raise ValueError(
                f"optimizer.warmup_steps must be below the {self.steps} steps of all phases, "
                f"got {self.optimizer.warmup_steps}"
            )
        for name, least in (("evaluate_every", 0), ("evaluate_windows", 1), ("checkpoint_every", 0)):
            if getattr(self, name) < least:
                raise ValueError(f"{name} must be at least {least}, got {getattr(self, name)}")

    @property
    def steps(self) -> int:
        """Of all phases."""
        return sum(phase.steps for phase in self.phases)

    @property
    def evaluation_context(self) -> int:
        """Bytes a window predicts when held-out text is looked at: few enough that every phase has taught them."""
        return min(phase.context for phase in self.phases)

    def phase_of(self, step: int) -> Phase:
        """The phase that a step belongs to, counted from 0."""
        ends = 0
        for phase in self.phases:
            ends += phase.steps
            if step < ends:
                return phase
        raise ValueError(f"step must be below the {self.steps} steps of all phases, got {step}")

    def evaluates_after(self, taken: int) -> bool:
        """Whether held-out text is looked at once this many steps are taken."""
        return self.evaluate_every > 0 and (taken % self.evaluate_every == 0 or taken == self.steps)

    def recipe(self) -> dict[str, Any]:
        """What the weights follow from, as JSON holds it; all else says what is looked at, and where files go."""
        return {
            "model": self.model.as_dict(),
            "phases": [dataclasses.asdict(phase) for phase in self.phases],
            "optimizer": dataclasses.asdict(self.optimizer),
            "seed": self.seed,
        }
