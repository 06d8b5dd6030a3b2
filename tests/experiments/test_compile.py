"""Compiling for absent devices from the command line; the compilers are played by a function."""

import json

import pytest

from experiments import cli, compile, registry
from experiments.errors import UserError
from pallas_kernels.offline import Outcome

DECODE = "d128_kv8_g4_b16_bf16"


@pytest.fixture
def compiler(monkeypatch):
    """Answers by target, kernel and case; all else compiles to the same figures."""
    answers = {}

    def answer(job, arguments, *, environment, time_limit_s):
        asked = [(arguments["target"], *name) for name in arguments["names"]]
        report = {"registers": 110, "spills": 0, "cycles_over_allowed": 0.5, "kernels": {"not": "shown"}}
        outcomes = [answers.get(name, Outcome("ok", report, "", 1.0)) for name in asked]
        ended = [outcome for outcome in outcomes if outcome.status in ("crashed", "timed_out")]
        if ended:  # takes along what else was in its process
            return ended[0]
        given = [{"status": o.status, "report": o.report, "message": o.message} for o in outcomes]
        return Outcome("ok", {"outcomes": given}, "", 1.0)

    monkeypatch.setattr(compile.offline, "run_job", answer)
    return answers


def results_of(capsys):
    return json.loads(capsys.readouterr().out.splitlines()[-1])


def test_a_case_is_compiled_for_every_target_and_kept_to_no_limit(compiler, capsys, tmp_path):
    out = tmp_path / "results.json"
    code = cli.main(["compile", f"*_decode/{DECODE}", "--targets", "[h100, v6e]", "--out", str(out)])
    out_text = capsys.readouterr().out
    summary = json.loads(out_text.splitlines()[-1])
    assert code == 0
    for metric, shown in {"spills": 1, "registers": 1, "cycles_over_allowed": 1}.items():
        assert out_text.count(compile.GLOSSARY[metric]) == shown
    assert summary["status"] == "finished"
    kernels = ("paged_decode", "contiguous_decode", "jax_paged_decode")
    assert summary["results"] == {
        **{f"h100/{kernel}/{DECODE}": {"registers": 110, "spills": 0} for kernel in kernels},
        **{f"v6e/{kernel}/{DECODE}": {"cycles_over_allowed": 0.5, "spills": 0} for kernel in kernels},
    }
    assert json.loads(out.read_text()) == summary


@pytest.mark.parametrize(
    ("limits", "words"),
    [
        ("--at_most.h100/paged*={registers: 109}", "registers must be at most 109, got 110"),
        ("--at_least.h100/paged*={registers: 111}", "registers must be at least 111, got 110"),
        ("--at_least.h100/paged*={wgmma: 1}", "wgmma must be at least 1, got None"),
        ("--at_most.h100/paged*={registers: 110, spills: 0}", ""),
        ("--at_least.h100/paged*={registers: 110}", ""),
        ("--at_most.v6e/*={registers: 1}", ""),
    ],
)
def test_limits_hold_where_their_pattern_fits(compiler, capsys, limits, words):
    code = cli.main(["compile", f"paged_decode/{DECODE}", "--targets", "[h100]", limits])
    row = results_of(capsys)["results"][f"h100/paged_decode/{DECODE}"]
    assert (code, row.get("broken", "")) == (1 if words else 0, words)


@pytest.mark.parametrize("status", ["refused", "failed", "crashed", "timed_out"])
def test_one_case_that_does_not_compile_does_not_hide_the_others(compiler, capsys, status):
    compiler["h100", "paged_decode", DECODE] = Outcome(status, {}, "so it was", 1.0)
    code = cli.main(["compile", f"*paged_decode/{DECODE}", "--targets", "[h100]"])
    captured = capsys.readouterr()
    assert code == 1
    assert f"check failed: h100/paged_decode/{DECODE} was {status}: so it was" in captured.err
    found = json.loads(captured.out.splitlines()[-1])["results"]
    assert found[f"h100/paged_decode/{DECODE}"] == {"status": status, "message": "so it was"}
    assert found[f"h100/jax_paged_decode/{DECODE}"]["registers"] == 110


def test_a_compiler_that_is_not_installed_is_named_at_once(compiler, capsys):
    compiler["h100", "paged_decode", DECODE] = Outcome("missing", {}, "ptxas is not installed; install the group", 1.0)
    assert cli.main(["compile", f"paged_decode/{DECODE}", "--targets", "[h100]"]) == 2
    assert "ptxas is not installed; install the group" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["paged_decode/d128*", "--targets", "[h1000]"], "targets must be of h100,"),
        (["paged_decode/d127*"], "cases must match a kernel/case of h100, v5e, v6e, tpu7x, got 'paged_decode/d127\\*'"),
        (["paged_decode/d127*", "--targets", "[v6e]"], f"; the cases of paged_decode are .*{DECODE}, d128_"),
        (["page_decode/d128*"], "; the kernels are paged_decode, paged_prefill, .*, jax_paged_decode$"),
        (["paged_decode/d128*", "--jobs", "0"], "jobs must be at least 1, got 0"),
    ],
)
def test_what_does_not_exist_is_refused(arguments, words):
    with pytest.raises(UserError, match=words):
        compile.command(arguments[0], cli.parse_overrides(arguments[1:])[1], None, None)


def test_results_that_could_not_be_written_are_not_computed(compiler, capsys, monkeypatch, tmp_path):
    monkeypatch.setattr(compile, "run", lambda *_: pytest.fail("something was compiled"))
    out = tmp_path / "none" / "out.json"
    assert cli.main(["compile", f"paged_decode/{DECODE}", "--targets", "[h100]", "--out", str(out)]) == 2
    assert f"cannot write {out}: there is no folder {out.parent}" in capsys.readouterr().err


def test_help_needs_no_config(capsys):
    assert cli.main(["compile", "--help"]) == 0
    out = capsys.readouterr().out
    assert f"usage: {cli.COMPILE_USAGE}" in out
    assert "--targets" in out


def test_compile_needs_one_config(capsys):
    assert cli.main(["compile"], registry.EXPERIMENTS) == 2
    assert "compile needs one config or one KERNEL/CASE, got 0" in capsys.readouterr().err
