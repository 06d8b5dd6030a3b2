"""Several processes that run one experiment together, and a lifeline between them.

All run the same command; process 0 writes the run. JAX connects their devices, and waits for ever for a process that
has died, or kills the others after minutes without a word. The lifeline sees a death at once: every process keeps a
connection to process 0, which the operating system closes with whoever ends. Who hears nothing, or does not get on for
longer than the time limit, ends the whole with a sentence and an exit code of its own.
"""

import contextlib
import dataclasses
import os
import socket
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import NoReturn

from experiments.errors import UserError

LOST = 3
"""The exit code of a process that lost another."""

_BYE = b"bye\n"
_PAUSE_S = 0.2  # between two attempts to connect
_FLAGS = ("processes", "process", "coordinator")


@dataclasses.dataclass(frozen=True)
class Group:
    """Which of how many processes this one is, and where they meet."""

    count: int = 1
    index: int = 0
    coordinator: str = ""  # host:port of process 0; the port after it is the lifeline's

    @property
    def address(self) -> tuple[str, int]:
        """Where the lifeline is."""
        host, _, port = self.coordinator.rpartition(":")
        return host, int(port) + 1


ALONE = Group()


def group_of(flags: dict[str, str], environment: Mapping[str, str] = os.environ) -> Group:
    """Takes `--processes`, `--process` and `--coordinator` out of a command's flags, or `PAXKV_PROCESSES` and so on.

    Raises:
      UserError: one of them is missing or out of range.
    """
    given = {name: flags.pop(name, environment.get(f"PAXKV_{name.upper()}", "")) for name in _FLAGS}
    if not any(given.values()):
        return ALONE
    if missing := [name for name, value in given.items() if not value]:
        raise UserError(f"several processes need --processes, --process and --coordinator, got no {', '.join(missing)}")
    host, _, port = given["coordinator"].rpartition(":")
    if not host or not _is_number(port) or not 0 < int(port) < 65_535:
        raise UserError(
            f"coordinator: expected host:port of process 0, such as localhost:12355, got {given['coordinator']!r}"
        )
    if not _is_number(given["processes"]) or int(given["processes"]) < 1:
        raise UserError(f"processes: expected a number, at least 1, got {given['processes']!r}")
    count = int(given["processes"])
    if not _is_number(given["process"]) or int(given["process"]) >= count:
        raise UserError(f"process: expected a number from 0 to {count - 1}, got {given['process']!r}")
    return Group(count, int(given["process"]), given["coordinator"])


def _is_number(text: str) -> bool:
    return text.isascii() and text.isdigit()


class Lifeline:
    """The connections of a process to those that it would wait for."""

    def __init__(self, group: Group, time_limit_s: float) -> None:
        self._group, self._time_limit_s = group, time_limit_s
        self._last_beat = time.monotonic()
        self._ended = threading.Event()
        self._peers: dict[int, socket.socket] = {}
        if group.count > 1:
            self._peers = self._await_others() if group.index == 0 else {0: self._reach_first()}
            for peer, connection in self._peers.items():
                threading.Thread(target=self._listen, args=(peer, connection), daemon=True).start()
            threading.Thread(target=self._watch, daemon=True).start()

    def beat(self) -> None:
        """Says that this process got on."""
        self._last_beat = time.monotonic()

    def close(self) -> None:
        """Says goodbye: nobody misses this process any more."""
        self._ended.set()
        for connection in self._peers.values():
            with contextlib.suppress(OSError):
                connection.sendall(_BYE)

    def give_others_time(self) -> None:
        """What went wrong here may be that another is gone, which the lifeline then tells better."""
        if self._peers:
            self._ended.wait(10 * _PAUSE_S)

    def _await_others(self) -> dict[int, socket.socket]:
        deadline, found = time.monotonic() + self._time_limit_s, {}
        try:
            server = socket.create_server(("", self._group.address[1]))
        except OSError as error:
            raise UserError(
                f"coordinator: expected the port after that of {self._group.coordinator} to be free, got "
                f"{error.strerror}; end the run that has it, or choose another port"
            ) from error
        with server:
            while len(found) < self._group.count - 1:
                server.settimeout(max(0.01, deadline - time.monotonic()))
                try:
                    connection, _ = server.accept()
                except TimeoutError:
                    missing = sorted(set(range(1, self._group.count)) - found.keys())
                    raise UserError(
                        f"process {missing[0]} of {self._group.count} did not come within {self._time_limit_s:g} s; "
                        "start all of them with the same command"
                    ) from None
                index = _greeting(connection)
                if index in range(1, self._group.count) and index not in found:
                    found[index] = connection
                else:  # somebody who is not meant
                    connection.close()
        for connection in found.values():
            connection.settimeout(None)
        return found

    def _reach_first(self) -> socket.socket:
        deadline = time.monotonic() + self._time_limit_s
        while True:
            try:
                connection = socket.create_connection(self._group.address, timeout=_PAUSE_S)
            except OSError:
                if time.monotonic() > deadline:
                    raise UserError(
                        f"process 0 of {self._group.count} could not be reached at {self._group.coordinator} within "
                        f"{self._time_limit_s:g} s; start all of them with the same command"
                    ) from None
                time.sleep(_PAUSE_S)
                continue
            connection.settimeout(None)
            connection.sendall(self._group.index.to_bytes(4))
            return connection

    def _listen(self, peer: int, connection: socket.socket) -> None:
        heard = b""
        with contextlib.suppress(OSError):
            while part := connection.recv(64):
                heard += part
        if not heard.endswith(_BYE) and not self._ended.is_set():
            self._end(f"process {peer} of {self._group.count} ended before the run was over")

    def _watch(self) -> None:
        while not self._ended.wait(_PAUSE_S):
            if time.monotonic() - self._last_beat > self._time_limit_s:
                self._end(
                    f"process {self._group.index} of {self._group.count} did not get on for {self._time_limit_s:g} s, "
                    "the config's process_time_limit_s; another may hang"
                )

    def _end(self, why: str) -> NoReturn:
        """From a thread, while JAX waits in another: nothing but the end of the process ends that."""
        print(f"error: {why}; finished parts are kept, and the same command resumes", file=sys.stderr, flush=True)
        os._exit(LOST)


def _greeting(connection: socket.socket) -> int:
    """The number of who has come; 0 for who says none."""
    connection.settimeout(10 * _PAUSE_S)
    with contextlib.suppress(OSError):
        said = connection.recv(4)
        return int.from_bytes(said) if len(said) == 4 else 0
    return 0


@contextlib.contextmanager
def joined(group: Group, time_limit_s: float) -> Iterator[Lifeline]:
    """Connects the processes and their devices, before JAX looks at any device.

    Raises:
      UserError: not all of them came within the time limit.
    """
    lifeline = Lifeline(group, time_limit_s)
    if group.count == 1:
        yield lifeline
        return
    import jax

    try:
        jax.distributed.initialize(
            group.coordinator, group.count, group.index, initialization_timeout=max(1, int(time_limit_s))
        )
        yield lifeline
    except Exception:
        lifeline.give_others_time()
        raise
    lifeline.close()


def agreed(flags: Sequence[bool]) -> list[bool]:
    """What process 0 says of something that only it can know."""
    import jax
    import numpy as np
    from jax.experimental import multihost_utils

    if jax.process_count() == 1:
        return list(flags)
    return np.asarray(multihost_utils.broadcast_one_to_all(np.asarray(flags))).astype(bool).tolist()
