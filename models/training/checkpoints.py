"""Checkpoints of an unfinished run, for a run that goes on where it was killed.

orbax writes each under another name and renames it when it is whole, so a process that dies while it saves leaves the
checkpoint before as the latest. Each says what its run follows from, and the hash of what it holds: orbax itself
reads a flipped bit without a word.
"""

import dataclasses
import json
import os
import pathlib
import shutil
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from orbax.checkpoint import v1 as ocp

from models.checkpoint import arrays_sha256, by_name
from models.training.step import TrainState

KEPT = 2  # the latest, and the one before should it be damaged


@dataclasses.dataclass(frozen=True)
class Checkpoints:
    """A folder of checkpoints, and what the run in it follows from (as JSON holds it: recipe, text, versions)."""

    folder: pathlib.Path
    origin: Mapping[str, Any]

    @classmethod
    def beside(cls, out_dir: str | os.PathLike[str], origin: Mapping[str, Any]) -> "Checkpoints":
        """Those of the model that will be at `out_dir`, which appears whole and so cannot hold them before."""
        path = pathlib.Path(out_dir).resolve()
        return cls(path.with_name(path.name + ".checkpoints"), origin)

    def latest_step(self) -> int:
        """Steps taken when the latest checkpoint was saved; 0 if there is none."""
        if not self.folder.is_dir():
            return 0
        with self._open() as checkpointer:
            return checkpointer.latest.step if checkpointer.latest else 0

    def save(self, state: TrainState) -> None:
        """Writes a checkpoint; of older ones the last stays."""
        arrays = {name: np.asarray(array) for name, array in by_name(state).items()}
        about = {"origin": dict(self.origin), "sha256": arrays_sha256(arrays)}
        with self._open() as checkpointer:
            checkpointer.save(int(state.step), arrays, custom_metadata=about, force=True)

    def resume(self, initial: TrainState) -> TrainState:
        """The state of the latest checkpoint, or `initial` if there is none.

        Args:
          initial: says by its structure what is expected.

        Raises:
          ValueError: The latest checkpoint is damaged, or its run follows from something else.
        """
        step = self.latest_step()
        if not step:
            return initial
        place = self.folder / str(step)
        damaged = f"{place} is damaged; remove it to go on from the checkpoint before, or from the start"
        try:
            with self._open() as checkpointer:
                about: Any = checkpointer.metadata(step).custom_metadata
                arrays = checkpointer.load(step)
            origin, sha256 = about["origin"], about["sha256"]
        except (ValueError, LookupError, TypeError, OSError) as error:
            raise ValueError(damaged) from error
        self._check_origin(origin)
        if arrays_sha256(arrays) != sha256:
            raise ValueError(damaged)
        # As fresh arrays of the default device, which is what the first step of a new run gets.
        return jax.tree.structure(initial).unflatten(jnp.asarray(arrays[name]) for name in by_name(initial))

    def remove(self) -> None:
        """Takes the folder away, once the run is finished."""
        shutil.rmtree(self.folder, ignore_errors=True)

    def _open(self) -> ocp.training.Checkpointer:
        """Opens, or makes, the folder, and clears away what a killed process did not finish."""
        return ocp.training.Checkpointer(
            str(self.folder),
            # orbax's policies are not quite of the type that orbax declares.
            preservation_policy=ocp.training.preservation_policies.LatestN(KEPT),  # pyright: ignore[reportArgumentType]
            cleanup_tmp_directories=True,
        )

    def _check_origin(self, found: Mapping[str, Any]) -> None:
        there, here = dict(_flat(found)), dict(_flat(json.loads(json.dumps(self.origin))))
        differ = [
            f"{name} is {there.get(name)} there and {here.get(name)} here"
            for name in sorted(there.keys() | here.keys())
            if there.get(name) != here.get(name)
        ]
        if differ:
            raise ValueError(
                f"{self.folder} holds an unfinished run that cannot be gone on with: {'; '.join(differ)}. "
                "Put that right, give another out_dir, or remove the folder to start over"
            )


def _flat(described: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Every value under its dotted name."""
    for name, value in described.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{name}.")
        else:
            yield prefix + name, value
