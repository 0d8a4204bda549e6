"""Checkpoints: everything that a run needs to resume. They are written while the run trains.

    checkpoints = Checkpoints("runs/1/checkpoints")
    checkpoints.save(step, state, data_state, config)    # returns when the state is copied
    saved = checkpoints.restore(abstract_state)          # the newest undamaged one, or None

A checkpoint is a folder named by its step:

    00000100/arrays/       the arrays of the state: each process writes its own, with Orbax
                           (https://orbax.readthedocs.io)
    00000100/about.json    step, loss, configuration, state of the data, shapes of the arrays
    00000100/SHA256SUMS    the checksum of each file above

It is written as `unfinished/00000100`, and renamed when all files are on the disk. Older ones
are deleted after that. A kill or a power cut therefore leaves either a complete checkpoint of
that name or none. If a file is damaged later, its checksum differs, and the run resumes from
the checkpoint before that one.

Where many processes train, each makes its `Checkpoints` with the same folder, on a file system
that they share, and all of them call the same methods. Process 0 reads all files once for the
checksums, and chooses the step to restore.
"""

# Orbax's `CheckpointManager` names and deletes checkpoints, too. It is not used: it syncs
# nothing to the disk, refuses to save a step again, deletes older checkpoints before anybody
# can compute checksums, and asks JAX about a preemption with numbers of steps, which would
# confuse `preemption.notices`. A save takes it a third longer.

import contextlib
import dataclasses
import functools
import json
import logging
import math
import os
import shutil
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
from jax.experimental import multihost_utils

from course_lib import files
from course_lib.program import checksums
from course_lib.program.differences import differences

PyTree = Any

ARRAYS, ABOUT = "arrays", "about.json"
REPLACED = "replaced-"  # begins the name of a checkpoint that is being replaced

# Hides Orbax's log of each step of its work. Errors are raised here.
logging.getLogger("absl").addFilter(
    lambda record: f"{os.sep}orbax{os.sep}" not in record.pathname
)


class CheckpointError(RuntimeError):
    """A checkpoint could not be written, or all existing ones are damaged."""


@dataclasses.dataclass(frozen=True)
class Saved:
    """A checkpoint that is not damaged."""

    step: int  # the last step before it was saved
    loss: float | None  # of the validation
    config: dict[str, Any]  # as saved, except that tuples are lists
    data_state: Any
    arrays: dict[str, str]  # dtype and shape of each array of the state, by its name
    state: PyTree = None  # bit for bit as saved; None until `restore`


class Checkpoints:
    """The checkpoints of one run. Always call `close` at the end, also after an error: it waits
    for the checkpoint in progress, which would otherwise be lost.
    """

    def __init__(self, folder: str | os.PathLike[str], keep: int = 3):
        """Keeps so many of the newest, and the one with the lowest loss. Writes nothing yet."""
        self.folder = Path(folder).absolute()
        self._drafts, self._keep = self.folder / "unfinished", keep
        self._damaged: set[int] = set()
        self._thread = ThreadPoolExecutor(1, "checkpoint")
        self._writing: tuple[int, Future[None]] | None = None  # the step that is saved
        # Compression would save a tenth of the bytes, in twice the time. If Orbax made folders
        # asynchronously, it would wait 20 minutes before it reports one that it cannot make.
        self._orbax = ocp.AsyncCheckpointer(
            ocp.PyTreeCheckpointHandler(use_compression=False),
            async_options=ocp.AsyncOptions(create_directories_asynchronously=False),
        )

    def steps(self) -> list[int]:
        """Returns the steps of all checkpoints, damaged ones too, in order."""
        return sorted(int(path.name) for path in self.folder.glob("*") if path.name.isdigit())

    def save(
        self, step: int, state: PyTree, data_state: Any, config: Any, loss: float | None = None
    ) -> None:
        """Begins to save, and returns as soon as `state` is copied. After that, the next step
        may overwrite (donate) it. Waits first for the checkpoint that the previous `save`
        began. Replaces a checkpoint of the same step.

        Args:
          step: the last step before this checkpoint.
          state: pytree of `jax.Array` on any mesh. Typed random keys are allowed.
          data_state: what the input needs to go on: dicts, lists, strings, numbers, None.
          config: nested dicts of these types, which `differences` compares later.
          loss: the validation loss.
        """
        self.wait()
        about = dict(step=step, loss=loss, config=config, data_state=data_state)
        text = json.dumps(about | {"arrays": _shapes(state)}, indent=1)
        if (again := json.loads(text)["data_state"]) != data_state:
            raise ValueError(
                f"data_state={data_state!r} must be the same after JSON wrote and read it, but"
                f" becomes {again!r}: use lists in place of tuples, and strings as keys"
            )
        draft = self._drafts / self._path(step).name
        with self._reported(step):
            self._remove_drafts()  # of a process that was killed
            self._orbax.save(draft / ARRAYS, args=ocp.args.PyTreeSave(state))
        self._writing = step, self._thread.submit(self._finish, step, draft, text)

    def wait(self) -> None:
        """Returns when the checkpoint that `save` began is complete; raises why it is not."""
        if self._writing is not None:
            (step, ended), self._writing = self._writing, None
            with self._reported(step):
                ended.result()

    def close(self) -> None:
        try:
            self.wait()
        finally:
            self._thread.shutdown()
            self._orbax.close()

    def newest(self) -> Saved | None:
        """Returns the newest undamaged checkpoint, without its state; None if there is none.
        Process 0 prints which ones are damaged. If all are, that is an error: starting again
        from step 0 would hide the damage.
        """
        self.wait()
        step = -1
        if jax.process_index() == 0:
            self._put_back()
            step = next(filter(self._undamaged, reversed(self.steps())), -1)
        # All processes take the step of process 0.
        step = int(multihost_utils.broadcast_one_to_all(np.int32(step)))
        if step >= 0:
            return Saved(**self._about(step))
        if steps := self.steps():
            raise CheckpointError(
                f"all checkpoints in {self.folder} are damaged (steps {steps}): bring one back"
                " from a copy, or move the folder away to start from step 0"
            )
        return None

    def restore(self, abstract_state: PyTree, saved: Saved | None = None) -> Saved | None:
        """Returns a checkpoint with its state, on any mesh of any number of processes.

        Args:
          abstract_state: pytree of `jax.ShapeDtypeStruct` or arrays, with the saved names,
            shapes and dtypes. Their shardings place the arrays; one without a sharding goes to
            this process's first device.
          saved: as `newest` returned it; None calls `newest`.
        """
        if (saved := saved or self.newest()) is None:
            return None
        path = self._path(saved.step)
        # Orbax would cast, cut and pad.
        if unlike := differences(saved.arrays, _shapes(abstract_state)):
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

    def _undamaged(self, step: int) -> bool:
        if (reason := checksums.damage(self._path(step))) is None:
            return True
        print(f"the checkpoint of step {step} is damaged and not used: {reason}", flush=True)
        self._damaged.add(step)
        return False

    def _finish(self, step: int, draft: Path, about: str) -> None:
        """Runs in a thread, while training continues."""
        self._orbax.wait_until_finished()
        if jax.process_index() == 0:
            (draft / ABOUT).write_text(about)
            checksums.write(draft)
            files.to_disk(draft, *draft.rglob("*"))
            if (path := self._path(step)).exists():
                path.rename(self._drafts / f"{REPLACED}{path.name}")
            draft.rename(path)
            files.to_disk(self.folder)
            self._damaged.discard(step)
            self._delete_old()

    def _delete_old(self) -> None:
        """Deletes all but the newest usable checkpoints and the best one."""
        losses, usable = {}, [step for step in self.steps() if step not in self._damaged]
        for step in usable:
            # An error means: no loss, or damage that nobody has noticed yet.
            with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
                if math.isfinite(loss := self._about(step)["loss"]):
                    losses[step] = loss
        best = min(losses, key=losses.__getitem__, default=None)
        for step in set(self.steps()) - {*usable[-self._keep :], best}:
            # Renamed before it is deleted: half a folder must not look like a checkpoint.
            self._path(step).rename(self._drafts / f"old-{step}")
        shutil.rmtree(self._drafts, ignore_errors=True)
        self._damaged.clear()

    def _put_back(self) -> None:
        """Moves back a checkpoint that was moved away but, after a kill, never replaced."""
        for path in self._drafts.glob(f"{REPLACED}*"):
            if not (named := self.folder / path.name.removeprefix(REPLACED)).exists():
                path.rename(named)

    def _remove_drafts(self) -> None:
        if jax.process_index() == 0:
            self._put_back()
            shutil.rmtree(self._drafts, ignore_errors=True)

    @contextlib.contextmanager
    def _reported(self, step: int) -> Iterator[None]:
        """Raises every error as a `CheckpointError`, after removing the draft."""
        try:
            yield
        except Exception as error:
            # Files that Orbax still writes would collide with the next checkpoint.
            with contextlib.suppress(Exception):
                self._orbax.wait_until_finished()
            with contextlib.suppress(OSError):  # a full disk needs the room
                self._remove_drafts()
            raise CheckpointError(
                f"step {step} could not be saved in {self.folder} ({files.why(error)}); the"
                f" saved steps are {self.steps()}"
            ) from error


def _shapes(tree: PyTree) -> dict[str, str]:
    """Returns each leaf's dtype and shape: {"params.Dense_0.kernel": "float32[4, 8]"}."""
    name = functools.partial(jax.tree_util.keystr, simple=True, separator=".")
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return {name(path): f"{leaf.dtype}{list(leaf.shape)}" for path, leaf in leaves}


def _placed(leaf: Any) -> jax.ShapeDtypeStruct:
    sharding = leaf.sharding or jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)
