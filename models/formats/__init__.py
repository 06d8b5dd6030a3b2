"""Models and tokenizers in the formats of others: Hugging Face folders, GGUF files, llama2.c binaries."""

from models.formats.hugging_face import save_hugging_face
from models.formats.load import load_model, load_tokenizer, recognise
from models.formats.tensors import Shardings

__all__ = ["Shardings", "load_model", "load_tokenizer", "recognise", "save_hugging_face"]
