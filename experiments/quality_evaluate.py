"""A model and its texts, and what comes of reading them with keys and values stored in one way or another."""

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np
import polars as pl
from jaxtyping import Array, Float32, Int32

from experiments import quality_metrics
from experiments.quality_config import Case, Config
from experiments.quality_forward import Subject, attention_errors, read
from experiments.quality_texts import Text, Windows, cut, encode_text, load_text, token_sha256
from models.calibrate import calibrate
from models.checkpoint import model_sha256
from models.decoder import make_decode
from models.formats.load import load_model, load_tokenizer
from models.names import find_model
from models.outliers import with_outlier
from paxkv.calibration import Calibration
from paxkv.kv_format import KVFormat, scheme


@dataclasses.dataclass(eq=False)
class Evaluation:
    """A model that reads windows of texts. Keeps the reference's logits, with which all cases are compared."""

    config: Config
    subject: Subject
    model_sha256: str
    texts: Mapping[str, Text]
    windows: Mapping[str, Windows]  # evaluated, of each text
    calibration_windows: Windows  # of all texts
    _reference: dict[tuple[str, int], Float32[Array, "tokens vocab"]] = dataclasses.field(default_factory=dict)
    _calibrations: dict[int, Calibration] = dataclasses.field(default_factory=dict)

    @property
    def facts(self) -> dict[str, Any]:
        """For the manifest."""
        return {
            "model_sha256": self.model_sha256,
            "texts": {
                name: {"sha256": text.sha256, "windows_sha256": token_sha256(self.windows[name])}
                for name, text in self.texts.items()
            },
            "calibration_sha256": token_sha256(self.calibration_windows),
        }

    def with_outlier(self, factor: int) -> Subject:
        """The model whose keys have an outlier; itself for 1.

        Raises:
          ValueError: see `models.outliers.with_outlier`.
        """
        if factor == 1:
            return self.subject
        decode, params = self.subject.decode, self.subject.params
        changed = with_outlier(decode.config, params, float(factor), self.config.outlier_pair)
        return self.subject._replace(params=changed)

    def evaluate(self, case: Case) -> tuple[pl.DataFrame, dict[str, Any]]:
        """Reads the windows in one way.

        Returns:
          A table of positions, and `clipped` values and, unless there is an outlier, `attention_errors` of each layer
          on the first window of each text. Where only the size of blocks is another and no scale depends on it, instead
          `differing_logits`: how many of one window are not bit for bit what they are in blocks of the usual size.
        """
        fmt = scheme(case.scheme)
        subject = self.with_outlier(case.factor)
        calibration = self._calibration(case.factor, fmt)
        if case.block_size is not None:
            subject = subject._replace(block_size=case.block_size)
            if "block_head" not in (fmt.k.granularity, fmt.v.granularity):
                return self._same_in_other_blocks(subject, fmt, calibration)
        count = self.config.windows if case.factor == 1 else self.config.outlier_windows
        tables, clipped, errors = [], 0, []
        for name, windows in self.windows.items():
            for i, window in enumerate(windows[:count]):
                found = read(subject, window[:-1], fmt, calibration)
                compared = quality_metrics.compare(
                    self._reference_logits(name, i), found.logits, jnp.asarray(window[1:])
                )
                tables.append(quality_metrics.table(compared, name, i))
                clipped += found.clipped
            if case.factor == 1:
                sound = scheme(self.config.reference)
                errors.append(attention_errors(subject, windows[0][:-1], fmt, sound, calibration))
        return pl.concat(tables), {
            "clipped": clipped,
            "attention_errors": np.mean(errors, axis=0).tolist() if errors else [],
        }

    def _same_in_other_blocks(
        self, subject: Subject, fmt: KVFormat, calibration: Calibration | None
    ) -> tuple[pl.DataFrame, dict[str, Any]]:
        window = next(iter(self.windows.values()))[0][:-1]
        here, there = (np.asarray(read(s, window, fmt, calibration).logits) for s in (self.subject, subject))
        differing = int(np.sum(here.view(np.uint32) != there.view(np.uint32)))
        return pl.DataFrame(), {"differing_logits": differing, "attention_errors": []}

    def summary(self, positions: pl.DataFrame, found: dict[str, Any], errors: list[float]) -> dict[str, Any]:
        """Metrics of a case: of all texts together, and the main ones of each by itself."""
        if positions.is_empty():
            return found
        values: dict[str, Any] = quality_metrics.summarise(positions) | found
        if errors:
            values["attention_error"] = float(np.mean(errors))
        for name in self.texts:
            own = quality_metrics.summarise(positions.filter(pl.col("text") == name))
            values |= {f"{metric}_{name}": own[metric] for metric in ("perplexity", "delta_nll", "mean_kl")}
        return values | {"texts": ", ".join(f"{name} {text.sha256[:12]}" for name, text in self.texts.items())}

    def _reference_logits(self, text: str, window: int) -> Float32[Array, "tokens vocab"]:
        """The same for all outliers, which change no bit of a model in floating point."""
        if (text, window) not in self._reference:
            tokens: Int32[np.ndarray, " tokens"] = self.windows[text][window][:-1]
            self._reference[text, window] = read(self.subject, tokens, scheme(self.config.reference)).logits
        return self._reference[text, window]

    def _calibration(self, factor: int, fmt: KVFormat) -> Calibration | None:
        """Of the model with its outlier; None for formats that need none."""
        if "static" not in (fmt.k.calibration, fmt.v.calibration):
            return None
        if factor not in self._calibrations:
            subject = self.with_outlier(factor)
            self._calibrations[factor] = calibrate(subject.decode, subject.params, self.calibration_windows)
        return self._calibrations[factor]


def load(config: Config) -> Evaluation:
    """Loads model and texts, and cuts the windows.

    Raises:
      ValueError: they are not those that the config names, or do not suit one another.
      OSError: a file is missing.
    """
    path = find_model(config.model)
    model = load_model(path, dtype="float32")
    digest = model_sha256(model)
    if config.model_sha256 not in ("", digest):
        raise ValueError(
            f"model_sha256: expected the model {config.model_sha256}, got {digest} in {config.model}; restore it, or "
            "leave model_sha256 out"
        )
    decode, params = make_decode(model)
    if config.context > decode.config.max_len:
        raise ValueError(
            f"context: expected at most {decode.config.max_len}, what {config.model} was trained for, got "
            f"{config.context}"
        )
    texts = {name: load_text(name, text) for name, text in config.texts.items()}
    encode = load_tokenizer(path).encode
    windows, calibration = {}, []
    for name, text in texts.items():
        windows[name] = cut(encode_text(encode, text.evaluated), config.windows, config.context, name)
        limit = config.calibration_windows * config.context + 1
        own = encode_text(encode, text.calibration, limit)
        calibration.append(cut(own, config.calibration_windows, config.context, f"{name} (its part for calibration)"))
    return Evaluation(
        config,
        Subject(decode, params, config.block_size, config.chunk_tokens, config.kernels),
        digest,
        texts,
        windows,
        np.concatenate(calibration)[:, :-1],
    )
