"""`python -m experiments`."""

import sys

if __name__ == "__main__":
    try:
        from experiments.cli import main

        code = main()
    except ModuleNotFoundError as error:
        sys.exit(f"error: the package {error.name} is not installed; run through uv: uv run python -m experiments")
    sys.exit(code)
