"""A model and its texts, and what comes of reading them with keys and values stored in one way or another."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
import polars as pl
from jaxtyping import Array, Float32, Int32

from experiments import quality_greedy, quality_metrics, quality_passkey
from experiments.quality_config import Case, Config, longest
from experiments.quality_forward import (
    Attended,
    Step,
    Subject,
    attend_without_cache,
    attention_errors,
    continue_greedily,
    read,
)
from experiments.quality_passkey import Prompt
from experiments.quality_texts import Text, Windows, cut, encode_text, load_text, token_sha256
from models.calibrate import calibrate
from models.checkpoint import model_sha256
from models.decoder import make_decode
from models.evaluate import token_nats
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
    greedy_prompts: Mapping[str, Windows]  # of each text
    passkey_prompts: Mapping[int, Sequence[Prompt]]  # of each context
    _reference: dict[tuple[str, int], Float32[Array, "tokens vocab"]] = dataclasses.field(default_factory=dict)
    _attended: dict[str, tuple[Attended, ...]] = dataclasses.field(default_factory=dict)
    _continuations: dict[tuple[str, int], list[Step]] = dataclasses.field(default_factory=dict)
    _calibrations: dict[tuple[int, bool, int], Calibration] = dataclasses.field(default_factory=dict)

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
          A table of positions, and `clipped` values and, for a plain scheme, `attention_errors` of each layer on the
          first window of each text. Where only the size of blocks is another and no scale depends on it, instead
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
            if case.is_plain:
                if name not in self._attended:
                    self._attended[name] = attend_without_cache(self.subject, windows[0][:-1])
                errors.append(attention_errors(subject, self._attended[name], fmt, calibration))
        return pl.concat(tables), {
            "clipped": clipped,
            "attention_errors": np.mean(errors, axis=0).tolist() if errors else [],
        }

    def dense(self) -> pl.DataFrame:
        """Losses of the windows in float32 without a cache: nothing that reads through a memory takes part."""
        tables = [
            pl.DataFrame(
                {"nll": np.asarray(token_nats(self.subject.decode, self.subject.params, jnp.asarray(window[None]))[0])}
            )
            .with_row_index("position")
            .select(pl.lit(name).alias("text"), pl.lit(i, pl.Int32).alias("window"), pl.all())
            for name, windows in self.windows.items()
            for i, window in enumerate(windows)
        ]
        return pl.concat(tables)

    def generate(self, case: Case) -> dict[str, pl.DataFrame]:
        """Tables by name of what a case comes to say by itself, as far as the config asks for it."""
        tables = {}
        if case.is_continued(self.config):
            tables["greedy"] = self.greedy(case.scheme)
        if case.is_asked(self.config):
            tables["passkey"] = self.passkey(case.scheme)
        return tables

    def greedy(self, name: str) -> pl.DataFrame:
        """Where the continuations of all prompts part from the reference's; see `quality_greedy`."""
        fmt, rows = scheme(name), []
        for text, prompts in self.greedy_prompts.items():
            for i, prompt in enumerate(prompts):
                if (text, i) not in self._continuations:
                    self._continuations[text, i] = continue_greedily(
                        self.subject, prompt, self.config.greedy_tokens, scheme(self.config.reference)
                    )
                found = quality_greedy.part(
                    self.subject, prompt, self._continuations[text, i], fmt, self._calibration(1, fmt)
                )
                rows.append({"text": text, "prompt": i, **found})
        return pl.DataFrame(rows, schema=quality_greedy.SCHEMA)

    def passkey(self, name: str) -> pl.DataFrame:
        """How the keys of all prompts are told; see `quality_passkey`."""
        fmt, rows = scheme(name), []
        for context, prompts in self.passkey_prompts.items():
            for i, prompt in enumerate(prompts):
                logits = read(
                    self.subject, prompt.tokens[:-1], fmt, self._calibration(1, fmt), last=prompt.asked_tokens
                ).logits
                for depth, told in zip(
                    self.config.passkey_depths, quality_passkey.score(np.asarray(logits), prompt), strict=True
                ):
                    rows.append({"context": context, "prompt": i, "depth": depth, **told})
        return pl.DataFrame(rows)

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
        key = (factor, fmt.rotate, fmt.precise_tokens)
        if key not in self._calibrations:
            subject = self.with_outlier(factor)
            self._calibrations[key] = calibrate(
                subject.decode, subject.params, self.calibration_windows, rotated=fmt.rotate, skip=fmt.precise_tokens
            )
        return self._calibrations[key]


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
    if longest(config) > decode.config.max_len:
        raise ValueError(
            "context, greedy_prompt_tokens + greedy_tokens, passkey_contexts: expected at most "
            f"{decode.config.max_len}, what {config.model} was trained for, got {longest(config)}"
        )
    texts = {name: load_text(name, text) for name, text in config.texts.items()}
    tokenizer = load_tokenizer(path)
    encode = tokenizer.encode
    windows, greedy, fillers, calibration = {}, {}, [], []
    for name, text in texts.items():
        fillers.append(tokens := encode_text(encode, text.evaluated))
        windows[name] = cut(tokens, config.windows, config.context, name)
        if config.greedy_prompts:
            greedy[name] = cut(tokens, config.greedy_prompts, config.greedy_prompt_tokens, name)[:, :-1]
        limit = config.calibration_windows * config.context + 1
        own = encode_text(encode, text.calibration, limit)
        calibration.append(cut(own, config.calibration_windows, config.context, f"{name} (its part for calibration)"))

    def encode_part(text: str) -> Sequence[int]:
        ids = encode(text)
        return ids[1:] if tokenizer.bos is not None and ids[0] == tokenizer.bos else ids

    passkeys = {
        context: [
            quality_passkey.hide(
                encode_part,
                fillers[trial % len(fillers)],
                context,
                config.passkey_depths,
                np.random.default_rng([config.seed, context, trial]),
            )
            for trial in range(config.passkey_trials)
        ]
        for context in config.passkey_contexts
    }
    return Evaluation(
        config,
        Subject(decode, params, longest(config), config.block_size, config.chunk_tokens, config.kernels),
        digest,
        texts,
        windows,
        np.concatenate(calibration)[:, :-1],
        greedy,
        passkeys,
    )
