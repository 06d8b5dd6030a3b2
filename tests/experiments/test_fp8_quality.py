"""The whole experiment on a tiny model: its results, what fails a run, and that it can be taken up."""

import contextlib
import dataclasses
import json
import pathlib
from fractions import Fraction

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.special
from flax import nnx

from experiments import config as configs
from experiments import files, plots, quality_evaluate
from experiments import fp8_quality as experiment
from experiments.progress import Progress
from experiments.quality_capacity import capacity_of
from experiments.quality_config import Case, Config
from experiments.quality_forward import Subject, attend_without_cache, attention_errors, read
from experiments.quality_texts import TextConfig
from experiments.run_directory import RunDirectory
from experiments.workloads.config import WorkloadConfig
from models.calibrate import calibrate
from models.checkpoint import save_checkpoint
from models.config import DecoderConfig
from models.decoder import Decoder, forward, make_decode
from paxkv.kv_format import KVFormat, scheme

CONFIGS = pathlib.Path(__file__).parents[2] / "configs/fp8_quality"
TINY = DecoderConfig(vocab=256, width=16, layers=2, q_heads=2, kv_heads=1, head_dim=8, ffn=16, max_len=96)
NAMES = [
    "dense_f32", "bf16", "e4m3_block_head", "lambda_64/f32", "lambda_64/int8_layer", "block_16/bf16",
    "block_16/e4m3_block_head", "passkey_80/bf16", "passkey_80/e4m3_block_head",
]  # fmt: skip


@pytest.fixture(scope="module")
def model():
    """A tiny model whose keys are large enough for attention to care."""
    decode, params = make_decode(Decoder(TINY, rngs=nnx.Rngs(0)))
    return decode, jax.tree.map(lambda w: 2 * w if w.ndim == 3 else w, params)


@pytest.fixture(scope="module")
def tokens():
    return np.random.default_rng(0).integers(256, size=(2, 48)).astype(np.int32)


class Dies(Progress):
    """Ends a run after two cases."""

    @contextlib.contextmanager
    def task(self, name, total=None):
        done = []

        def advance(amount=1, note=""):
            done.append(note)
            if len(done) == 2:
                raise KeyboardInterrupt

        yield advance


def run(config, path, progress=None):
    with RunDirectory.open(path) as run_dir:
        if not (path / "manifest.json").exists():
            run_dir.write_json("manifest.json", {"inputs": {}})
        return experiment.run(config, run_dir, progress or Progress())


@pytest.fixture(scope="module")
def config(tmp_path_factory, model):
    decode, params = model
    path = tmp_path_factory.mktemp("models") / "tiny"
    save_checkpoint(path, decode.model(params))
    return Config(
        model=path,
        windows=2,
        context=32,
        calibration_windows=1,
        chunk_tokens=16,
        schemes=("bf16", "e4m3_block_head"),
        block_size=8,
        block_sizes=(16,),
        block_schemes=("bf16", "e4m3_block_head"),
        outlier_factors=(64,),
        outlier_schemes=("f32", "int8_layer"),
        greedy_prompts=2,
        greedy_prompt_tokens=16,
        greedy_tokens=8,
        passkey_contexts=(80,),
        passkey_depths=(0.5,),
        passkey_schemes=("bf16", "e4m3_block_head"),
        kv_memory="16 KiB",
        workload=WorkloadConfig(lengths="constant", prompt_mean=20, output_mean=10, num_requests=9, rate=float("inf")),
        rows=8,
        max_model_len=32,
        token_budget=32,
        expected={"bf16": {"mean_kl": (0.0, 1e-3)}, "e4m3_block_head": {"mean_kl": (100.0, 200.0)}},
    )


@pytest.fixture(scope="module")
def finished(config, tmp_path_factory):
    """A run that died after two cases and was taken up: its results and its folder."""
    path = tmp_path_factory.mktemp("runs") / "first"
    with pytest.raises(KeyboardInterrupt):
        run(config, path, Dies())
    begun = {p: p.stat().st_mtime_ns for p in (path / "parts").rglob("*.*")}
    assert len(list((path / "parts").iterdir())) == 2
    results = run(config, path)
    assert all(p.stat().st_mtime_ns == at for p, at in begun.items())
    return results, path


def test_every_case_has_its_result(finished):
    results, _ = finished
    assert list(results) == NAMES
    named = {
        "perplexity", "delta_nll", "delta_nll_se", "mean_kl", "kl_p999", "top1_agreement", "clipped", "bytes_per_token",
        "blocks", "peak_running", "attention_error", "mean_kl_prose", "mean_kl_code", "texts", "divergence_median",
        "never_diverged", "divergence_gap", "over_dense_prose", "over_dense_code",
    }  # fmt: skip
    for name in ("bf16", "e4m3_block_head"):
        assert named <= results[name].keys()
        assert results[name]["predictions"] == 2 * 2 * 32
        assert results[name]["n_nan"] == 0
    assert 0 < results["bf16"]["mean_kl"] < results["e4m3_block_head"]["mean_kl"]
    assert results["lambda_64/f32"]["kl_max"] == 0
    assert results["lambda_64/int8_layer"]["mean_kl"] > results["bf16"]["mean_kl"]


def test_only_scales_of_blocks_notice_the_size_of_blocks(finished):
    results, _ = finished
    assert results["block_16/bf16"] == {"differing_logits": 0}
    own, other = (results[name]["mean_kl"] for name in ("e4m3_block_head", "block_16/e4m3_block_head"))
    assert own != other


def test_windows_are_read_without_a_cache_too(finished, config, model):
    """Against a plain sum over each window by itself."""
    results, path = finished
    evaluation = quality_evaluate.load(config)
    for name, windows in evaluation.windows.items():
        logits = np.stack([forward(*model, jnp.asarray(window[None, :-1]))[0] for window in windows]).astype(np.float64)
        nll = scipy.special.logsumexp(logits, axis=-1) - np.take_along_axis(logits, windows[:, 1:, None], -1)[..., 0]
        expected = np.exp(nll.mean())
        assert results["dense_f32"][f"perplexity_{name}"] == pytest.approx(expected, rel=1e-6)
        over = results["bf16"][f"perplexity_{name}"] / expected - 1
        assert results["bf16"][f"over_dense_{name}"] == pytest.approx(over, abs=1e-6)
    assert len(files.read_parquet(path / "parts/reference/dense.parquet")) == 2 * 2 * 32


def test_what_is_generated_is_kept_prompt_by_prompt(finished):
    results, path = finished
    for name in ("bf16", "e4m3_block_head"):
        greedy = files.read_parquet(path / "parts" / name / "greedy.parquet")
        assert greedy.select("text", "prompt").rows() == [(t, i) for t in ("prose", "code") for i in range(2)]
        assert results[name]["never_diverged"] == np.mean(greedy["steps"].to_numpy() == 8)
        passkey = files.read_parquet(path / "parts" / name / "passkey.parquet")
        assert passkey["prompt"].to_list() == [0, 1]
        assert results[f"passkey_80/{name}"]["digit_logprob"] == pytest.approx(passkey["digit_logprob"].mean())
    changes = [abs(results[f"passkey_80/{name}"]["digit_logprob_change"]) for name in ("bf16", "e4m3_block_head")]
    assert changes[0] < changes[1]


def test_digits_are_scored_where_they_are_predicted(config, model):
    """Against the model without a cache over the whole prompt."""
    evaluation = quality_evaluate.load(config)
    found = evaluation.passkey("f32")
    for prompt, digit_logprob in zip(evaluation.passkey_prompts[80], found["digit_logprob"], strict=True):
        logits = np.asarray(forward(*model, jnp.asarray(prompt.tokens[None]))[0], np.float64)
        log_probs = scipy.special.log_softmax(logits, axis=-1)
        at = [t for t in range(80) if prompt.answers[t] == 0]
        assert digit_logprob == pytest.approx(np.mean([log_probs[t - 1, prompt.tokens[t]] for t in at]), abs=1e-5)


def test_capacity_is_exact(finished):
    results, _ = finished
    # 2 layers, keys and values, one head of 8: 64 bytes a token in bf16; in e4m3 half, and 4 scales of 4 bytes a block.
    assert results["bf16"]["bytes_per_token"] == 64
    assert results["e4m3_block_head"]["bytes_per_token"] == 32 + 16 / 8
    assert (results["bf16"]["blocks"], results["e4m3_block_head"]["blocks"]) == (32, 16384 // 272)
    assert results["e4m3_block_head"]["blocks_per_bf16"] == "32/17"
    # A request comes to 30 tokens or 4 blocks: 8 of them fill 32 blocks, and as many rows.
    assert results["bf16"]["peak_running"] == 8


def test_fp8_holds_twice_the_blocks_less_the_share_of_its_scales():
    small = dataclasses.replace(TINY, head_dim=64)
    ratios = {
        name: capacity_of(scheme(name), small, 16, 2**20, rows=1).ratio
        for name in ("bf16", "e4m3_none", "int8_layer", "e4m3_block_head", "e4m3_token_head", "int4_token_head")
    }
    assert ratios == {
        "bf16": 1,
        "e4m3_none": 2,
        "int8_layer": 2,
        "e4m3_block_head": Fraction(2 * 64 * 16, 64 * 16 + 4),
        "e4m3_token_head": Fraction(2 * 64, 64 + 4),
        "int4_token_head": Fraction(2 * 64, 32 + 4),
    }


def test_what_was_expected_and_did_not_come_fails_the_run(finished):
    results, _ = finished
    failures = [failure for failure in experiment.failed_checks(results) if "expected" in failure]
    assert len(failures) == 1
    assert failures[0].startswith("e4m3_block_head: mean_kl is ")
    assert failures[0].endswith(", expected 100 to 200")


def _found(**changes):
    kl = {"bf16": 1e-5, "int8_token_head": 1e-4, "e4m3_token_head": 1e-3, "e4m3_layer": 2e-3, "e5m2_none": 1e-2}
    kl |= {"e4m3_layer_k": 2e-3, "e4m3_layer_v": 1e-4}
    found = {name: {"mean_kl": value, "n_nan": 0, "kl_max": 1.0} for name, value in kl.items()}
    found["lambda_64/f32"] = {"mean_kl": 0.0, "n_nan": 0, "kl_max": 0.0}
    found["block_64/e4m3_layer_k"] = found["block_64/e4m3_layer_v"] = {"differing_logits": 0}
    for name, (metric, value) in changes.items():
        found[name] = found[name] | {metric: value}
    return found


def test_a_sound_run_has_no_failed_checks():
    assert experiment.failed_checks(_found()) == []


@pytest.mark.parametrize(
    ("name", "metric", "value", "says"),
    [
        ("bf16", "n_nan", 3, "bf16: 3 positions are NaN"),
        ("bf16", "over_dense_code", -0.04, "bf16: expected a perplexity within 3% of that without a cache, got over_"),
        ("bf16", "over_dense_code", None, "bf16: expected a perplexity within 3%"),
        ("bf16", "mean_kl", 1.0, "int8_token_head: mean KL is 0.0001, not above the 1 of bf16"),
        ("e4m3_layer", "mean_kl", 1e-4, "e4m3_layer: mean KL is 0.0001, not above the 0.001 of e4m3_token_head"),
        ("e5m2_none", "mean_kl", None, "e5m2_none: mean KL is nan, not above"),
        ("e4m3_layer_v", "mean_kl", 5e-3, "e4m3_layer_k: mean KL is 0.002, not above the 0.005 of e4m3_layer_v"),
        ("lambda_64/f32", "kl_max", 1e-9, "lambda_64/f32: expected logits bit-identical"),
        (
            "block_64/e4m3_layer_k",
            "differing_logits",
            7,
            "block_64/e4m3_layer_k: 7 logits depend on the size of a block",
        ),
    ],
)
def test_what_must_hold_and_does_not_fails_the_run(name, metric, value, says):
    failures = experiment.failed_checks(_found(**{name: (metric, value)}))
    assert any(failure.startswith(says) for failure in failures), failures


def test_tables_and_figures_are_drawn_from_the_run(finished):
    results, path = finished
    plain = json.loads(json.dumps(results))
    tables = experiment.tables(plain)
    assert tables[0].title.startswith("What storing keys and values")
    assert tables[1].headings[1:4] == ["perplexity, prose", "over float32, prose", "mean KL, prose"]
    assert [len(table.rows) for table in tables] == [3, 3, 2, 2, 2, 1, 2]
    with plots.style():
        drawn = experiment.figures(path)
    assert len(drawn) == 6
    metrics = {metric for found in results.values() for metric in found}
    own = {m for m in metrics if not m.endswith(("_prose", "_code", "_expected"))}
    assert own <= experiment.GLOSSARY.keys()


def test_a_format_of_many_words_is_a_part_of_its_own(tmp_path):
    names = ["e4m3_layer:first4:layers0-3:rotated", "int8_channel:4+e4m3_head", "int8_channel:4", "e4m3_head"]
    with RunDirectory.open(tmp_path / "run") as run_dir:
        for name in names:
            with run_dir.part(Case(name, factor=8).part) as part:
                part.write_json("found", name)
    assert len(list((tmp_path / "run" / "parts").iterdir())) == 4


def test_the_identity_covers_model_and_texts(config):
    resolved = experiment.resolve(config)
    assert resolved.model_sha256
    assert all(text.sha256 for text in resolved.texts.values())
    with pytest.raises(ValueError, match="model_sha256: expected the model 00"):
        experiment.resolve(dataclasses.replace(config, model_sha256="00"))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"schemes": ("bf17",)}, "scheme: expected"),
        ({"schemes": ("bf16", "bf16")}, "schemes: expected no value twice"),
        ({"texts": {"prose": TextConfig()}}, "texts: expected at least two kinds"),
        ({"greedy_tokens": 0}, "greedy_tokens must be at least 1"),
        ({"passkey_depths": (0.9, 0.1)}, "passkey_depths: expected 1 to 10 ascending numbers from 0 to 1"),
        ({"passkey_schemes": ("f32",)}, "passkey_schemes: expected some of schemes, got f32"),
        ({"passkey_contexts": (60,)}, "passkey_contexts: expected contexts that hold 1 pass keys twice"),
        ({"schemes": ()}, "schemes: expected at least one"),
        ({"schemes": ("e4m3_layer:first32",)}, "expected first tokens fewer than context = 32.*got 32"),
        ({"outlier_schemes": ("e4m3_layer:layers9",)}, "precise_layers: expected layers below 2"),
        ({"block_sizes": (5,)}, "expected divisors of context = 32, got 5"),
        ({"block_sizes": (8,)}, "block_sizes: expected sizes other than block_size"),
        ({"outlier_windows": 3}, "outlier_windows: expected at most windows = 2"),
        ({"outlier_factors": (3,)}, "factor: expected a power of two"),
        ({"context": 128}, "context, greedy_prompt_tokens .*: expected at most 96, .* got 128"),
        ({"kv_memory": "64 B"}, "kv_memory: expected at least .* got 64"),
    ],
)
def test_what_cannot_run_is_refused_before_it_has_a_directory(config, changes, message):
    with pytest.raises(ValueError, match=message):
        experiment.resolve(dataclasses.replace(config, **changes))


@pytest.mark.parametrize("name", ["smoke", "smollm2"])
def test_configs_say_what_they_ask_and_name_every_scheme(name):
    text = (CONFIGS / f"{name}.yaml").read_text()
    assert configs.header(text).startswith("What does a KV cache in 8 or 4 bits do")
    asked = configs.decode(Config, configs.read_yaml(CONFIGS / f"{name}.yaml"))
    named = "bf16 e4m3_none e4m3_layer e4m3_head e4m3_block_head e4m3_token_head e5m2_none int8_layer int8_head "
    assert set(f"{named}int8_token_head int4_token_head".split()) <= set(asked.schemes)
    names = {case.name for case in experiment.cases(asked)}
    assert {name for name in asked.expected if not name.startswith("passkey_")} <= names
    assert Case("int8_layer", 64).name in names


def test_reading_through_blocks_gives_what_the_model_gives_without_a_cache(model, tokens):
    decode, params = model
    expected = forward(decode, params, jnp.asarray(tokens[:1]))[0]
    subject = Subject(decode, params, max_len=48, block_size=8, chunk_tokens=20)  # the last chunk is of 8 tokens
    found = read(subject, tokens[0], scheme("f32"))
    np.testing.assert_allclose(found.logits, expected, atol=1e-5, rtol=1e-5)
    assert found.clipped == 0
    for last in (1, 8, 9, 30):
        some = read(subject, tokens[0], scheme("f32"), last=last).logits
        np.testing.assert_array_equal(some, found.logits[-last:])


def test_a_layers_error_does_not_depend_on_what_the_layers_before_it_store(model, tokens):
    decode, params = model
    subject, fmt = Subject(decode, params, max_len=48, block_size=8), scheme("e5m2_none")
    attended = attend_without_cache(subject, tokens[0])
    both = attention_errors(subject, attended, fmt)
    last = attention_errors(subject, attended, dataclasses.replace(fmt, precise="f32", precise_layers=(0,)))
    assert last[0] < 1e-5
    assert last[1] == both[1] > 0.005


def test_the_error_of_the_first_layer_is_that_of_attention_over_rounded_keys_and_values(model, tokens):
    """Against float64: 2 query heads share one KV head of 8."""
    decode, params = model
    weights = jax.tree.map(lambda w: np.asarray(w, np.float64), params)
    layer = weights["layers"][0]
    x = weights["embedding"][tokens[0]]
    x = x / np.sqrt(np.mean(x**2, axis=-1, keepdims=True) + TINY.norm_eps) * layer["attention_norm"]["scale"]
    q, k, v = (np.einsum("td,dnh->tnh", x, layer["attention"][f"{name}_proj"]) for name in "qkv")
    angles = np.arange(48)[:, None, None] * TINY.rope_theta ** (-np.arange(4) / 4)

    def turn(y):
        a, b = y[..., :4], y[..., 4:]
        return np.concatenate([a * np.cos(angles) - b * np.sin(angles), b * np.cos(angles) + a * np.sin(angles)], -1)

    def attend(k, v):
        logits = np.einsum("tnh,sh->nts", turn(q), k[:, 0]) / np.sqrt(8)
        logits = np.where(np.tril(np.ones((48, 48), bool)), logits, -np.inf)
        p = np.exp(logits - logits.max(-1, keepdims=True))
        return np.einsum("nts,sh->tnh", p / p.sum(-1, keepdims=True), v[:, 0])

    def rounded(y):
        return y.astype(jnp.bfloat16).astype(jnp.float8_e5m2).astype(np.float64)

    exact, coarse = attend(turn(k), v), attend(rounded(turn(k)), rounded(v))
    expected = np.linalg.norm(coarse - exact) / np.linalg.norm(exact)
    subject = Subject(decode, params, max_len=48, block_size=8)
    found = attention_errors(subject, attend_without_cache(subject, tokens[0]), scheme("e5m2_none"))
    assert found[0] == pytest.approx(expected, rel=1e-3)


def test_what_is_longer_than_the_memory_is_refused(model, tokens):
    with pytest.raises(ValueError, match="tokens: expected 2 to max_len = 32, as logits of 2 are wanted, got 48"):
        read(Subject(*model, max_len=32), tokens[0], KVFormat(), last=2)


def test_static_scales_come_from_other_text(config, model):
    found = quality_evaluate.load(config)
    evaluated = {w.tobytes() for windows in found.windows.values() for w in windows[:, :-1]}
    assert not evaluated & {w.tobytes() for w in found.calibration_windows}
    seen = calibrate(*model, found.calibration_windows)
    assert seen.tokens == found.calibration_windows.size == 2 * 32
