import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from models.config import RopeScaling
from models.decoder import make_decode
from models.formats import load_model, save_hugging_face
from models.formats.hugging_face_config import config_from_json, config_to_json
from tests.models.families import FAMILIES, TINY, by_name, random_model
from tests.models.formats.files import plain


def weights_of(model):
    return {name: np.asarray(weight) for name, weight in by_name(make_decode(model)[1]).items()}


def assert_same(found, expected):
    assert found.config == expected.config
    assert weights_of(found).keys() == weights_of(expected).keys()
    for name, weight in weights_of(expected).items():
        assert weights_of(found)[name].dtype == weight.dtype
        np.testing.assert_array_equal(weights_of(found)[name], weight, err_msg=name)


def change_json(path, **words):
    found = json.loads(path.read_text()) | words
    path.write_text(json.dumps({key: value for key, value in found.items() if value != "leave out"}))


def change_tensors(folder, change):
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")


@pytest.fixture
def llama(tmp_path):
    save_hugging_face(tmp_path / "llama", random_model(TINY))
    return tmp_path / "llama"


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("biggest_file", [2**30, 4000])
def test_every_family_comes_back_bit_for_bit(tmp_path, family, biggest_file):
    model = random_model(FAMILIES[family])
    save_hugging_face(tmp_path / "model", model, biggest_file=biggest_file)
    files = {path.name for path in (tmp_path / "model").glob("*.safetensors")}
    assert len(files) == 1 if biggest_file > 4000 else len(files) > 3
    assert_same(load_model(tmp_path / "model"), model)


def test_weights_lie_as_the_format_has_them(llama):
    ours, theirs = weights_of(random_model(TINY)), load_file(llama / "model.safetensors")
    assert "lm_head.weight" not in theirs
    np.testing.assert_array_equal(
        theirs["model.layers.1.self_attn.k_proj.weight"], plain(ours["layers.1.attention.k_proj"])
    )
    np.testing.assert_array_equal(
        theirs["model.layers.0.self_attn.o_proj.weight"],
        ours["layers.0.attention.o_proj"].reshape(-1, TINY.width).T,
    )
    np.testing.assert_array_equal(
        theirs["model.layers.0.post_attention_layernorm.weight"], ours["layers.0.ffn_norm.scale"]
    )


def test_the_dtype_is_the_files_or_the_one_asked_for(tmp_path):
    model = random_model(dataclasses.replace(TINY, dtype="bfloat16", param_dtype="bfloat16"))
    save_hugging_face(tmp_path / "model", model)
    assert_same(load_model(tmp_path / "model"), model)
    wide = load_model(tmp_path / "model", dtype="float32")
    assert wide.config.dtype == wide.config.param_dtype == "float32"
    np.testing.assert_array_equal(weights_of(wide)["embedding"], weights_of(model)["embedding"].astype(np.float32))


def test_every_wrong_tensor_is_named_in_one_error(llama):
    def change(tensors):
        del tensors["model.norm.weight"], tensors["model.layers.1.mlp.up_proj.weight"]
        tensors["model.layers.0.self_attn.q_proj.bias"] = np.zeros(48, np.float32)
        tensors["model.layers.0.self_attn.k_proj.weight"] = np.zeros((16, 21), np.float32)

    change_tensors(llama, change)
    with pytest.raises(ValueError, match="4 tensors are not") as error:
        load_model(llama)
    for line in (
        "model.norm.weight: expected (20,), it is missing",
        "model.layers.1.mlp.up_proj.weight: expected (28, 20), it is missing",
        "model.layers.0.self_attn.q_proj.bias: expected none of that name, got (48,)",
        "model.layers.0.self_attn.k_proj.weight: expected (16, 20), got (16, 21)",
    ):
        assert line in str(error.value)


def test_a_tied_head_may_be_there_if_it_is_the_embedding(llama):
    change_tensors(llama, lambda t: t.update({"lm_head.weight": t["model.embed_tokens.weight"].copy()}))
    assert_same(load_model(llama), random_model(TINY))
    change_tensors(llama, lambda t: t["lm_head.weight"].__setitem__((3, 2), 9.0))
    with pytest.raises(ValueError, match=r"lm_head.weight: expected the embedding's values"):
        load_model(llama)
    change_json(llama / "config.json", tie_word_embeddings=False)
    untied = load_model(llama)
    assert weights_of(untied)["output"][3, 2] == 9.0


def test_constants_among_the_weights_of_old_files_mean_nothing(llama):
    change_tensors(llama, lambda t: t.update({"model.layers.0.self_attn.rotary_emb.inv_freq": np.ones(4, np.float32)}))
    assert_same(load_model(llama), random_model(TINY))


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (
            {"architectures": ["MambaForCausalLM"]},
            "architectures: expected one of LlamaForCausalLM.*got MambaForCausal",
        ),
        ({"architectures": "leave out"}, "architectures: expected one of .*got none"),
        ({"hidden_size": "leave out", "vocab_size": "leave out"}, "missing: hidden_size, vocab_size"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 2.0}}, "rope_type: expected default, .*got 'yarn'"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, "missing: low_freq_factor"),
        ({"hidden_act": "relu"}, "hidden_act: expected one of silu.*got 'relu'"),
        ({"attention_bias": True}, "attention_bias: expected False in a llama, got True"),
        ({"torch_dtype": "float64"}, "torch_dtype: expected one of float32, .*got 'float64'"),
        ({"rope_scaling": {"rope_type": "linear"}}, "rope_scaling of type linear: expected factor; missing: factor"),
        ({"quantization_config": {"bits": 4}}, "quantization_config: expected None in a llama, got {'bits': 4}"),
        ({"hidden_size": "wide"}, "hidden_size: expected a number, got 'wide'"),
        ({"num_hidden_layers": 10**9}, "expected weights of 1000000000 layers, got .* tensors in all"),
        ({"num_attention_heads": 5}, "kv_heads must divide q_heads"),
        ({"rope_parameters": "x"}, "rope_parameters: expected an object, got 'x'"),
        ({"rope_scaling": 4.0}, "rope_scaling: expected an object, got 4.0"),
        ({"architectures": 5}, "architectures: expected one of .*got 5"),
        ({"hidden_act": ["silu"]}, r"hidden_act: expected one of silu.*got \['silu'\]"),
    ],
)
def test_a_config_that_cannot_be_read_is_refused_in_words(llama, words, told):
    change_json(llama / "config.json", **words)
    with pytest.raises(ValueError, match=told):
        load_model(llama)


def test_what_is_null_is_left_out(llama):
    change_json(llama / "config.json", use_bidirectional_attention=None, attention_bias=None)
    assert_same(load_model(llama), random_model(TINY))


def test_broken_files_are_refused_by_name(llama):
    file = llama / "model.safetensors"
    whole = file.read_bytes()
    for broken in (whole[:-1], whole[:100], b"", b"\xff" * 64):
        file.write_bytes(broken)
        with pytest.raises(ValueError, match=r"llama: expected whole safetensors files"):
            load_model(llama)
    file.write_bytes(whole)
    (llama / "config.json").write_text("[1]")
    with pytest.raises(ValueError, match=r"config.json: expected a JSON object, got list"):
        load_model(llama)


def test_an_index_lists_files_that_are_there_and_beside_it(tmp_path):
    folder = tmp_path / "model"
    save_hugging_face(folder, random_model(TINY), biggest_file=4000)
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    first = sorted(set(index["weight_map"].values()))[0]
    (folder / first).rename(tmp_path / first)
    with pytest.raises(ValueError, match=f"missing: {first}"):
        load_model(folder)
    second = (folder / sorted(set(index["weight_map"].values()))[1]).read_bytes()
    (folder / first).write_bytes(second)  # a stale file must not win over another
    with pytest.raises(ValueError, match="expected each tensor in one file, got several of model"):
        load_model(folder)
    index["weight_map"]["model.norm.weight"] = f"../{first}"
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ValueError, match=r"expected files beside it, got \.\./"):
        load_model(folder)


def test_a_model_that_no_architecture_describes_is_not_written(tmp_path):
    odd = random_model(dataclasses.replace(TINY, attention_bias=True, qk_norm=True))
    with pytest.raises(ValueError, match="expected a model that one of LlamaForCausalLM"):
        save_hugging_face(tmp_path / "model", odd)
    assert not list(tmp_path.iterdir())


def test_later_words_for_rope_and_windows_are_understood():
    for family in ("llama3", "gemma3"):
        config = FAMILIES[family]
        json_ = config_to_json(config)
        theta, scaling = json_.pop("rope_theta"), json_.pop("rope_scaling")
        full = {"rope_theta": theta, **scaling}
        local = {"rope_type": "default", "rope_theta": json_.pop("rope_local_base_freq", None)}
        parameters = full if family == "llama3" else {"full_attention": full, "sliding_attention": local}
        assert config_from_json(json_ | {"rope_parameters": parameters}) == config
    gemma2 = config_to_json(FAMILIES["gemma2"])
    del gemma2["layer_types"]  # as its first files have it
    assert config_from_json(gemma2) == FAMILIES["gemma2"]
    assert config_from_json(
        config_to_json(TINY) | {"rope_scaling": {"type": "linear", "factor": 2.0}}
    ).rope_scaling == (RopeScaling("linear", 2.0))
    gemma2["layer_types"] = ["full_attention", "sliding_attention", "full_attention"]
    with pytest.raises(ValueError, match="layer_types: expected every k-th"):
        config_from_json(gemma2)


def test_each_device_gets_its_part_and_no_more_is_read(llama, monkeypatch):
    from models.formats import hugging_face

    read, stored = [], hugging_face._stored

    def counting(name, part):
        tensor = stored(name, part)

        def count(index):
            found = tensor.read(index)
            read.append((name, found.size))
            return found

        return dataclasses.replace(tensor, read=count)

    monkeypatch.setattr(hugging_face, "_stored", counting)
    mesh = jax.make_mesh((2,), ("model",), axis_types=(jax.sharding.AxisType.Auto,), devices=jax.devices()[:2])
    cut_at = {"q_proj": 1, "k_proj": 1, "v_proj": 1, "o_proj": 0, "gate_proj": 1, "up_proj": 1, "down_proj": 0}

    def shardings(path):
        axis = cut_at.get(path.rsplit(".", 1)[-1])
        spec = () if axis is None else (*[None] * axis, "model")
        return jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(*spec))

    model = load_model(llama, shardings=shardings)
    assert_same(model, random_model(TINY))
    q = by_name(make_decode(model)[1])["layers.0.attention.q_proj"]
    assert q.sharding == shardings("layers.0.attention.q_proj")
    assert {shard.data.shape for shard in q.addressable_shards} == {(20, 3, 8)}
    sizes = {name: weight.size for name, weight in load_file(llama / "model.safetensors").items()}
    for name, size in sizes.items():
        parts = [count for found, count in read if found == name]
        cut = any(f".{part}." in name for part in cut_at)
        # What is whole on every device is read once all the same.
        assert parts == ([size // 2] * 2 if cut else [size]), name


def test_a_part_within_a_head_is_right_too(llama):
    mesh = jax.make_mesh((2, 4), ("a", "b"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    spec = jax.sharding.PartitionSpec
    of = {"q_proj": spec("b", "a", None), "k_proj": spec(None, None, "b"), "o_proj": spec("a", "b", None)}
    found = load_model(
        llama, shardings=lambda path: jax.sharding.NamedSharding(mesh, of.get(path.rsplit(".", 1)[-1], spec()))
    )
    assert_same(found, random_model(TINY))
    assert jnp.ndim(by_name(make_decode(found)[1])["norm.scale"]) == 1
