import dataclasses
import functools
import itertools
import json
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from models.checkpoint import load_checkpoint, model_sha256, save_checkpoint
from models.config import DecoderConfig
from models.decoder import Decoder, make_decode
from tests.models.families import FAMILIES, random_model

CONFIG = DecoderConfig(vocab=7, width=6, layers=12, q_heads=2, kv_heads=1, head_dim=4, ffn=5, tied_embeddings=False)


@functools.cache
def make_model(seed=0, config=CONFIG):
    return Decoder(config, rngs=nnx.Rngs(seed))


def assert_same(first, second):
    (first_decode, first_params), (second_decode, second_params) = make_decode(first), make_decode(second)
    assert first_decode == second_decode
    jax.tree.map(np.testing.assert_array_equal, first_params, second_params)


def test_a_model_comes_back_bit_for_bit(tmp_path):
    # Twelve layers: "10" sorts before "2".
    save_checkpoint(tmp_path / "model", make_model())
    assert_same(load_checkpoint(tmp_path / "model"), make_model())


@pytest.mark.parametrize("param_dtype", ["float32", "bfloat16"])
def test_a_model_of_another_family_comes_back_bit_for_bit(tmp_path, param_dtype):
    model = random_model(dataclasses.replace(FAMILIES["gemma3"], param_dtype=param_dtype))
    save_checkpoint(tmp_path / "model", model)
    loaded = load_checkpoint(tmp_path / "model")
    assert_same(loaded, model)
    assert loaded.layers[0].attention.q_norm.scale[...].dtype == jnp.dtype(param_dtype)


def test_a_checkpoint_can_be_moved_and_says_nothing_of_where_it_was(tmp_path):
    save_checkpoint(tmp_path / "model", make_model(), {"README.md": "# A model\n"})
    (tmp_path / "model").rename(tmp_path / "moved")
    assert_same(load_checkpoint(tmp_path / "moved"), make_model())
    files = [p for p in (tmp_path / "moved").rglob("*") if p.is_file()]
    assert len(files) > 3
    assert not [p for p in files if str(tmp_path).encode() in p.read_bytes()]
    assert (tmp_path / "moved" / "README.md").read_text() == "# A model\n"


def test_the_hash_of_a_model_is_that_of_its_weights_and_config_wherever_they_lie(tmp_path):
    digest = model_sha256(make_model())
    save_checkpoint(tmp_path / "a", make_model())
    assert model_sha256(load_checkpoint(tmp_path / "a")) == digest
    assert model_sha256(make_model(seed=1)) != digest
    assert model_sha256(make_model(config=dataclasses.replace(CONFIG, rope_theta=1e6))) != digest
    # One weight in its last place, and two weights of the same shape that change places.
    decode, params = make_decode(make_model())
    flat, tree = jax.tree.flatten(params)
    nudged = [jnp.nextafter(flat[0], jnp.full_like(flat[0], jnp.inf)), *flat[1:]]
    same = next((i, j) for i, j in itertools.combinations(range(len(flat)), 2) if flat[i].shape == flat[j].shape)
    swapped = list(flat)
    swapped[same[0]], swapped[same[1]] = flat[same[1]] + 1, flat[same[0]] + 1
    plus_one = list(flat)
    plus_one[same[0]], plus_one[same[1]] = flat[same[0]] + 1, flat[same[1]] + 1
    hashes = [model_sha256(decode.model(tree.unflatten(leaves))) for leaves in (nudged, swapped, plus_one)]
    assert len({digest, *hashes}) == 4


def test_loading_writes_nothing(tmp_path):
    save_checkpoint(tmp_path / "model", make_model())

    def listing():
        return {p: (p.stat().st_mtime_ns, p.stat().st_size) for p in tmp_path.rglob("*")}

    before = listing()
    load_checkpoint(tmp_path / "model")
    assert listing() == before


def test_a_taken_path_is_refused_and_left_as_it_was(tmp_path):
    save_checkpoint(tmp_path / "model", make_model())
    with pytest.raises(FileExistsError, match="model exists; give another path, or set overwrite"):
        save_checkpoint(tmp_path / "model", make_model(seed=1))
    assert_same(load_checkpoint(tmp_path / "model"), make_model())


def test_overwriting_leaves_only_the_new_checkpoint(tmp_path):
    save_checkpoint(tmp_path / "model", make_model(), {"old.txt": ""})
    save_checkpoint(tmp_path / "model", make_model(seed=1), overwrite=True)
    assert_same(load_checkpoint(tmp_path / "model"), make_model(seed=1))
    assert [p.name for p in tmp_path.iterdir()] == ["model"]
    assert not (tmp_path / "model" / "old.txt").exists()


def test_a_path_without_a_checkpoint_is_named(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"no checkpoint at .*nothing: config\.json is missing"):
        load_checkpoint(tmp_path / "nothing")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"vocab": 8}, r"weight embedding should have shape \(8, 6\), found \(7, 6\)"),
        ({"layers": 10**12}, "expected weights of 1000000000000 layers, got 111 weights in all"),
        ({"layers": 13}, r"weight layers.12.attention.k_proj should have shape \(6, 1, 4\), found None"),
        ({"tied_embeddings": True}, r"weight output should have shape None, found \(7, 6\)"),
    ],
)
def test_weights_that_do_not_fit_the_config_are_named(tmp_path, change, message):
    save_checkpoint(tmp_path / "model", make_model())
    config = tmp_path / "model" / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | change))
    with pytest.raises(ValueError, match=message):
        load_checkpoint(tmp_path / "model")


def test_weights_that_are_not_those_that_were_saved_are_seen(tmp_path):
    for seed in (0, 1):
        save_checkpoint(tmp_path / str(seed), make_model(seed))
    shutil.rmtree(tmp_path / "0" / "weights")
    shutil.copytree(tmp_path / "1" / "weights", tmp_path / "0" / "weights")
    with pytest.raises(ValueError, match=r"0: weights: expected arrays of the hash in weights\.sha256, got others"):
        load_checkpoint(tmp_path / "0")


def test_nothing_but_a_model_is_replaced(tmp_path):
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "letter.txt").write_text("dear")
    with pytest.raises(FileExistsError, match=r"home exists and is no folder with a config\.json"):
        save_checkpoint(tmp_path / "home", make_model(), overwrite=True)
    assert [p.name for p in tmp_path.rglob("*")] == ["home", "letter.txt"]
