"""`python -m models train`: what it writes, what it says, what it refuses."""

import io
import json
import pathlib
import re

import jax
import pytest
import rich.console

from models import cli
from models.checkpoint import load_checkpoint
from models.decoder import make_decode
from models.training import command
from models.training.command import read_config
from models.training.loop import Progress
from tests.models.training.tiny import YAML

ROOT = pathlib.Path(__file__).parents[3]


@pytest.fixture
def config(tmp_path):
    path = tmp_path / "tiny.yaml"
    path.write_text(YAML + f"out_dir: {tmp_path / 'tiny'}\n")
    return str(path)


def test_it_writes_a_checkpoint_with_card_and_curves_goes_on_where_it_was_and_ends_in_json(
    tmp_path, config, monkeypatch, capsys
):
    argv = ["train", config, "--optimizer.peak_learning_rate", "0.005", "--checkpoint_every", "2"]
    with monkeypatch.context() as patch:
        # As if killed when all is trained.
        patch.setattr(command, "evaluate_all", lambda *_: pytest.exit("killed"))
        with pytest.raises(pytest.exit.Exception):
            cli.main(argv)
    assert not (tmp_path / "tiny").exists()
    capsys.readouterr()

    # With another recipe it would not go on.
    assert cli.main(["train", config, "--checkpoint_every", "2"]) == 2
    output = capsys.readouterr()
    assert output.out == ""
    assert "optimizer.peak_learning_rate is 0.005 there and 0.01 here" in output.err.splitlines()[-1]

    assert cli.main(argv) == 0
    output = capsys.readouterr()
    assert output.err == f"goes on after step 4 of 4, from {tmp_path / 'tiny.checkpoints'}\n"
    summary = json.loads(output.out.splitlines()[-1])
    record = json.loads((tmp_path / "tiny" / "training.json").read_text())
    assert summary["results"]["heldout_32"]["nats"] == record["results"]["heldout_32"]["nats"]
    assert record["config"]["optimizer"]["peak_learning_rate"] == 0.005
    assert record["command"] == f"python -m models {' '.join(argv)}"
    assert list(record["evaluations"]["nats"]) == ["3", "4"]
    _, params = make_decode(load_checkpoint(tmp_path / "tiny"))
    assert record["parameters"] == sum(x.size for x in jax.tree.leaves(params))
    card = (tmp_path / "tiny" / "README.md").read_text()
    for words in (
        f"{record['results']['heldout_32']['bits_per_byte']:.4f}",
        record["text_sha256"],
        record["command"],
        "after step 4, where it went on",
        "](curves.svg)",
        f"{record['evaluations']['nats']['3']:.4f} nats at first",
    ):
        assert words in card
    rows = [json.loads(line) for line in (tmp_path / "tiny" / "curves.jsonl").read_text().splitlines()]
    assert [row["heldout"] for row in rows] == [None, None, *record["evaluations"]["nats"].values()]
    assert (tmp_path / "tiny" / "curves.svg").is_file()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["tiny", "tiny.yaml"]

    # What is there now is safe from the same command, which says so before it trains.
    monkeypatch.setattr(command, "train", lambda *_: pytest.fail("trained for nothing"))
    assert cli.main(argv) == 2
    output = capsys.readouterr()
    assert output.out == ""
    assert output.err.startswith(f"error: {tmp_path / 'tiny'} exists; give another path")

    # `evaluate` finds what the card says, on the contexts that the model is made for.
    assert cli.main(["evaluate", str(tmp_path / "tiny")]) == 0
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert found["trained_on_this_text"] is True
    assert found["results"] == json.loads(json.dumps(record["results"]))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nowhere.yaml"], "error: [Errno 2] No such file or directory: 'nowhere.yaml'"),
        (["tiny.yaml", "--seed", "abc"], "error: `seed`: Couldn't parse 'abc' into an int"),
        (["tiny.yaml", "--optimizer.warmup_steps", "4"], "error: optimizer.warmup_steps must be below the 4 steps of"),
        (["broken.yaml"], "error: while parsing a flow node"),
    ],
)
def test_a_mistake_is_told_in_one_line(tmp_path, config, monkeypatch, capsys, arguments, message):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "broken.yaml").write_text("model: [\n")
    assert cli.main(["train", *arguments]) == 2
    output = capsys.readouterr()
    assert output.out == ""
    (line,) = output.err.splitlines()
    assert line.startswith(message)
    assert not (tmp_path / "tiny").exists()


def test_the_bar_shows_the_loss_and_the_last_look_at_held_out_text():
    written = io.StringIO()
    with command._bar(rich.console.Console(file=written, force_terminal=True, width=120), 4, 1) as on_step:
        on_step(Progress(2, 1.5, 1.25))
        on_step(Progress(3, 1.4, None))
    last = re.sub(r"\x1b\[[^A-Za-z]*[A-Za-z]", "", written.getvalue()).replace("\r", "\n").strip().splitlines()[-1]
    assert last.startswith("loss 1.400, held out 1.250")
    assert "3/4" in last
    with command._bar(rich.console.Console(file=(silent := io.StringIO())), 4, 0) as on_step:
        on_step(Progress(1, 1.5, None))
    assert silent.getvalue() == ""


def test_of_two_folders_on_the_command_line_the_last_one_counts(tmp_path, config):
    """The card adds one behind a command that may have its own."""
    assert read_config(config, ["--out_dir", "a", "--out_dir", "b"]).out_dir == "b"


def test_the_config_for_newcomers_shows_evaluation_and_checkpoints():
    smoke = read_config(str(ROOT / "configs" / "train" / "smoke.yaml"), [])
    assert smoke.evaluate_every
    assert 0 < smoke.checkpoint_every < smoke.steps


def test_a_second_process_is_refused_and_the_first_one_leaves_nothing(tmp_path):
    path, said = str(tmp_path / "model"), "model is being trained by another process"
    with command._alone(path), pytest.raises(ValueError, match=said), command._alone(path):
        pytest.fail("two at once")
    assert not list(tmp_path.iterdir())
