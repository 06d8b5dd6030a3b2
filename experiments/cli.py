"""`python -m experiments {list,run,sweep,report,calibrate,compile,tune,doctor}`.

Standard output carries tables and, as its last line, one compact JSON; all else goes to standard error. The exit code
is 0, or 1 if a check of a run failed or the run is unfinished, or 2 if something must be put right first.
"""

import argparse
import pathlib
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import rich.console

from experiments import registry
from experiments.errors import UserError, last_words

COMPILE_USAGE = "python -m experiments compile {CONFIG.yaml | KERNEL/CASE} [--out FILE.json] [--dotted.key VALUE ...]"
TUNE_USAGE = "python -m experiments tune CONFIG.yaml [--install] [--out FILE.json] [--dotted.key VALUE ...]"
HELP = {
    "compile": "Compiles kernels for devices that are not there, and holds them to limits. --out keeps the results.",
    "tune": "Finds the sizes that suit kernels on the device that is here, or on the TPU that --target names. "
    "--install keeps them where kernels look for them, --out keeps every trial.",
}
RUN_USAGE = (
    "python -m experiments run CONFIG.yaml [--out_dir runs] [--seed N] [--dotted.key VALUE ...] "
    "[--processes N --process I --coordinator HOST:PORT]"
)

SWEEP_USAGE = (
    "python -m experiments sweep CONFIG.yaml --axis KEY=VALUE,VALUE,... [--axis ...] [--when AXIS=VALUE KEY=VALUE] "
    "[--plot METRIC] [--out_dir runs] [--dotted.key VALUE ...]"
)


def main(argv: Sequence[str] | None = None, experiments: Mapping[str, str] = registry.EXPERIMENTS) -> int:
    """Runs the command line.

    Args:
      argv: the arguments; those of the process if None.
      experiments: modules by experiment name.

    Returns:
      The exit code.
    """
    argv = sys.argv[1:] if argv is None else list(argv)
    options, rest = _parser().parse_known_args(argv)
    console = rich.console.Console(width=None if sys.stdout.isatty() else 160, highlight=False)
    try:
        return _dispatch(options, rest, argv, experiments, console)
    except (UserError, KeyboardInterrupt) as error:
        words, code = last_words(error)
        print(words, file=sys.stderr)
        return code


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m experiments", allow_abbrev=False, description=__doc__)
    verbs = parser.add_subparsers(
        dest="verb", required=True, metavar="{list,run,sweep,report,calibrate,compile,tune,doctor}"
    )
    for verb, words in (
        ("list", "the experiments, their configs and their runs"),
        ("run", "run a config, or resume its unfinished run"),
        ("sweep", "run a config at every point of a grid, or resume an unfinished sweep"),
        ("report", "print a run's table again and rewrite its report.html"),
        ("calibrate", "fit the modelled clock to what a run measured"),
        ("compile", "compile kernels for devices that are not there, and hold them to limits"),
        ("tune", "find the sizes that suit kernels on a device"),
        ("doctor", "what this machine can run, and what is missing"),
    ):
        usage = {"run": RUN_USAGE, "sweep": SWEEP_USAGE, "compile": COMPILE_USAGE, "tune": TUNE_USAGE}.get(verb)
        sub = verbs.add_parser(
            verb,
            help=words,
            description=words,
            usage=usage,
            allow_abbrev=False,
            add_help=verb not in ("run", "sweep", *HELP),
        )
        if verb in ("report", "calibrate"):
            sub.add_argument("run_dir", type=pathlib.Path)
            if verb == "calibrate":
                sub.add_argument(
                    "--out", type=pathlib.Path, help="a file for the results, as JSON; beside the run if not given"
                )
        elif verb in ("compile", "tune"):
            sub.add_argument("--out", type=pathlib.Path, help="a file for the results, as JSON")
            if verb == "tune":
                sub.add_argument("--install", action="store_true", help="keep what is found for kernels to use")
        else:
            if verb == "sweep":
                sub.add_argument("--axis", action="append", default=[])
                sub.add_argument("--when", action="append", default=[], nargs=2)
                sub.add_argument("--plot")
            sub.add_argument("--out_dir", type=pathlib.Path, default=pathlib.Path("runs"), help="where runs are kept")
    return parser


def _dispatch(
    options: argparse.Namespace,
    rest: Sequence[str],
    argv: Sequence[str],
    experiments: Mapping[str, str],
    console: rich.console.Console,
) -> int:
    # Imported per verb: a list or a typing error must not wait for JAX.
    if options.verb == "run":
        from experiments import run

        paths, overrides = parse_overrides(rest)
        wants_help = overrides.pop("help", None) is not None
        if len(paths) != 1:
            if wants_help:
                print(
                    f"usage: {RUN_USAGE}\n\nrun CONFIG.yaml --help lists every key of a config. "
                    "--memories.paged null leaves that group of keys out."
                )
                return 0
            raise UserError(f"run needs one config, got {len(paths)}: {RUN_USAGE}")
        from experiments import processes

        group = processes.group_of(overrides)
        loaded = run.load(pathlib.Path(paths[0]), overrides, experiments)
        return run.show_help(loaded, console) if wants_help else run.run(loaded, options.out_dir, argv, console, group)
    if options.verb == "sweep":
        from experiments import sweep

        paths, overrides = parse_overrides(rest)
        if overrides.pop("help", None) is not None:
            print(
                f"usage: {SWEEP_USAGE}\n\nEvery combination of the axes' values is a run of its own. --when changes a "
                "further key where an axis has one of its values, --plot says which metric the figure shows. Values "
                "are YAML. The same command resumes a sweep that was stopped. run CONFIG.yaml --help lists the keys."
            )
            return 0
        if len(paths) != 1:
            raise UserError(f"sweep needs one config, got {len(paths)}: {SWEEP_USAGE}")
        return sweep.command(
            sweep.Asked(
                path=pathlib.Path(paths[0]),
                overrides=overrides,
                axes=options.axis,
                conditions=options.when,
                metric=options.plot,
                out_dir=options.out_dir,
                argv=argv,
            ),
            experiments,
            console,
        )
    if options.verb == "compile":
        from experiments import compile as compiling

        paths, overrides = parse_overrides(rest)
        if overrides.pop("help", None) is not None:
            config = compiling.load(paths[0], overrides) if paths else compiling.Config()
            return _show_keys(COMPILE_USAGE, HELP["compile"], config, console)
        if len(paths) != 1:
            raise UserError(f"compile needs one config or one KERNEL/CASE, got {len(paths)}: {COMPILE_USAGE}")
        return compiling.command(paths[0], overrides, options.out, console)
    if options.verb == "tune":
        from experiments import tune

        paths, overrides = parse_overrides(rest)
        if overrides.pop("help", None) is not None:
            config = tune.load(pathlib.Path(paths[0]), overrides) if paths else tune.Config()
            return _show_keys(TUNE_USAGE, HELP["tune"], config, console)
        if len(paths) != 1:
            raise UserError(f"tune needs one config, got {len(paths)}: {TUNE_USAGE}")
        return tune.command(pathlib.Path(paths[0]), overrides, options.install, options.out, console)
    if rest:
        raise UserError(f"{options.verb} does not take {' '.join(rest)}")
    if options.verb == "report":
        from experiments import report

        return report.report(options.run_dir, experiments, console)
    if options.verb == "calibrate":
        from experiments import calibrate

        return calibrate.command(options.run_dir, options.out, console)
    if options.verb == "list":
        from experiments import listing

        return listing.show(pathlib.Path("configs"), options.out_dir, experiments, console)
    from experiments import doctor

    return doctor.run(options.out_dir, console)


def _show_keys(usage: str, words: str, config: Any, console: rich.console.Console) -> int:
    """Says how a verb is called, and lists the keys of its config."""
    from experiments import config as configs
    from experiments import results

    print(f"usage: {usage}\n\n{words}")
    rows = [[f"--{key}", kind, str(value), meaning] for key, kind, value, meaning in configs.describe_fields(config)]
    results.render([results.Table(["key", "type", "value", "meaning"], rows)], console)
    return 0


def parse_overrides(tokens: Sequence[str]) -> tuple[list[str], dict[str, str]]:
    """Splits what follows `run` into paths and overrides: `--key value` or `--key=value`, in any order.

    Raises:
      UserError: a key without a value, or one given twice.
    """
    paths: list[str] = []
    overrides: dict[str, str] = {}
    queue = list(tokens)
    while queue:
        token = queue.pop(0)
        if token in ("-h", "--help"):
            overrides["help"] = ""
            continue
        if not token.startswith("--"):
            paths.append(token)
            continue
        key, equals, value = token.removeprefix("--").partition("=")
        if not equals:
            if not queue or queue[0].startswith("--"):
                raise UserError(f"--{key} needs a value, as in --{key} 3")
            value = queue.pop(0)
        if key in overrides:
            raise UserError(f"--{key} is given twice, as {overrides[key]} and as {value}")
        overrides[key] = value
    return paths, overrides
