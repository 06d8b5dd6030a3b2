"""The command, killed for good at moments it knows nothing of, and typed again."""

import json
import os
import pathlib
import random
import signal
import subprocess
import sys
import time

import pytest

from models.checkpoint import load_checkpoint, load_record, model_sha256
from tests.models.training.tiny import YAML

ROOT = pathlib.Path(__file__).parents[3]
# Saves after every other step, so that a kill at any time is likely to come in the middle of one.
OVERRIDES = ["--phases", "[{steps: 100, context: 16, batch: 2}, {steps: 60, context: 32, batch: 2}]"]
OVERRIDES += ["--evaluate_every", "5", "--checkpoint_every", "2"]


def start(config, out_dir):
    command = [sys.executable, "-W", "error", "-m", "models", "train", str(config), *OVERRIDES, "--out_dir", out_dir]
    return subprocess.Popen(
        [str(word) for word in command], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def finish(process):
    out, err = process.communicate(timeout=300)
    assert process.returncode == 0, err
    return json.loads(out.splitlines()[-1]), err


def saved(folder):
    """Names of checkpoints, whole ones and those that are being written."""
    return set(os.listdir(folder)) if folder.is_dir() else set()


@pytest.mark.soak
def test_a_process_killed_while_it_trains_and_while_it_saves_ends_in_the_same_bits(tmp_path):
    config = tmp_path / "tiny.yaml"
    config.write_text(YAML + "out_dir: unused\n")
    whole, killed, folder = tmp_path / "whole", tmp_path / "killed", tmp_path / "killed.checkpoints"
    expected, _ = finish(start(config, whole))
    rng, torn = random.Random(0), 0
    for kill in range(6):
        process, before = start(config, killed), saved(folder)
        # At once while the next checkpoint is written, or a while after it.
        while process.poll() is None and not saved(folder) - before:
            pass
        if kill % 2:
            time.sleep(rng.uniform(0, 0.3))
        os.kill(process.pid, signal.SIGKILL)
        process.communicate()
        assert process.returncode == -signal.SIGKILL
        assert not killed.exists()
        torn += any(not name.isdigit() for name in saved(folder))
    assert torn >= 2
    found, err = finish(start(config, killed))
    assert f"of 160, from {folder}" in err
    assert found["resumed_after_step"] > 0
    for name in ("train_nats", "evaluations", "results"):
        assert found[name] == expected[name]
    assert model_sha256(load_checkpoint(killed)) == model_sha256(load_checkpoint(whole))
    for name in ("curves.jsonl", "curves.svg"):
        assert (killed / name).read_bytes() == (whole / name).read_bytes()
    assert load_record(whole)["resumed_after_step"] == 0
    assert sorted(path.name for path in tmp_path.iterdir()) == ["killed", "tiny.yaml", "whole"]
