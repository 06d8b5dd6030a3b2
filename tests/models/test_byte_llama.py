"""The committed checkpoint: what its card says is so, on whatever Python this is."""

import json
import pathlib
import re

import jax
import numpy as np
import pytest

from models.card import render_card
from models.checkpoint import load_checkpoint, load_record, model_sha256
from models.decoder import make_decode
from models.evaluate import evaluate
from models.text import load_corpus
from models.training.command import read_config
from models.trigram import fit_trigram

ROOT = pathlib.Path(__file__).parents[2]
BYTE_LLAMA = ROOT / "models" / "checkpoints" / "byte_llama"


@pytest.fixture(scope="module")
def decode_and_params():
    return make_decode(load_checkpoint(BYTE_LLAMA))


def test_held_out_loss_is_far_below_a_trigrams_on_the_same_bytes(decode_and_params):
    corpus = load_corpus()
    heldout = evaluate(*decode_and_params, fit_trigram(corpus.train), corpus.heldout, context=1024, max_windows=8)
    assert heldout.bits_per_byte < heldout.trigram_bits_per_byte - 0.5
    # What it was trained on in short windows helps at the end of a long one too.
    assert max(heldout.bits_by_position[2:]) < heldout.trigram_bits_per_byte


def test_the_recorded_loss_clearly_beats_the_recorded_trigram():
    for result in load_record(BYTE_LLAMA)["results"].values():
        assert result["bits_per_byte"] < result["trigram_bits_per_byte"] - 0.5
        assert result["bits_per_byte"] == pytest.approx(result["nats"] / np.log(2))


def test_the_record_is_of_the_committed_config(decode_and_params):
    config = read_config(str(ROOT / "configs" / "train" / "byte_llama.yaml"), [])
    record = load_record(BYTE_LLAMA)
    assert config.recipe() == record["config"]
    assert ROOT / config.out_dir == BYTE_LLAMA
    assert load_checkpoint(BYTE_LLAMA).config.as_dict() == record["config"]["model"]
    assert record["parameters"] == sum(x.size for x in jax.tree.leaves(decode_and_params[1])) == 820_352
    assert record["config"]["model"]["q_heads"] >= 2 * record["config"]["model"]["kv_heads"]


def test_the_recorded_config_still_says_a_run_of_the_same_recipe(tmp_path):
    record = load_record(BYTE_LLAMA)
    path = tmp_path / "recorded.json"
    path.write_text(json.dumps(record["config"] | {"out_dir": "elsewhere"}))
    assert read_config(str(path), []).recipe() == record["config"]


def test_the_model_is_known_by_the_same_hash_as_when_it_was_committed():
    digest = "48433f93cadca0023282bcb10d9670df1d3a6bb9a0552b0a21dc41ea635bec18"
    assert model_sha256(load_checkpoint(BYTE_LLAMA)) == digest


def test_the_card_is_the_record():
    assert (BYTE_LLAMA / "README.md").read_text() == render_card("byte_llama", load_record(BYTE_LLAMA))


def test_the_checkpoint_is_small_and_names_no_folder_of_the_machine_that_made_it():
    files = [p for p in BYTE_LLAMA.rglob("*") if p.is_file()]
    assert sum(p.stat().st_size for p in files) < 4_000_000
    assert (BYTE_LLAMA / "weights" / "commit_success.txt").read_text() == "committed\n"
    for path in files:
        if path.suffix in (".json", ".md", ".txt") or path.name.endswith("METADATA"):
            assert not re.search(r"/(root|home|Users|tmp|work|mnt)/", path.read_text()), path
