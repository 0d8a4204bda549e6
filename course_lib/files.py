"""Files: where prepared ones are kept, which ones a folder has, how one is written whole or not
at all, and whose a folder is meanwhile.
"""

import contextlib
import errno
import fcntl
import glob
import os
import pathlib
import shutil
import tempfile
import time
from collections.abc import Iterator
from typing import IO

from course_lib.measure.units import MIB

REPLACED = "replaced-"  # before the name of a folder that is to be replaced
STALE = 60  # seconds; a younger part may belong to a process that is about to lock it


def cache_folder() -> pathlib.Path:
    """Returns the folder of prepared tokens: `$COURSE_CACHE`, or `course_lib` in the user's
    cache folder.
    """
    user = pathlib.Path(os.environ.get("XDG_CACHE_HOME") or pathlib.Path.home() / ".cache")
    return pathlib.Path(os.environ.get("COURSE_CACHE") or user / "course_lib")


def folders(top: pathlib.Path) -> Iterator[tuple[pathlib.Path, list[str]]]:
    """Yields each folder from `top` down, and the names of what it holds but folders, both in
    order.

    Links to folders are followed. A folder that is reached in several ways comes once; so links
    may lead in a circle.

    Raises:
      OSError: if a folder cannot be read.
    """
    seen = set()
    for folder, inner, others in os.walk(top, onerror=_raise, followlinks=True):
        status = os.stat(folder)
        if (place := (status.st_dev, status.st_ino)) in seen:
            inner.clear()
            continue
        seen.add(place)
        inner.sort()
        yield pathlib.Path(folder), sorted(others)


def below(top: pathlib.Path) -> list[pathlib.Path]:
    """Returns all files of a folder and of its `folders`, sorted by their paths: none is left
    out in silence.

    Raises:
      ValueError: naming what may not be read, what is neither a file nor a folder, or a name
        that is not UTF-8.
      OSError: if something cannot be read for another reason.
    """
    try:
        found = sorted(folder / name for folder, names in folders(top) for name in names)
        odd = [path for path in found if not path.is_file()]
    except PermissionError as error:
        raise ValueError(
            f"{str(error.filename)!r} may not be read; permit it, or take another folder"
        ) from error
    if odd:
        raise ValueError(
            f"{str(odd[0])!r} is neither a file nor a folder, or a link to what is not there;"
            " remove it"
        )
    for path in found:
        check_name(path)
    return found


def check_name(path: str | os.PathLike[str]) -> None:
    """Refuses a path that is not UTF-8: Python can name it, other languages' libraries cannot.

    Raises:
      ValueError: naming it.
    """
    try:
        os.fspath(path).encode()
    except UnicodeEncodeError:
        raise ValueError(
            f"{os.fspath(path)!r} has a name that is not UTF-8; rename it"
        ) from None


def _raise(error: OSError) -> None:
    raise error


def to_disk(*paths: pathlib.Path) -> None:
    """Returns when what files hold, and which names folders hold, is on the disk and outlives a
    power cut.

    Raises:
      OSError: if it cannot be written there. File systems that know of no such call for folders
        are left to themselves.
    """
    for path in paths:
        opened = os.open(path, os.O_RDONLY)
        try:
            os.fsync(opened)
        except OSError as error:
            if not path.is_dir() or error.errno not in (errno.EINVAL, errno.ENOTSUP):
                raise
        finally:
            os.close(opened)


@contextlib.contextmanager
def whole_file(path: pathlib.Path) -> Iterator[IO[bytes]]:
    """Opens a file that is there whole after the `with`, or not at all: no other process ever
    sees half of it.

    Until then it is a part beside it, which is locked: what a process leaves that is killed,
    the next writer removes.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    remove_stale(path.parent, f"{glob.escape(path.name)}.*.part")
    with tempfile.NamedTemporaryFile(
        dir=path.parent, prefix=f"{path.name}.", suffix=".part", delete=False
    ) as file:
        try:
            with contextlib.suppress(OSError):  # a file system without locks
                # `remove_stale` of another process may hold it for an instant.
                fcntl.flock(file, fcntl.LOCK_EX)
            yield file
            file.flush()
            # Else a name that outlives a crash of the machine may lead to an empty file.
            os.fsync(file.fileno())
            file.close()
            os.chmod(file.name, 0o644)  # a shared cache is for all its users
            os.replace(file.name, path)
        except BaseException:
            os.unlink(file.name)
            raise


def whole_folder(draft: pathlib.Path, path: pathlib.Path) -> None:
    """Gives a folder its name when all that is in it is on the disk, and returns when the name
    is, too.

    One that has the name goes first, beside the draft: until the next call of `put_back` a
    killed process may leave it there.
    """
    to_disk(draft, *draft.rglob("*"))
    if path.exists():
        path.rename(draft.parent / f"{REPLACED}{path.name}")
    draft.rename(path)
    to_disk(path.parent)


def put_back(drafts: pathlib.Path, folder: pathlib.Path) -> None:
    """Gives what a `whole_folder` was to replace its name in `folder` again, where that one did
    not come.
    """
    for path in drafts.glob(f"{REPLACED}*"):
        if not (named := folder / path.name.removeprefix(REPLACED)).exists():
            path.rename(named)


def remove_drafts(drafts: pathlib.Path, folder: pathlib.Path) -> None:
    """Removes the folder of drafts, but first does as `put_back`."""
    put_back(drafts, folder)
    shutil.rmtree(drafts, ignore_errors=True)


def make_room(draft: pathlib.Path, needed: int) -> str | None:
    """Makes an empty folder of a draft; returns why not, or why there is not enough space for
    so many bytes, else None.
    """
    try:
        # Removes what a process that was killed has left.
        remove_drafts(draft.parent, draft.parent.parent)
        draft.mkdir(parents=True)
        free = shutil.disk_usage(draft).free
    except OSError as error:
        return why(error)
    if free > needed + MIB:  # for metadata
        return None
    return (
        f"no space left on the disk: {needed / MIB:.1f} MiB and some are needed,"
        f" {free / MIB:.1f} are free"
    )


def why(error: Exception) -> str:
    """Returns in a few words why something could not be written."""
    return (
        "no space left on the disk"
        if "No space left" in str(error)
        else f"{type(error).__name__}: {error}"
    )


def remove_stale(folder: pathlib.Path, pattern: str) -> None:
    """Removes files of a folder that match a pattern and that no process has locked; young ones
    stay.
    """
    for part in folder.glob(pattern):
        with contextlib.suppress(OSError), part.open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if time.time() - os.fstat(file.fileno()).st_mtime > STALE:
                part.unlink()


@contextlib.contextmanager
def one_at_a_time(folder: pathlib.Path) -> Iterator[None]:
    """Lets one process at a time into a `with`, while others wait; all, where the file system
    knows of no locks.
    """
    folder.mkdir(parents=True, exist_ok=True)
    # To read is enough for a lock, and all users of a cache may.
    file = os.open(folder / "lock", os.O_RDONLY | os.O_CREAT, 0o644)
    try:
        with contextlib.suppress(OSError):
            fcntl.flock(file, fcntl.LOCK_EX)
        yield
    finally:
        os.close(file)


@contextlib.contextmanager
def locked(folder: pathlib.Path) -> Iterator[None]:
    """Holds a folder for as long as a `with` lasts, by a lock on its file `lock`, which ends
    with the process.

    A file system that knows of no locks lets everybody in.

    Raises:
      BlockingIOError: if another process holds it, here or, where the file system knows of
        locks (NFS, Lustre), elsewhere.
      ValueError: if there is a file in its place, or nothing may be written there.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        opened = (folder / "lock").open("w")
    except (FileExistsError, NotADirectoryError):
        raise ValueError(
            f"folder={str(folder)!r} must be a folder, and there is a file in its way: name"
            " another"
        ) from None
    except PermissionError:
        raise ValueError(
            f"folder={str(folder)!r} may not be written to: permit it, or name another"
        ) from None
    with opened as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise BlockingIOError(
                f"{folder} is in use by another process: wait until that one ends, or end it"
            ) from None
        except OSError:  # a file system without locks
            pass
        yield
