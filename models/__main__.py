"""Models on the command line.

uv run python -m models fetch smollm2
uv run python -m models info smollm2
uv run python -m models generate --model smollm2 "The capital of France is"
uv run python -m models convert smollm2 runs/smollm2 --to hugging_face
"""

import argparse
import pathlib
import sys
import typing

from rich.console import Console

from models.config import Dtype
from models.convert import TARGETS, convert
from models.fetch import fetch_smollm2, find_smollm2
from models.formats import load_model, load_tokenizer
from models.generate import Generation
from models.info import as_table, describe
from models.tokenizer import TextStream
from paxkv.kv_format import scheme

_CHECKPOINTS = pathlib.Path(__file__).parent / "checkpoints"


def resolve(name: str) -> pathlib.Path:
    """The path of a model: `smollm2` as it was fetched, one of the repository's own by its name, or any path.

    Raises:
      FileNotFoundError: `smollm2` was not fetched.
    """
    if name == "smollm2":
        return find_smollm2()
    own = _CHECKPOINTS / name
    return own if pathlib.PurePath(name).name == name and own.is_dir() else pathlib.Path(name)


def main(argv: list[str] | None = None) -> int:
    """Runs one command.

    Returns:
      The exit code: 2 if what was asked for cannot be done, which is told in words.
    """
    args = _parser().parse_args(argv)
    try:
        args.run(args)
    except (ValueError, OSError, RuntimeError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m models", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(required=True)
    model = "smollm2, byte_llama, or the path of a Hugging Face folder, a checkpoint, a GGUF or a llama2.c file"
    dtypes = typing.get_args(Dtype)

    fetch = commands.add_parser("fetch", help="bring trained weights into the cache folder")
    fetch.add_argument("name", choices=["smollm2"])
    fetch.set_defaults(run=_fetch)

    info = commands.add_parser("info", help="say what a model is")
    info.add_argument("model", help=model)
    info.set_defaults(run=_info)

    change = commands.add_parser("convert", help="write a model in another format")
    change.add_argument("model", help=model)
    change.add_argument("destination", type=pathlib.Path)
    change.add_argument("--to", choices=TARGETS, default=TARGETS[0])
    change.add_argument("--dtype", choices=dtypes)
    change.add_argument("--overwrite", action="store_true")
    change.set_defaults(run=_convert)

    generate = commands.add_parser("generate", help="continue a text")
    generate.add_argument("prompt")
    generate.add_argument("--model", default="smollm2", help=model)
    generate.add_argument("--max_tokens", type=int, default=64)
    generate.add_argument("--temperature", type=float, default=0.0)
    generate.add_argument("--seed", type=int, default=0)
    generate.add_argument("--dtype", choices=dtypes)
    generate.add_argument("--kv_format", help="such as bf16 or e4m3_token_head; the model's dtype if not given")
    generate.set_defaults(run=_generate)
    return parser


def _fetch(args: argparse.Namespace) -> None:
    file, was_there = fetch_smollm2()
    print(f"{file} {'was there already' if was_there else 'is there now'}")


def _info(args: argparse.Namespace) -> None:
    path = resolve(args.model)
    Console().print(as_table(path, describe(path)))


def _convert(args: argparse.Namespace) -> None:
    convert(resolve(args.model), args.destination, args.to, dtype=args.dtype, overwrite=args.overwrite)
    print(f"{args.destination} is a model in the format {args.to}")


def _generate(args: argparse.Namespace) -> None:
    path = resolve(args.model)
    model, tokenizer = load_model(path, dtype=args.dtype), load_tokenizer(path)
    generation = Generation(
        model,
        tokenizer.encode(args.prompt),
        max_tokens=args.max_tokens,
        eos=tokenizer.eos,
        temperature=args.temperature,
        seed=args.seed,
        kv_format=None if args.kv_format is None else scheme(args.kv_format),
    )
    stream = TextStream(tokenizer)
    print(args.prompt, end="", flush=True)
    for token in generation:
        print(stream.feed(token), end="", flush=True)
    print(stream.finish())
    speed = generation.speed
    print(
        f"prefill: {speed.prompt_tokens} tokens, {speed.prefill_per_second:.1f} per second with compiling; "
        f"decode: {speed.new_tokens} tokens, {speed.decode_per_second:.1f} per second",
        file=sys.stderr,
    )


if __name__ == "__main__":
    sys.exit(main())
