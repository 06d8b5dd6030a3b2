"""A model in one format, written in another."""

import json
import os
from typing import Literal, get_args

from models.checkpoint import save_checkpoint
from models.config import Dtype
from models.formats import load_model, load_tokenizer, save_hugging_face
from models.formats.tokenizers import IDS, TOKENIZER
from models.tokenizer import Tokenizer
from models.whole_folder import check_free

Target = Literal["hugging_face", "checkpoint"]
TARGETS: tuple[Target, ...] = get_args(Target)


def convert(
    source: str | os.PathLike[str],
    destination: str | os.PathLike[str],
    target: Target,
    *,
    dtype: Dtype | None = None,
    overwrite: bool = False,
) -> None:
    """Writes the model at `source`, and its tokenizer if it has one, as a folder.

    Raises:
      FileExistsError: `destination` is taken and `overwrite` is false.
      ValueError: `source` cannot be read, or has no form in `target`.
    """
    check_free(destination, overwrite)
    model = load_model(source, dtype=dtype)
    try:
        tokenizer: Tokenizer | None = load_tokenizer(source)
    except ValueError:
        tokenizer = None  # a model is whole without one
    words = {} if tokenizer is None else {"bos_token_id": tokenizer.bos, "eos_token_id": list(tokenizer.eos) or None}
    text = None if tokenizer is None else tokenizer.to_json()
    files = {} if text is None else {TOKENIZER: text, IDS: json.dumps(words, indent=2) + "\n"}
    if target == "hugging_face":
        save_hugging_face(destination, model, files, words=words, overwrite=overwrite)
    else:
        save_checkpoint(destination, model, files, overwrite=overwrite)
