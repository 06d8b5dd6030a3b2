"""Greedy continuations against loops that do the same another way, and against numbers worked out by hand."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import polars as pl
import pytest
from flax import nnx

from experiments import quality_greedy
from experiments.quality_forward import Step, Subject, continue_greedily
from models.calibrate import calibrate
from models.config import DecoderConfig
from models.decoder import Decoder, forward, make_decode
from paxkv.kv_format import scheme

STEPS = 24
TINY = DecoderConfig(vocab=64, width=16, layers=2, q_heads=2, kv_heads=1, head_dim=8, ffn=16, max_len=64)


@pytest.fixture(scope="module")
def subject():
    """A tiny model whose keys are large enough for attention to care."""
    decode, params = make_decode(Decoder(TINY, rngs=nnx.Rngs(1)))
    params = jax.tree.map(lambda w: 3 * w if w.ndim == 3 else w, params)
    return Subject(decode, params, max_len=48, block_size=8, chunk_tokens=16)


@pytest.fixture(scope="module")
def prompts():
    return np.random.default_rng(0).integers(64, size=(6, 20)).astype(np.int32)


@pytest.fixture(scope="module")
def references(subject, prompts):
    return [continue_greedily(subject, prompt, STEPS, scheme("f32")) for prompt in prompts]


def test_a_continuation_is_that_of_computing_everything_anew_for_every_token(subject, prompts, references):
    for prompt, steps in zip(prompts[:3], references, strict=False):
        tokens = np.zeros(20 + STEPS, np.int32)
        tokens[:20] = prompt
        for i, step in enumerate(steps, start=20):
            # What stands behind a token changes nothing for it.
            logits = np.asarray(forward(subject.decode, subject.params, jnp.asarray(tokens[None]))[0, i - 1])
            second, best = np.sort(logits)[-2:]
            assert step.token == int(logits.argmax())
            assert step.gap == pytest.approx(best - second, abs=1e-5)
            tokens[i] = step.token


def test_it_parts_where_a_real_generation_parts(subject, prompts, references):
    """The same format generates by itself, token by token."""
    fmt, parted = scheme("int4_token_head"), []
    for prompt, steps in zip(prompts, references, strict=True):
        own = continue_greedily(subject, prompt, STEPS, fmt)
        differs = [i for i in range(STEPS) if own[i].token != steps[i].token]
        found = quality_greedy.part(subject, prompt, steps, fmt)
        parted.append(found["steps"])
        assert found["never"] == (not differs)
        if differs:
            assert found["steps"] == differs[0]
            assert found["token"] == own[differs[0]].token
            assert found["gap"] == steps[differs[0]].gap
        else:
            assert found["steps"] == STEPS
    assert len(set(parted)) > 1  # some part, and not all at the same token


def test_a_broken_cache_parts_at_once(subject, prompts, references):
    """Scales 64 times too small clip nearly everything."""
    sound = calibrate(subject.decode, subject.params, prompts)
    broken = dataclasses.replace(sound, k_amax=sound.k_amax / 64, v_amax=sound.v_amax / 64)
    medians = []
    for calibration in (sound, broken):
        rows = [
            quality_greedy.part(subject, prompt, steps, scheme("int8_layer"), calibration)
            for prompt, steps in zip(prompts, references, strict=True)
        ]
        medians.append(np.median([row["steps"] for row in rows]))
    assert medians[1] <= 2 < medians[0]


def test_the_first_other_token_counts():
    reference = [Step(2, 0.5), Step(0, 0.25), Step(1, 4.0)]
    logits = np.array([[0, 1, 2], [0, 0, 3], [9, 0, 0]], np.float32)
    found = quality_greedy.compare(logits, reference)
    assert found == {"steps": 1, "never": False, "token": 2, "reference_token": 0, "gap": 0.25}
    same = np.eye(3, dtype=np.float32)[[2, 0, 1]]
    assert quality_greedy.compare(same, reference) == {
        "steps": 3, "never": True, "token": None, "reference_token": None, "gap": None,
    }  # fmt: skip


def test_the_summary_counts_those_that_never_part_as_their_length():
    rows = [("a", 0, 3, False, 1, 2, 0.5), ("a", 1, 8, True, None, None, None), ("b", 0, 5, False, 1, 2, 1.5)]
    prompts = pl.DataFrame(rows, schema=quality_greedy.SCHEMA, orient="row")
    assert quality_greedy.summarise(prompts) == {
        "divergence_median": 5.0, "never_diverged": pytest.approx(1 / 3), "divergence_gap": 1.0,
    }  # fmt: skip
    assert quality_greedy.summarise(prompts.filter("never"))["divergence_gap"] is None
