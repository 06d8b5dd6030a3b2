"""A lifeline between processes that run one experiment together, over which they also tell what they run.

JAX connects their devices, and waits for ever for a process that has died, or kills the others after minutes without a
word; at the end of a process that failed, it waits for those that wait for it. The lifeline sees an end at once: every
process keeps a connection to process 0, which the operating system closes with whoever ends. Who hears nothing, or does
not get on for longer than the time limit, ends the whole with a sentence and an exit code of its own.
"""

import contextlib
import json
import os
import queue
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NoReturn

from experiments.errors import UserError, last_words
from experiments.processes import Group, told_apart

LOST = 3
"""The exit code of a process that lost another."""

# What processes say to one another, a line each: one of these, and what there is to say of it.
_RUNS, _VERDICT, _FAILED, _LOST, _BYE = "runs", "verdict", "failed", "lost", "bye"
_PAUSE_S = 0.2  # between two attempts to connect


class Lifeline:
    """The connections of a process to those that it would wait for."""

    def __init__(self, group: Group, time_limit_s: float) -> None:
        self._group, self._time_limit_s = group, time_limit_s
        self._last_beat = time.monotonic()
        self._ended = threading.Event()  # nobody misses this process any more
        self._failed = threading.Event()  # by an error of its own
        self._warned = threading.Event()  # another said that it ends
        self._heard = {peer: queue.Queue[Any]() for peer in range(group.count)}
        self._peers: dict[int, socket.socket] = {}
        if group.count > 1:
            self._peers = self._await_others() if group.index == 0 else {0: self._reach_first()}
            for peer, connection in self._peers.items():
                threading.Thread(target=self._listen, args=(peer, connection), daemon=True).start()
            threading.Thread(target=self._watch, daemon=True).start()

    def beat(self) -> None:
        """Says that this process got on."""
        self._last_beat = time.monotonic()

    def compare(self, runs: Mapping[str, Any]) -> None:
        """Waits for the others to say what they run; `runs` is of plain values, as JSON has them.

        Raises:
          UserError: not all run the same. Every process raises it, with the same words.
        """
        if not self._peers:
            return
        self.beat()
        if self._group.index == 0:
            verdict = told_apart([runs, *(self._heard[peer].get() for peer in sorted(self._peers))])
            self._say(_VERDICT, verdict)
        else:
            self._say(_RUNS, runs)
            verdict = self._heard[0].get()
        if verdict:
            self.close()
            raise UserError(f"{verdict}; start all of them with the same command, code and packages")

    def close(self) -> None:
        """Says goodbye: nobody misses this process any more."""
        self._ended.set()
        self._say(_BYE)

    def fail(self, error: BaseException) -> None:
        """Ends this process for an error of its own, and the others with it. Where there are none, does nothing."""
        if not self._peers or self._ended.is_set():
            return
        refused = isinstance(error, UserError)
        first_line = str(error).partition("\n")[0]
        self._say(_FAILED, f"{self._name()} failed: {'' if refused else f'{type(error).__name__}: '}{first_line}")
        if refused or not self._warned.is_set():  # else it comes of what the other said
            self._failed.set()
        time.sleep(5 * _PAUSE_S)  # what went wrong may be that another is gone, which is then heard, and told instead
        _leave(*last_words(error))

    def _say(self, kind: str, what: Any = None) -> None:
        line = json.dumps([kind, what]).encode() + b"\n"
        for connection in self._peers.values():
            with contextlib.suppress(OSError):
                connection.sendall(line)

    def _name(self, index: int | None = None) -> str:
        return f"process {self._group.index if index is None else index} of {self._group.count}"

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
        kind, why = "", f"{self._name(peer)} ended before the run was over"
        with contextlib.suppress(OSError, ValueError), connection.makefile(encoding="utf-8") as lines:
            for line in lines:
                kind, what = json.loads(line)
                if kind in (_FAILED, _LOST):
                    why = what
                    self._warned.set()
                else:
                    self._heard[peer].put(what)
        both_failed = kind == _FAILED and self._failed.is_set()  # each then tells its own error
        if not (kind == _BYE or both_failed or self._ended.is_set()):
            self._end(why)

    def _watch(self) -> None:
        while not self._ended.wait(_PAUSE_S):
            if time.monotonic() - self._last_beat > self._time_limit_s:
                self._end(
                    f"{self._name()} did not get on for {self._time_limit_s:g} s, the config's process_time_limit_s; "
                    "another may hang"
                )

    def _end(self, why: str) -> NoReturn:
        """From a thread, while JAX waits in another: nothing but the end of the process ends that."""
        self._say(_LOST, why)
        _leave(f"error: {why}; finished parts are kept, and the same command resumes", LOST)


def _leave(words: str, code: int) -> NoReturn:
    """Ends the process, without what JAX does at its end: wait for others, which never come."""
    print(words, file=sys.stderr, flush=True)
    sys.stdout.flush()
    os._exit(code)


def _greeting(connection: socket.socket) -> int:
    """The number of who has come; 0 for who says none."""
    connection.settimeout(10 * _PAUSE_S)
    with contextlib.suppress(OSError):
        said = connection.recv(4)
        return int.from_bytes(said) if len(said) == 4 else 0
    return 0


@contextlib.contextmanager
def joined(group: Group, time_limit_s: float, runs: Callable[[], Mapping[str, Any]] = dict) -> Iterator[Lifeline]:
    """Connects the processes and their devices, before JAX looks at any device.

    Args:
      group: of the processes.
      time_limit_s: longest that one waits for another.
      runs: gives what decides the programs of this process, of which those of all must be the same.

    Raises:
      UserError: not all of them came within the time limit, or they run something else.
    """
    lifeline = Lifeline(group, time_limit_s)
    if group.count == 1:
        yield lifeline
        return
    import jax

    try:
        lifeline.compare(runs())
        jax.distributed.initialize(
            group.coordinator, group.count, group.index, initialization_timeout=max(1, int(time_limit_s))
        )
        yield lifeline
    except BaseException as error:
        lifeline.fail(error)
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
