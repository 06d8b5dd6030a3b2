"""From a YAML file and dotted overrides to a frozen dataclass, and back; strict about names and types.

What a file says is what an experiment gets: a key that no field has, a key given twice, a text where a number
belongs and a fraction where a whole number belongs are all refused, with the dotted key and a suggestion.
"""

import copy
import dataclasses
import hashlib
import inspect
import json
import pathlib
import re
import types
import typing
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import draccus
import yaml

from experiments.errors import UserError, did_you_mean

NOT_HASHED = ("seed",)  # the seed is a part of a run's name, beside the hash


def read_yaml(path: pathlib.Path) -> dict[str, Any]:
    """The mapping in a YAML file.

    Raises:
      UserError: there is no such file, or it is not one mapping without repeated keys.
    """
    return parse_yaml(read_text(path), path)


def parse_yaml(text: str, path: pathlib.Path) -> dict[str, Any]:
    """The mapping in the text of a YAML file; `path` names it in errors.

    Raises:
      UserError: the text is not one mapping without repeated keys.
    """
    try:
        raw = yaml.load(text, Loader=_StrictLoader)
    except yaml.YAMLError as error:
        raise UserError(f"{path} is not valid YAML: {error}") from error
    if not isinstance(raw, dict):
        raise UserError(f"{path} must hold a mapping of keys to values, got {_describe(raw)}")
    return raw


def read_text(path: pathlib.Path) -> str:
    """The text of a config file.

    Raises:
      UserError: it cannot be read; names configs that are near.
    """
    try:
        return path.read_text(encoding="utf-8")
    except (FileNotFoundError, NotADirectoryError) as error:
        known = sorted(str(p) for p in pathlib.Path("configs").glob("**/*.yaml"))
        raise UserError(f"there is no config {path}{did_you_mean(str(path), known)}") from error
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"cannot read the config {path}: {error}") from error


def header(text: str) -> str:
    """The comment that opens a config, without its marks: the question, the command, the time, the result."""
    lines: list[str] = []
    for line in text.lstrip().splitlines():
        if not line.startswith("#"):
            break
        lines.append(line.removeprefix("#").removeprefix(" ").rstrip())
    return "\n".join(lines).strip()


def override(raw: dict[str, Any], overrides: Mapping[str, str]) -> dict[str, Any]:
    """A copy of `raw` in which each dotted key has its new value, read as YAML; null takes out a group of keys.

    Raises:
      UserError: a value is not YAML, or a key leads through something that has no keys.
    """
    return assign(raw, {dotted: parse_value(text, f"--{dotted}") for dotted, text in overrides.items()})


def parse_value(text: str, where: str) -> Any:
    """The value of a key as the command line gives it; `where` names it in errors.

    Raises:
      UserError: it is not YAML.
    """
    try:
        return yaml.load(text, Loader=_StrictLoader)
    except yaml.YAMLError as error:
        raise UserError(f"{where}: {text!r} is not valid YAML: {getattr(error, 'problem', error)}") from error


def show_value(value: Any) -> str:
    """A value in one line of YAML, which `parse_value` reads back."""
    return yaml.safe_dump([value], default_flow_style=True, allow_unicode=True, width=2**31).strip()[1:-1]


def assign(raw: dict[str, Any], values: Mapping[str, Any]) -> dict[str, Any]:
    """A copy of `raw` in which each dotted key has its new value; None takes out a group of keys.

    Raises:
      UserError: a key leads through something that has no keys.
    """
    result = copy.deepcopy(raw)
    for dotted, value in values.items():
        *groups, last = dotted.split(".")
        node = result
        for depth, group in enumerate(groups):
            if node.get(group) is None:
                node[group] = {}
            node = node[group]
            if not isinstance(node, dict):
                held = ".".join(groups[: depth + 1])
                raise UserError(f"--{dotted}: {held} is {_describe(node)}, which has no keys; give --{held} as a whole")
        if value is None and isinstance(node.get(last), dict):
            del node[last]  # one of several memories, say: a group as such is never nothing
        else:
            node[last] = copy.deepcopy(value)
    return result


def decode(config_class: type[Any], raw: Mapping[str, Any]) -> Any:
    """The config that `raw` describes.

    Raises:
      UserError: a key or a value does not fit `config_class`; names the key and what was expected.
    """
    _check(config_class, raw, "", leaves=dict(reversed(list(_leaves(config_class, "")))))
    try:
        return draccus.decode(config_class, raw)
    except draccus.ParsingError as error:
        # A ValueError of __post_init__ says more than draccus' own sentence about it.
        cause = error.__cause__
        raise UserError(str(cause if isinstance(cause, ValueError) else error)) from error


def resolved(config: Any) -> dict[str, Any]:
    """Every field of a config, defaults included, as plain YAML values."""
    return draccus.encode(config)


def dump(config: Any, comment: str) -> str:
    """YAML of the resolved config below its opening comment; running it again is the same run."""
    lines = "".join(f"# {line}".rstrip() + "\n" for line in comment.splitlines())
    return lines + yaml.safe_dump(resolved(config), sort_keys=False, allow_unicode=True, width=110)


def config_hash(config: Any) -> str:
    """SHA-256 of what is computed: canonical JSON of the resolved config without the seed and without paths."""
    hashed = {name: value for name, value in identity(config).items() if name not in NOT_HASHED}
    canonical = json.dumps(hashed, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(canonical.encode()).hexdigest()


def identity(config: Any) -> Any:
    """What is computed, as plain JSON: the resolved config, in which every path is None."""
    if isinstance(config, pathlib.Path):
        return None
    if dataclasses.is_dataclass(config):
        return {field.name: identity(getattr(config, field.name)) for field in dataclasses.fields(config)}
    if isinstance(config, Mapping):
        # Pairs, since sorted keys would hide an order that an experiment may go by.
        return [[name, identity(item)] for name, item in config.items()]
    if isinstance(config, tuple | list):
        return [identity(item) for item in config]
    return draccus.encode(config)


def describe_fields(config: Any) -> list[tuple[str, str, Any, str]]:
    """Dotted key, type and value of every field, and what its class' docstring says of it, for help."""
    return list(_fields(config, ""))


class _StrictLoader(yaml.SafeLoader):
    """YAML without repeated keys, in which 1e-3 is a number."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: list[Any] = []
        for key_node, _ in node.value:
            if key_node.tag == "tag:yaml.org,2002:merge":  # `<<: *base` gives what the other keys may replace
                continue
            key = self.construct_object(key_node, deep=True)
            if key in seen:
                raise yaml.constructor.ConstructorError(None, None, f"key {key!r} is given twice", key_node.start_mark)
            seen.append(key)
        return super().construct_mapping(node, deep)


# YAML 1.1 wants a point in every float; people and JSON write 1e-3.
_StrictLoader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"^[-+]?[0-9][0-9_]*[eE][-+]?[0-9]+$"), list("-+0123456789")
)


def _check(hint: Any, raw: Any, key: str, leaves: Mapping[str, str]) -> None:
    """Raises unless `raw` is, without any conversion but int to float, what `hint` declares."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        _check_union(arguments, raw, key, leaves)
    elif isinstance(hint, type) and dataclasses.is_dataclass(hint):
        _check_fields(hint, raw, key, leaves)
    elif origin is typing.Literal:
        if not any(type(raw) is type(choice) and raw == choice for choice in arguments):
            near = did_you_mean(raw, map(str, arguments)) if isinstance(raw, str) else ""
            raise _wrong(key, "one of " + ", ".join(map(repr, arguments)), raw, near)
    elif origin in (tuple, list):
        if not isinstance(raw, list):
            raise _wrong(key, "a list", raw)
        fixed = origin is tuple and Ellipsis not in arguments
        if fixed and len(raw) != len(arguments):
            raise _wrong(key, f"a list of {len(arguments)}", raw)
        for index, item in enumerate(raw):
            _check(arguments[index if fixed else 0], item, f"{key}[{index}]", leaves)
    elif origin in (dict, Mapping):
        if not isinstance(raw, Mapping):
            raise _wrong(key, "a mapping", raw)
        for name, value in raw.items():
            _check(arguments[0], name, key, leaves)
            _check(arguments[1], value, f"{key}.{name}", leaves)
    elif hint in _SCALARS:
        accepted, words = _SCALARS[hint]
        # bool is an int to Python; `rows: true` is a mistake all the same.
        if not isinstance(raw, accepted) or (isinstance(raw, bool) and hint is not bool):
            number = hint is str and isinstance(raw, int | float)
            quote = f"; quote it: {key}: '{raw}' in a file, --{key} \"'{raw}'\" in a shell" if number else ""
            raise _wrong(key, words, raw, quote)


_SCALARS: Mapping[Any, tuple[type | tuple[type, ...], str]] = {
    int: (int, "a whole number"),
    float: ((int, float), "a number"),
    bool: (bool, "true or false"),
    str: (str, "a text"),
    pathlib.Path: (str, "a path"),
    type(None): (type(None), "nothing"),
}


def _check_union(choices: Sequence[Any], raw: Any, key: str, leaves: Mapping[str, str]) -> None:
    if raw is None and type(None) in choices:
        return
    errors: list[UserError] = []
    for choice in choices:
        if choice is type(None):
            continue
        try:
            _check(choice, raw, key, leaves)
            if dataclasses.is_dataclass(choice):
                # Where it may be something else, draccus does not say why not.
                decode(typing.cast(type, choice), typing.cast(Mapping[str, Any], raw))
            return
        except UserError as error:
            errors.append(error)
    raise errors[0] if len(errors) == 1 else UserError("; or ".join(map(str, errors)))


def _check_fields(config_class: type[Any], raw: Any, key: str, leaves: Mapping[str, str]) -> None:
    if not isinstance(raw, Mapping):
        raise _wrong(key or "the config", "a mapping", raw)
    hints = typing.get_type_hints(config_class)
    prefix = f"{key}." if key else ""
    for name, value in raw.items():
        if name not in hints:
            near = did_you_mean(str(name), hints)
            elsewhere = f" (did you mean {leaves[name]!r}?)" if not near and name in leaves else near
            raise UserError(
                f"unknown key {prefix}{name}{elsewhere}; the keys {'of ' + key if key else 'here'} are: "
                + ", ".join(hints)
            )
        _check(hints[name], value, f"{prefix}{name}", leaves)
    for field in dataclasses.fields(config_class):
        needed = field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING
        if needed and field.name not in raw:
            raise UserError(f"missing key {prefix}{field.name}: {_type_name(hints[field.name])}")


def _wrong(key: str, expected: str, got: Any, suggestion: str = "") -> UserError:
    return UserError(f"{key} must be {expected}, got {_describe(got)}{suggestion}")


def _describe(value: Any) -> str:
    if value is None:
        return "nothing"
    kinds = {dict: "a mapping", list: "a list", str: "the text", bool: "the truth value"}
    kind = kinds.get(type(value), "the number" if isinstance(value, int | float) else f"a {type(value).__name__}")
    text = repr(value)
    return f"{kind} {text if len(text) <= 60 else text[:57] + '...'}"


def _type_name(hint: Any) -> str:
    return hint.__name__ if isinstance(hint, type) and not typing.get_args(hint) else str(hint).replace("typing.", "")


def _leaves(config_class: type[Any], prefix: str) -> Iterator[tuple[str, str]]:
    """Last name and dotted key of every nested field, so that `block_size` can suggest `memory.block_size`."""
    for name, hint in typing.get_type_hints(config_class).items():
        yield name, prefix + name
        union = typing.get_origin(hint) in (typing.Union, types.UnionType)
        for choice in typing.get_args(hint) if union else (hint,):
            if isinstance(choice, type) and dataclasses.is_dataclass(choice):
                yield from _leaves(choice, f"{prefix}{name}.")


def _fields(config: Any, prefix: str) -> Iterator[tuple[str, str, Any, str]]:
    hints, meanings = typing.get_type_hints(type(config)), _attributes(type(config))
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if dataclasses.is_dataclass(value):
            yield from _fields(value, f"{prefix}{field.name}.")
        elif isinstance(value, Mapping) and value and all(map(dataclasses.is_dataclass, value.values())):
            for name, item in value.items():
                yield from _fields(item, f"{prefix}{field.name}.{name}.")
        else:
            kind = _type_name(hints[field.name])
            yield prefix + field.name, kind, draccus.encode(value), meanings.get(field.name, "")


def _attributes(config_class: type[Any]) -> dict[str, str]:
    """The section `Attributes:` of a docstring, by name."""
    _, _, section = (inspect.getdoc(config_class) or "").partition("\nAttributes:\n")
    entries = re.findall(r"^( +)(\w+): (.*(?:\n\1 +.*)*)", section, flags=re.MULTILINE)
    return {name: " ".join(words.split()) for _, name, words in entries}
