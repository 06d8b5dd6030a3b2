"""The command line: what is printed where, and the exit code."""

import re
import warnings

import pytest
from tokenizers import pre_tokenizers

from models import cli
from models.checkpoint import model_sha256
from models.fetch import FetchError
from models.formats import load_model, load_tokenizer, save_hugging_face
from models.formats.tokenizers import begin_with, byte_level_bpe
from models.names import find_model
from models.stream import Speed
from models.tokenizer import Bytes

GENERATE = ["generate", "--model", "byte_llama", "The import "]


@pytest.fixture
def run(capsys):
    def run(*argv):
        code = cli.main([str(word) for word in argv])
        return code, *capsys.readouterr()

    return run


def test_a_warning_is_a_line_and_the_speed_another(run, monkeypatch):
    def stream(*args, write, **options):
        for text in ("some ", "text"):
            warnings.warn("scales are 1", stacklevel=1)
            write(text)
        return Speed(1.0, 2.0, 3, 0.5, 0, 0.0)

    monkeypatch.setattr(cli, "stream", stream)
    speed = "load 1.0 s, compile 2.0 s; prefill 3 tokens in 0.50 s, 6.0 tokens/s; decode 0 tokens in 0.00 s"
    assert run(*GENERATE) == (0, "some text\n", f"warning: scales are 1\n{speed}\n")


def test_info_tells_what_the_model_is(run):
    code, out, _ = run("info", "byte_llama")
    assert code == 0
    words = " ".join(re.sub(r"[│\s]+", " ", out).split())
    for fact in ("format checkpoint", "parameters 820,352", "bytes in memory 3,281,408", "tokenizer Bytes, 256 ids"):
        assert fact in words
    # 4 layers, keys and values, 2 heads of 32 channels: at 2 bytes, and at 1 with a scale of 4 for each head.
    assert "1,024 in bf16, 576 in e4m3_token_head" in words


@pytest.mark.parametrize("to", ["hugging_face", "checkpoint"])
def test_a_converted_model_is_the_same_and_reads_the_same(run, tmp_path, to):
    target = tmp_path / "target"
    code, out, _ = run("convert", "byte_llama", target, "--to", to)
    assert code == 0
    assert str(target) in out
    assert model_sha256(load_model(target)) == model_sha256(load_model(find_model("byte_llama")))
    assert isinstance(load_tokenizer(target), Bytes)
    code, _, err = run("convert", "byte_llama", target, "--to", to)
    assert code == 2
    assert "exists" in err


def test_a_tokenizer_goes_with_its_model(run, tmp_path):
    source, target = tmp_path / "source", tmp_path / "target"
    library = byte_level_bpe(["a", "b", "ab", "<s>"], ["a b"], [pre_tokenizers.ByteLevel(add_prefix_space=False)])
    begin_with(library, "<s>", 3)
    ids = {"bos_token_id": 3, "eos_token_id": [0, 1]}
    files = {"tokenizer.json": library.to_str()}
    save_hugging_face(source, load_model(find_model("byte_llama")), files, words=ids)
    for to in ("hugging_face", "checkpoint"):
        assert run("convert", source, target, "--to", to, "--overwrite")[0] == 0
        found = load_tokenizer(target)
        assert (found.bos, found.eos, found.encode("abb")) == (3, (0, 1), [3, 2, 1])


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["info", "byte_lama"], "error: model: expected byte_llama, smollm2 or a path that exists, got 'byte_lama'"),
        (["info", "smollm2"], "python -m models fetch smollm2"),
        (["generate", "--model", "byte_llama", ""], "error: prompt: expected at least one token"),
        ([*GENERATE, "--max_tokens", "2000"], "error: max_tokens: expected at most 1013"),
        ([*GENERATE, "--kv_format", "bf17"], "error: scheme: expected"),
        ([*GENERATE, "--temperature", "-1"], "error: temperature: expected 0 or more"),
        ([*GENERATE, "--block_size", "0"], "error: block_size"),
        ([*GENERATE, "--seed", "-1"], "error: seed must be at least 0"),
        ([*GENERATE, "--seed", str(2**32)], "error: seed: expected less than 2**32"),
        (["evaluate", __file__], "expected a folder with training.json"),
        (["convert", "byte_llama", ""], "error: expected a path to write to, got an empty one"),
        (["info", __file__], "error: "),
        (["convert", "nothing", "target"], "error: model: expected"),
    ],
)
def test_mistakes_are_told_in_a_line(run, monkeypatch, tmp_path, argv, said):
    monkeypatch.setenv("PAXKV_CACHE_DIR", str(tmp_path))
    code, out, err = run(*argv)
    assert (code, out.strip()) == (2, "")
    assert said in err
    assert len(err.splitlines()) == 1


@pytest.mark.parametrize("argv", [[], ["fetch", "gpt"], ["generate", "x"], ["convert", "a", "b", "--to", "gguf"]])
def test_words_that_are_no_command_are_refused(argv, capsys):
    with pytest.raises(SystemExit) as caught:
        cli.main(argv)
    assert caught.value.code == 2
    assert "usage: python -m models" in capsys.readouterr().err


def test_an_option_that_is_none_is_refused_with_the_usage_of_its_verb(capsys):
    with pytest.raises(SystemExit):
        cli.main([*GENERATE, "--tokens", "8"])
    err = capsys.readouterr().err
    assert "usage: python -m models generate" in err
    assert "unrecognized arguments: --tokens 8" in err


@pytest.mark.parametrize("text", ["", "[]", '{"eos_token_id": "x"}'])
def test_a_broken_file_beside_a_tokenizer_is_named(run, tmp_path, text):
    library = byte_level_bpe(["a", "b"], [], [pre_tokenizers.ByteLevel(add_prefix_space=False)])
    files = {"tokenizer.json": library.to_str(), "generation_config.json": text}
    save_hugging_face(tmp_path / "model", load_model(find_model("byte_llama")), files)
    code, _, err = run("generate", "--model", tmp_path / "model", "a")
    assert code == 2
    assert str(tmp_path / "model") in err


def test_fetch_says_where_the_model_is_or_why_it_is_not(run, monkeypatch, tmp_path):
    monkeypatch.setattr(cli, "fetch", lambda name: (tmp_path / name, True))
    assert run("fetch", "smollm2") == (0, f"smollm2 is now at {tmp_path / 'smollm2'}, whole and as expected\n", "")
    monkeypatch.setattr(cli, "fetch", lambda name: (tmp_path / name, False))
    assert "smollm2 was already at" in run("fetch", "smollm2")[1]

    def offline(name):
        raise FetchError("could not be fetched;\n tried this")

    monkeypatch.setattr(cli, "fetch", offline)
    assert run("fetch", "smollm2") == (2, "", "error: could not be fetched; tried this\n")


@pytest.mark.soak
def test_smollm2_knows_a_capital(run):
    try:
        find_model("smollm2")
    except FileNotFoundError as error:
        pytest.skip(str(error))
    code, out, err = run("generate", "--model", "smollm2", "The capital of France is", "--max_tokens", 8)
    assert code == 0
    assert "Paris" in out
    assert float(re.search(r"decode 7 tokens in [\d.]+ s, ([\d.]+) tokens/s", err)[1]) > 0
