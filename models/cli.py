"""`python -m models {fetch,info,generate,convert,train,evaluate}`.

Standard output carries what was asked for; all else goes to standard error. The exit code is 0, or 2 if something must
be put right first, which is told in one line.
"""

import argparse
import json
import shlex
import sys
import typing
import warnings
from collections.abc import Callable, Sequence

import rich.console

from models.config import Dtype
from models.convert import TARGETS, convert
from models.evaluate import check_card
from models.fetch import FETCHED, fetch
from models.generate import Sampling
from models.info import as_table, describe
from models.names import find_model
from models.stream import stream
from models.training.command import read_config, train_and_save
from paxkv.kv_format import scheme

DTYPES = typing.get_args(Dtype)
Command = Callable[[argparse.Namespace, rich.console.Console], None]


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line.

    Args:
      argv: the arguments; those of the process if None.

    Returns:
      The exit code.
    """
    options, rest = _parser().parse_known_args(argv)
    if rest:
        options.parser.error(f"unrecognized arguments: {' '.join(rest)}")
    console = rich.console.Console(stderr=True)
    try:
        options.command(options, console)
    except (ValueError, OSError) as error:
        print("error:", " ".join(str(error).split()), file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m models", allow_abbrev=False, description=__doc__)
    verbs = parser.add_subparsers(required=True, metavar="{fetch,info,generate,convert,train,evaluate}")

    def verb(name: str, words: str, command: Command) -> argparse.ArgumentParser:
        sub = verbs.add_parser(name, help=words, description=words, allow_abbrev=False)
        sub.set_defaults(command=command, parser=sub)
        return sub

    sub = verb("fetch", "bring a trained model here", _fetch)
    sub.add_argument("name", choices=FETCHED)

    sub = verb("info", "what a model is, and what its keys and values take", _info)
    sub.add_argument("model", metavar="NAME_OR_PATH")

    sub = verb("generate", "continue a text, through paged memory", _generate)
    sub.add_argument("prompt")
    sub.add_argument("--model", required=True, metavar="NAME_OR_PATH")
    sub.add_argument("--max_tokens", type=int, default=64, metavar="N", help="most tokens to add")
    sub.add_argument("--temperature", type=float, default=0.0, metavar="T", help="0 takes the best token each time")
    sub.add_argument("--seed", type=int, default=0, metavar="S", help="of the draws at a temperature above 0")
    sub.add_argument("--dtype", choices=DTYPES, help="of weights and activations; as stored if not given")
    sub.add_argument("--kv_format", default="bf16", metavar="SCHEME", help="such as bf16 or int8_token_head")
    sub.add_argument("--block_size", type=int, default=16, metavar="N", help="tokens in a block of the memory")

    sub = verb("convert", "write a model in another format, with its tokenizer", _convert)
    sub.add_argument("source", metavar="SRC", help="name or path")
    sub.add_argument("target", metavar="DST", help="a folder")
    sub.add_argument(
        "--to", choices=TARGETS, default=TARGETS[0], help="Hugging Face's format, or this repository's own"
    )
    sub.add_argument("--dtype", choices=DTYPES, help="of weights and activations; as stored if not given")
    sub.add_argument("--overwrite", action="store_true", help="replace what is there")

    sub = verb("train", "train a model, or go on with one whose training was interrupted", _train)
    sub.add_argument("config", metavar="CONFIG", help="such as configs/train/smoke.yaml")
    sub.add_argument("overrides", nargs=argparse.REMAINDER, metavar="--field value", help="to put over the config's")

    sub = verb("evaluate", "score a trained model on held-out text, to check its card", _evaluate)
    sub.add_argument("model", metavar="NAME_OR_PATH")
    return parser


def _fetch(options: argparse.Namespace, console: rich.console.Console) -> None:
    with console.status(f"fetching {FETCHED[options.name].requirement}"):
        path, new = fetch(options.name)
    print(f"{options.name} {'is now' if new else 'was already'} at {path}, whole and as expected")


def _info(options: argparse.Namespace, console: rich.console.Console) -> None:
    with console.status(f"reading {options.model}"):
        path = find_model(options.model)
        facts = describe(path)
    rich.console.Console(highlight=False).print(as_table(path, facts))


def _generate(options: argparse.Namespace, console: rich.console.Console) -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        speed = stream(
            options.model,
            options.prompt,
            Sampling(options.max_tokens, options.temperature, options.seed),
            dtype=options.dtype,
            kv_format=scheme(options.kv_format),
            block_size=options.block_size,
            write=lambda text: print(text, end="", flush=True),
        )
    print()
    for message in dict.fromkeys(str(warning.message) for warning in caught):
        print("warning:", message, file=sys.stderr)
    print(speed, file=sys.stderr)


def _convert(options: argparse.Namespace, console: rich.console.Console) -> None:
    source = find_model(options.source)
    with console.status(f"converting {options.source}"):
        convert(source, options.target, options.to, dtype=options.dtype, overwrite=options.overwrite)
    print(f"{options.source} is now at {options.target}")


def _train(options: argparse.Namespace, console: rich.console.Console) -> None:
    config = read_config(options.config, options.overrides)
    command = shlex.join(["python", "-m", "models", "train", options.config, *options.overrides])
    record = train_and_save(config, command, console)
    summary = {"checkpoint": config.out_dir} | {name: value for name, value in record.items() if name != "config"}
    print(json.dumps(summary, separators=(",", ":")))


def _evaluate(options: argparse.Namespace, console: rich.console.Console) -> None:
    path = find_model(options.model)
    with console.status(f"scoring {options.model}"):
        found = check_card(path)
    for result in found["results"].values():
        print(
            f"context {result['context']}: {result['nats']:.4f} nats, {result['bits_per_byte']:.4f} bits per byte; "
            f"trigram {result['trigram_bits_per_byte']:.4f}; {result['bytes']} bytes"
        )
    print(json.dumps(found, separators=(",", ":")))
