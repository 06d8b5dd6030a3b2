"""The folder of public traces, which the repository does not hold."""

import os
import pathlib

import pytest

REPOSITORY = pathlib.Path(__file__).parents[2]


@pytest.fixture(scope="session")
def trace_dir() -> pathlib.Path:
    folder = pathlib.Path(os.environ.get("PAXKV_TRACE_DIR") or REPOSITORY / "../shared/traces").resolve()
    if not folder.is_dir():
        pytest.skip(f"no folder {folder}: set PAXKV_TRACE_DIR to the folder of the public traces")
    return folder
