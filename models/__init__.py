"""Decoders in flax NNX, their weights, and how a small one is trained."""

from models.checkpoint import load_checkpoint, save_checkpoint
from models.config import DecoderConfig
from models.decoder import Decode, Decoder, make_decode

__all__ = ["Decode", "Decoder", "DecoderConfig", "load_checkpoint", "make_decode", "save_checkpoint"]
