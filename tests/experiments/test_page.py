"""The report is one self-contained page that repeats byte for byte and is built from the run's files alone."""

import json
import pathlib
import re
import shutil
from html.parser import HTMLParser

import pytest

from experiments import cli, files

HERE = pathlib.Path(__file__).parent
EXPERIMENTS = {"fake": "fake_experiment"}
YAML = "# Does counting <work>?\n# One second.\n\nexperiment: fake\nmemory: {block_size: 16}\n"


class Page(HTMLParser):
    """Checks nesting, and collects tags, ids and what they refer to."""

    VOID = ("meta", "br", "img")

    def __init__(self, text):
        super().__init__()
        self.open, self.tags, self.ids, self.references, self.words = [], [], [], [], []
        self.feed(text)
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        self._seen(tag, attrs)
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self._seen(tag, attrs)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.words.append(data)

    def _seen(self, tag, attrs):
        self.tags.append(tag)
        for name, value in attrs:
            if name == "id":
                self.ids.append(value)
            if name in ("href", "xlink:href", "src"):
                self.references.append(value)


@pytest.fixture
def run(tmp_path, monkeypatch, capsys):
    monkeypatch.syspath_prepend(str(HERE))
    monkeypatch.chdir(tmp_path)
    pathlib.Path("fake.yaml").write_text(YAML)
    assert cli.main(["run", "fake.yaml", "--memory.policy", "fifo"], EXPERIMENTS) == 0
    capsys.readouterr()
    (path,) = pathlib.Path("runs").iterdir()
    return path


def test_the_page_needs_nothing_from_elsewhere(run):
    text = (run / "report.html").read_text()
    page = Page(text)
    assert not {"script", "link", "iframe", "img"} & set(page.tags)
    assert all(reference.startswith("#") for reference in page.references)
    assert not re.search(r"https?:|url\((?!#)|@import", text)


def test_every_id_of_the_page_is_its_own_and_every_reference_has_one(run):
    text = (run / "report.html").read_text()
    page = Page(text)
    assert page.tags.count("svg") == 2
    assert len(page.ids) == len(set(page.ids))
    used = {reference[1:] for reference in page.references} | set(re.findall(r"url\(#([^)]+)\)", text))
    assert used <= set(page.ids)
    assert used


def test_the_page_says_what_was_asked_how_and_what_came_out(run):
    text = (run / "report.html").read_text()
    words = " ".join("".join(Page(text).words).split())
    for part in (
        "A tiny experiment that <counts>.",
        "Does counting <work>? One second.",
        "python -m experiments run fake.yaml --memory.policy fifo",
        "finished",
        "ttft_ms_p50 modelled",
        "Most requests in flight at once.",
        "Time until the first token, in ms.",
        "Running & waiting",
        "More is better.",
        "policy: fifo",
        "trace_sha256",
        files.read_json(run / "manifest.json")["config_sha256"],
    ):
        assert part in words, part


def test_the_page_can_be_made_again_from_a_copy_of_the_files_alone(run, tmp_path, capsys):
    made = (run / "report.html").read_bytes()
    copy = tmp_path / "elsewhere" / run.name
    shutil.copytree(run, copy)
    pathlib.Path("fake.yaml").unlink()
    (copy / "report.html").unlink()
    assert cli.main(["report", str(copy)], EXPERIMENTS) == 0
    out = capsys.readouterr().out
    assert "peak_running" in out
    assert out.splitlines()[-1] == json.dumps(files.read_json(run / "summary.json"), separators=(",", ":"))
    assert (copy / "report.html").read_bytes() == made


@pytest.mark.parametrize("name", ["summary.json", "manifest.json", "config.yaml", "steps.parquet"])
def test_a_damaged_file_is_named_and_nothing_is_overwritten(run, capsys, name):
    (run / name).write_text("{")
    before = {p: p.read_bytes() for p in run.rglob("*") if p.is_file()}
    assert cli.main(["report", str(run)], EXPERIMENTS) == 2
    assert name in capsys.readouterr().err
    if name == "summary.json":
        assert cli.main(["run", "fake.yaml", "--memory.policy", "fifo"], EXPERIMENTS) == 2
    assert {p: p.read_bytes() for p in run.rglob("*") if p.is_file()} == before


@pytest.mark.parametrize("name", ["missing", "notes"])
def test_what_is_no_run_directory_is_refused(tmp_path, monkeypatch, capsys, name):
    monkeypatch.chdir(tmp_path)
    pathlib.Path("notes").mkdir()
    assert cli.main(["report", name], EXPERIMENTS) == 2
    assert name in capsys.readouterr().err


def test_a_run_that_was_stopped_before_it_wrote_anything_is_named(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    pathlib.Path("fake-01234567-0").mkdir()
    assert cli.main(["report", "fake-01234567-0"], EXPERIMENTS) == 1
    assert "stopped before it wrote its config" in capsys.readouterr().out
