"""Checkpoints: what a run needs to go on after it was killed, written while it trains, and
never half.

    checkpoints = Checkpoints("runs/1/checkpoints")
    checkpoints.save(step, state, data_state, config)    # returns when the state is copied
    saved = checkpoints.restore(abstract_state)          # the newest one that is whole, or None

A checkpoint is a folder named by its step:

    00000100/arrays/       the arrays of the state: each process writes its own, with Orbax
                           (https://orbax.readthedocs.io)
    00000100/about.json    step, loss, configuration, state of the data, list of the arrays
    00000100/SHA256SUMS    the checksum of each file above

It is written as `unfinished/00000100` and renamed once its checksums stand in it and all is on
the disk; older ones are deleted after that. So a process that is killed, or a power cut, at any
moment leaves a checkpoint that is whole, or none of that name. What happens to the files later
(a flipped bit, one cut short or deleted) the checksums tell: that one is damaged, and the one
before is used. A step that is saved again replaces the older one; killed meanwhile, the next
process puts that one back. With many processes all of them call every method, with the same
folder, on a file system that they share. Process 0 reads all files once for the checksums, and
says which step is restored.
"""

import contextlib
import dataclasses
import json
import logging
import math
import os
import re
import shutil
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
from jax.experimental import multihost_utils

from course_lib import files
from course_lib.program import checksums
from course_lib.program.differences import differences as differences  # of configurations

PyTree = Any

ARRAYS, ABOUT, UNFINISHED = "arrays", "about.json", "unfinished"
_NOTHING, _ALL_DAMAGED = -1, -2  # in place of a step

# Through absl's logger Orbax tells what it does, and errors with their traceback. Here they are
# raised, and need no log.
logging.getLogger("absl").addFilter(
    lambda record: f"{os.sep}orbax{os.sep}" not in record.pathname
)


class CheckpointError(RuntimeError):
    """A checkpoint could not be written, or none of those that there are can be used."""


@dataclasses.dataclass(frozen=True)
class Saved:
    """A checkpoint that is whole.

    Attributes:
      step: after which step it was taken.
      data_state: as saved.
      config: as saved, but that tuples are lists.
      loss: the validation loss, or None.
      state: pytree of arrays, bit for bit as saved; None if only `newest` was asked for.
    """

    step: int
    data_state: Any
    config: dict[str, Any]
    loss: float | None
    state: PyTree = None


class Checkpoints:
    """The checkpoints of one run. What is being written when the process ends is lost: close
    them, whatever ends the run.
    """

    def __init__(self, folder: str | os.PathLike[str], keep: int = 3):
        """Nothing is read or written yet.

        Args:
          folder: of this run alone; the first `save` makes it.
          keep: how many of the last are kept. The one with the lowest loss is kept besides.

        Raises:
          ValueError: if `keep` is less than 2.
        """
        if keep < 2:
            raise ValueError(
                f"keep={keep} must be at least 2: if the last one is damaged, the one before is"
                " needed"
            )
        self.folder = Path(folder).absolute()
        self._keep = keep
        self._whole: set[int] = set()  # what has been checked since the last save
        self._damaged: set[int] = set()
        self._thread: threading.Thread | None = None
        self._failure: CheckpointError | None = None
        # Compression would save a tenth, at twice the time. Folders made later raise an error
        # when Orbax has waited 20 minutes.
        self._orbax = ocp.AsyncCheckpointer(
            ocp.PyTreeCheckpointHandler(use_compression=False),
            async_options=ocp.AsyncOptions(create_directories_asynchronously=False),
        )

    def steps(self) -> list[int]:
        """Returns the steps of the checkpoints that there are, in order. Each was whole when it
        was written.
        """
        paths = self.folder.iterdir() if self.folder.is_dir() else ()
        return sorted(int(path.name) for path in paths if re.fullmatch(r"\d{8,}", path.name))

    def best(self) -> float | None:
        """Returns the lowest loss of those that are not known to be damaged; None if none has
        one.
        """
        return min(filter(math.isfinite, map(self._loss, self._usable())), default=None)

    def _usable(self) -> list[int]:
        return [step for step in self.steps() if step not in self._damaged]

    def save(
        self,
        step: int,
        state: PyTree,
        data_state: Any,
        config: Mapping[str, Any],
        loss: float | None = None,
    ) -> None:
        """Begins to save, and returns when `state` has been copied: the next step may overwrite
        it.

        Waits for the one before. One of the same step is replaced.

        Args:
          step: after which step this is.
          state: pytree of `jax.Array`, typed random keys among them, on any mesh.
          data_state: what the input needs to go on: dicts, lists, strings, numbers, None.
          config: what `differences` will compare, nested dicts of the same.
          loss: the validation loss.

        Raises:
          CheckpointError: if the one before could not be written, or this one not begun; older
            ones are as they were. It is raised once. With one process a run may go on and save
            again; with several it has to stop, as those that did not fail need not know of it.
          ValueError: if `state`, `data_state` or `config` holds what would not come back as it
            is.
        """
        self.wait()
        self._whole.clear()
        loss = None if loss is None else float(loss)
        about = _as_json(
            dict(
                step=step,
                loss=loss,
                config=config,
                data_state=data_state,
                arrays=_shapes(state),
            )
        )
        draft = self.folder / UNFINISHED / self._path(step).name
        size = sum(leaf.nbytes for leaf in jax.tree.leaves(state))
        reason = files.make_room(draft, size) if jax.process_index() == 0 else None
        if multihost_utils.broadcast_one_to_all(np.int32(reason is not None)):
            raise self._not_saved(step, reason or "process 0 says why")
        try:
            self._orbax.save(draft / ARRAYS, args=ocp.args.PyTreeSave(state))
        except (OSError, ValueError, RuntimeError) as error:
            raise self._not_saved(step, files.why(error)) from error
        self._thread = threading.Thread(
            target=self._finish, args=(step, draft, about), name="checkpoint"
        )
        self._thread.start()

    def wait(self) -> None:
        """Returns when what `save` began is there.

        Raises:
          CheckpointError: if it could not be written; once.
        """
        if self._thread is not None:
            self._thread.join()
        failure, self._failure = self._failure, None
        if failure is not None:
            raise failure

    def close(self) -> None:
        """Waits, and ends Orbax's threads. Raises what `wait` raises."""
        try:
            self.wait()
        finally:
            self._orbax.close()

    def newest(self) -> Saved | None:
        """Returns the newest checkpoint that is whole, without its arrays; None if there is
        none. Says which are damaged.

        Raises:
          CheckpointError: if there are checkpoints and all are damaged: to start anew would
            hide it.
        """
        self.wait()
        step = self._newest_step() if jax.process_index() == 0 else 0
        # All processes take the step of process 0.
        step = int(multihost_utils.broadcast_one_to_all(np.int32(step)))
        if step == _ALL_DAMAGED:
            raise CheckpointError(
                f"all checkpoints in {self.folder} are damaged, of steps {self.steps()}: there"
                " is nothing to go on from; bring one back from a copy, or move the folder"
                " away to start anew"
            )
        if step == _NOTHING:
            return None
        about = self._about(step)
        return Saved(step, about["data_state"], about["config"], about["loss"])

    def restore(self, abstract_state: PyTree) -> Saved | None:
        """Restores the newest checkpoint that is whole, onto any mesh of any number of
        processes.

        Args:
          abstract_state: pytree of `jax.ShapeDtypeStruct` or arrays, whose shardings say what
            goes where; without one, to this process's first device.

        Returns:
          As `newest` does, with the state.

        Raises:
          CheckpointError: if all checkpoints are damaged.
          ValueError: if names, shapes or dtypes are not those that were saved: nothing is cast,
            cut or padded.
        """
        if (saved := self.newest()) is None:
            return None
        path = self._path(saved.step)
        if unlike := differences(self._about(saved.step)["arrays"], _shapes(abstract_state)):
            raise ValueError(
                f"abstract_state must be like the state saved in {path}, but"
                f" {'; '.join(unlike)}"
            )
        target = jax.tree.map(_placed, abstract_state)
        placed = ocp.checkpoint_utils.construct_restore_args(target)
        state = self._orbax.restore(
            path / ARRAYS, args=ocp.args.PyTreeRestore(target, restore_args=placed)
        )
        return dataclasses.replace(saved, state=state)

    def _path(self, step: int) -> Path:
        return self.folder / f"{step:08d}"

    def _about(self, step: int) -> dict[str, Any]:
        return json.loads((self._path(step) / ABOUT).read_text())

    def _newest_step(self) -> int:
        files.put_back(self.folder / UNFINISHED, self.folder)
        steps = self.steps()
        for step in reversed(steps):
            reason = None if step in self._whole else checksums.damage(self._path(step))
            if reason is None:
                self._whole.add(step)
                return step
            if step not in self._damaged:  # said already
                print(
                    f"the checkpoint of step {step} is damaged and not used: {reason}",
                    flush=True,
                )
                self._damaged.add(step)
        return _ALL_DAMAGED if steps else _NOTHING

    def _finish(self, step: int, draft: Path, about: str) -> None:
        """Runs beside the training: waits for Orbax, adds the checksums, and then gives the
        checkpoint its name.
        """
        try:
            self._orbax.wait_until_finished()
            if jax.process_index() == 0:
                (draft / ABOUT).write_text(about)
                checksums.write(draft)
                files.whole_folder(draft, self._path(step))
                self._damaged.discard(step)
                self._delete_old()
        except Exception as error:  # for the training's own thread
            self._failure = self._not_saved(step, files.why(error))
            self._failure.__cause__ = error

    def _delete_old(self) -> None:
        """Keeps the last ones and the best one of those that are not known to be damaged."""
        steps = self._usable()
        best = [step for step in steps if self._loss(step) == self.best()]
        for step in set(self.steps()) - set(steps[-self._keep :] + best[:1]):
            # Renamed first: half deleted, it must be no checkpoint.
            self._path(step).rename(self.folder / UNFINISHED / f"old-{step}")
        shutil.rmtree(self.folder / UNFINISHED, ignore_errors=True)
        self._damaged.clear()

    def _loss(self, step: int) -> float:
        """Returns the loss saved with a checkpoint; infinity where there is none, or it cannot
        be read.
        """
        try:
            loss = float(self._about(step)["loss"])
            return loss if math.isfinite(loss) else math.inf
        except (OSError, ValueError, KeyError, TypeError):
            return math.inf

    def _not_saved(self, step: int, why: str) -> CheckpointError:
        # What Orbax still writes of it would fail in the next one, or stand in its way.
        with contextlib.suppress(Exception):
            self._orbax.wait_until_finished()
        if jax.process_index() == 0:
            with contextlib.suppress(OSError):
                # A disk that is full needs the room.
                files.remove_drafts(self.folder / UNFINISHED, self.folder)
        return CheckpointError(
            f"step {step} could not be saved in {self.folder} ({why}); saved are steps"
            f" {self.steps()}"
        )


def _as_json(about: dict[str, Any]) -> str:
    try:
        text = json.dumps(about, indent=1)
    except (TypeError, ValueError) as error:
        raise ValueError(
            f"config and data_state must be of dicts, lists, strings, numbers and None: {error}"
        ) from None
    if (again := json.loads(text)["data_state"]) != about["data_state"]:
        raise ValueError(
            f"data_state={about['data_state']!r} must be what JSON gives back, which is"
            f" {again!r}"
        )
    return text


def _shapes(tree: PyTree) -> dict[str, str]:
    """Returns what each leaf is, as in {"params.Dense_0.kernel": "float32[4, 8]"}."""
    shapes = {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        name = jax.tree_util.keystr(path, simple=True, separator=".")
        if not isinstance(leaf, jax.Array | jax.ShapeDtypeStruct):
            raise ValueError(
                f"state.{name}={leaf!r} must be a jax.Array: it would come back as one"
            )
        shapes[name] = f"{leaf.dtype}{list(leaf.shape)}"
    return shapes


def _placed(leaf: Any) -> jax.ShapeDtypeStruct:
    sharding = leaf.sharding or jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)
