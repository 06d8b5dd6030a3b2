"""Rewrites `[tool.uv] constraint-dependencies` in pyproject.toml with what resolves today, for all Pythons."""

import pathlib
import re
import subprocess

PYPROJECT = pathlib.Path(__file__).parent.parent / "pyproject.toml"
BEGIN, END = "constraint-dependencies = [\n", "]  # end of pins"


def main() -> None:
    """Resolves without the old pins, then writes the new ones in their place."""
    text = PYPROJECT.read_text()
    before, rest = text.split(BEGIN)
    _, after = rest.split(END)
    PYPROJECT.write_text(before + BEGIN + END + after)
    try:
        command = "uv pip compile -q --universal --python-version 3.11 --fork-strategy requires-python"
        resolved = subprocess.run(
            [*command.split(), "--group", "dev", "--group", "offline", "--no-annotate", "--no-header", str(PYPROJECT)],
            check=True,
            capture_output=True,
            text=True,
        ).stdout
    except BaseException:
        PYPROJECT.write_text(text)
        raise
    pins = [re.sub(r"\s+", " ", line.strip()) for line in resolved.splitlines() if "==" in line]
    # A marker holds double quotes, so such a pin becomes a literal string.
    body = "".join(f"    '{pin}',\n" if '"' in pin else f'    "{pin}",\n' for pin in pins)
    PYPROJECT.write_text(before + BEGIN + body + END + after)
    print(f"{len(pins)} pins written to {PYPROJECT.name}")


if __name__ == "__main__":
    main()
