import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from models import cli
from models.checkpoint import save_checkpoint
from models.config import DecoderConfig
from models.decoder import Decoder, forward, make_decode
from models.evaluate import cut_windows, evaluate, token_nats
from models.trigram import fit_trigram

CONFIG = DecoderConfig(vocab=256, width=8, layers=1, q_heads=2, kv_heads=1, head_dim=4, ffn=8)
TEXT = np.random.default_rng(0).integers(97, 100, 1500).astype(np.uint8)


def test_windows_predict_consecutive_bytes_once_each():
    windows = cut_windows(TEXT[:100], 9)
    assert windows.shape == (11, 10)
    np.testing.assert_array_equal(windows[:, 1:].reshape(-1), TEXT[1:100])
    np.testing.assert_array_equal(windows[:, 0], TEXT[0:99:9])


def test_a_text_shorter_than_a_window_is_refused():
    with pytest.raises(ValueError, match="a window of context 9 needs 10 bytes of text, got 9"):
        cut_windows(TEXT[:9], 9)


def test_a_model_that_knows_nothing_scores_eight_bits_at_every_position():
    decode, params = make_decode(Decoder(CONFIG, rngs=nnx.Rngs(0)))
    params = jax.tree.map(jnp.zeros_like, params)
    heldout = evaluate(decode, params, fit_trigram(TEXT), TEXT, context=100)
    assert heldout.bytes == 1400
    assert heldout.bits_per_byte == pytest.approx(8, abs=1e-5)
    np.testing.assert_allclose(heldout.bits_by_position, 8, atol=1e-5)
    # Three letters at random: log2(3), and a little for smoothing.
    assert np.log2(3) < heldout.trigram_bits_per_byte + 0.05 < 1.75


def test_the_loss_is_that_of_the_next_byte_whatever_the_batch():
    decode, params = make_decode(Decoder(CONFIG, rngs=nnx.Rngs(0)))
    params = jax.tree.map(lambda x: x * 5, params)
    trigram = fit_trigram(TEXT)
    windows = cut_windows(TEXT, 300).astype(np.int32)
    logits = np.asarray(forward(decode, params, jnp.asarray(windows[:, :-1])), np.float64)
    normaliser = np.log(np.exp(logits).sum(-1))
    expected = normaliser - np.take_along_axis(logits, windows[:, 1:, None], -1)[..., 0]
    np.testing.assert_allclose(token_nats(decode, params, jnp.asarray(windows)), expected, atol=1e-4)
    assert np.ptp(expected) > 0.5
    for count in (None, 2):
        heldout = evaluate(decode, params, trigram, TEXT, 300, max_windows=count)
        part = expected[:count]
        assert heldout.nats == pytest.approx(part.mean(), abs=1e-5)
        by_position = [p.mean() / np.log(2) for p in np.array_split(part, 8, axis=1)]
        np.testing.assert_allclose(heldout.bits_by_position, by_position, atol=1e-4)
        scored = trigram.nats(TEXT)[1 : 1 + part.size]
        assert heldout.trigram_bits_per_byte == pytest.approx(scored.mean() / np.log(2))


@pytest.mark.parametrize("missing", ["config.json", "training.json", "weights"])
def test_a_checkpoint_that_lacks_something_is_told_in_one_line(tmp_path, capsys, missing):
    save_checkpoint(tmp_path / "tiny", Decoder(CONFIG, rngs=nnx.Rngs(0)), {"training.json": "{}"})
    lost = tmp_path / "tiny" / missing
    shutil.rmtree(lost) if lost.is_dir() else lost.unlink()
    assert cli.main(["evaluate", str(tmp_path / "tiny")]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: ")
    assert missing in line
