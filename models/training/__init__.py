"""How a small decoder is trained: schedule, evaluation on the way, checkpoints that resume bit for bit, curves."""

from models.training.checkpoints import Checkpoints
from models.training.config import OptimizerConfig, Phase, TrainConfig
from models.training.loop import train
from models.training.step import TrainState

__all__ = ["Checkpoints", "OptimizerConfig", "Phase", "TrainConfig", "TrainState", "train"]
