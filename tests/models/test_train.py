import dataclasses
import json
import pathlib
import sys

import jax
import numpy as np
import pytest

from models.checkpoint import load_checkpoint
from models.config import DecoderConfig
from models.decoder import make_decode
from models.train import OptimizerConfig, Phase, TrainConfig, main, train

CONFIG = TrainConfig(
    model=DecoderConfig(vocab=256, width=16, layers=1, q_heads=2, kv_heads=1, head_dim=8, ffn=24, max_len=64),
    phases=(Phase(steps=30, context=16, batch=8), Phase(steps=3, context=64, batch=2)),
    optimizer=OptimizerConfig(
        peak_learning_rate=1e-2,
        final_fraction=0.1,
        warmup_steps=3,
        b1=0.9,
        b2=0.99,
        weight_decay=0.1,
        clip_norm=1.0,
    ),
    seed=3,
    out_dir="unused",
)
TEXT = np.frombuffer(b"one block, two blocks, three blocks, four. " * 30, np.uint8)


def test_training_lowers_the_loss_in_both_phases_and_reports_every_step():
    reported = []
    _, _, losses = train(CONFIG, TEXT, reported.append)
    assert reported == losses
    assert len(losses) == 33
    assert losses[0] == pytest.approx(np.log(256), abs=0.3)
    assert losses[29] < losses[0] - 1.5
    assert max(losses[30:]) < losses[0] - 1.5


def test_training_repeats_bit_for_bit_and_depends_on_the_seed():
    (_, first, first_losses), (_, again, again_losses) = train(CONFIG, TEXT), train(CONFIG, TEXT)
    assert first_losses == again_losses
    jax.tree.map(np.testing.assert_array_equal, first, again)
    _, _, other_losses = train(dataclasses.replace(CONFIG, seed=4), TEXT)
    assert other_losses[0] != first_losses[0]


def test_a_text_too_short_for_the_context_is_refused():
    with pytest.raises(ValueError, match="the longest context needs 65 bytes of text, got 64"):
        train(CONFIG, TEXT[:64])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model": dataclasses.replace(CONFIG.model, vocab=255)}, "model.vocab must hold every byte, 256; got 255"),
        ({"phases": (Phase(5, 65, 1),)}, r"phases\[0\].context must not exceed model.max_len=64, got 65"),
        ({"phases": (Phase(5, 8, 0),)}, r"phases\[0\]: steps, context and batch must be at least 1"),
        ({"phases": (Phase(3, 8, 1),)}, "optimizer.warmup_steps must be below the 3 steps of all phases, got 3"),
    ],
)
def test_a_config_that_cannot_be_trained_is_refused(change, message):
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(CONFIG, **change)


def write_config(folder: pathlib.Path) -> str:
    path = folder / "tiny.yaml"
    path.write_text(
        """
        model: {vocab: 256, width: 8, layers: 1, q_heads: 2, kv_heads: 1, head_dim: 4, ffn: 8, max_len: 32}
        phases: [{steps: 4, context: 16, batch: 2}]
        optimizer: {peak_learning_rate: 1.0e-2, final_fraction: 0.1, warmup_steps: 1, b1: 0.9, b2: 0.99,
                    weight_decay: 0.1, clip_norm: 1.0}
        seed: 0
        """
        f"out_dir: {folder / 'tiny'}\n"
    )
    return str(path)


def test_the_command_writes_a_checkpoint_with_its_card_and_ends_in_json(tmp_path, monkeypatch, capsys):
    arguments = [write_config(tmp_path), "--optimizer.peak_learning_rate", "0.005"]
    monkeypatch.setattr(sys, "argv", ["train", *arguments])
    assert main() == 0
    output = capsys.readouterr()
    assert output.err == ""
    summary = json.loads(output.out.splitlines()[-1])
    record = json.loads((tmp_path / "tiny" / "training.json").read_text())
    assert summary["results"]["heldout_32"]["nats"] == record["results"]["heldout_32"]["nats"]
    assert record["config"]["optimizer"]["peak_learning_rate"] == 0.005
    assert record["command"].endswith("--optimizer.peak_learning_rate 0.005")
    _, params = make_decode(load_checkpoint(tmp_path / "tiny"))
    assert record["parameters"] == sum(x.size for x in jax.tree.leaves(params))
    card = (tmp_path / "tiny" / "README.md").read_text()
    for figure in (f"{record['results']['heldout_32']['bits_per_byte']:.4f}", record["text_sha256"], record["command"]):
        assert figure in card
    # The checkpoint that is there now is safe from the same command, which says so before it trains.
    monkeypatch.setattr("models.train.train", lambda *_: pytest.fail("trained for nothing"))
    assert main() == 2
    output = capsys.readouterr()
    assert output.out == ""
    assert output.err.startswith(f"error: {tmp_path / 'tiny'} exists; give another path")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nowhere.yaml"], "error: [Errno 2] No such file or directory: 'nowhere.yaml'"),
        (["tiny.yaml", "--seed", "abc"], "error: `seed`: Couldn't parse 'abc' into an int"),
        (["tiny.yaml", "--optimizer.warmup_steps", "4"], "error: optimizer.warmup_steps must be below the 4 steps of"),
        (["broken.yaml"], "error: while parsing a flow node"),
        ([], "usage: python -m models.train CONFIG.yaml"),
    ],
)
def test_a_mistake_is_told_in_one_line(tmp_path, monkeypatch, capsys, arguments, message):
    monkeypatch.chdir(tmp_path)
    write_config(tmp_path)
    (tmp_path / "broken.yaml").write_text("model: [\n")
    monkeypatch.setattr(sys, "argv", ["train", *arguments])
    assert main() == 2
    output = capsys.readouterr()
    assert output.out == ""
    (line,) = output.err.splitlines()
    assert line.startswith(message)
    assert not (tmp_path / "tiny").exists()


def test_of_two_folders_on_the_command_line_the_last_one_counts(tmp_path, monkeypatch):
    """The card adds one behind a command that may have its own."""
    monkeypatch.setattr(sys, "argv", ["train", write_config(tmp_path), "--out_dir", "a", "--out_dir", str(tmp_path)])
    monkeypatch.setattr("models.train.check_free", lambda path, overwrite: sys.exit(path))
    with pytest.raises(SystemExit, match=str(tmp_path)):
        main()
