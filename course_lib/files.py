"""Files that are written completely or not at all, locks on folders, and the cache folder."""

import contextlib
import errno
import fcntl
import os
import pathlib
import shutil
import tempfile
import time
from collections.abc import Iterator
from typing import IO

REPLACED = "replaced-"  # begins the name of a folder that is being replaced
STALE = 3600  # seconds; a younger part may still be written to


def cache_folder() -> pathlib.Path:
    """Returns `$COURSE_CACHE`, or `course_lib` in the user's cache folder."""
    user = pathlib.Path(os.environ.get("XDG_CACHE_HOME") or pathlib.Path.home() / ".cache")
    return pathlib.Path(os.environ.get("COURSE_CACHE") or user / "course_lib")


def folders(top: pathlib.Path) -> Iterator[tuple[pathlib.Path, list[str]]]:
    """Yields each folder from `top` down, with the sorted names in it that are not folders.

    Links to folders are followed. Each folder comes once, so links may lead in a circle.

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


def _raise(error: OSError) -> None:
    raise error


def below(top: pathlib.Path) -> list[pathlib.Path]:
    """Returns all files in a folder and in its `folders`, sorted by path.

    Raises:
      ValueError: naming what may not be read, what is neither a file nor a folder, or a name
        that is not UTF-8.
      OSError: if something cannot be read for another reason.
    """
    try:
        paths = sorted(folder / name for folder, names in folders(top) for name in names)
        for path in paths:
            if not path.is_file():
                raise ValueError(
                    f"{str(path)!r} is neither a file nor a folder, or a link that leads"
                    " nowhere; remove it"
                )
            check_name(path)
    except PermissionError as error:
        raise ValueError(
            f"{str(error.filename)!r} may not be read; permit it, or take another folder"
        ) from error
    return paths


def check_name(path: str | os.PathLike[str]) -> None:
    """Refuses a path that is not UTF-8: Python can open it, libraries in other languages
    cannot.

    Raises:
      ValueError: naming the path.
    """
    try:
        os.fspath(path).encode()
    except UnicodeEncodeError:
        raise ValueError(
            f"{os.fspath(path)!r} has a name that is not UTF-8; rename it"
        ) from None


def to_disk(*paths: pathlib.Path) -> None:
    """Writes files, and the names in folders, through to the disk: they outlive a power cut.

    Raises:
      OSError: if they cannot be written there. A file system that does not sync folders is no
        error.
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
def atomic_write(path: pathlib.Path) -> Iterator[IO[bytes]]:
    """Opens a temporary file, and renames it to `path` at the end of the `with` block. After an
    error or a kill `path` is as before: no other process ever sees half a file.

    The temporary file is beside `path`, and its name ends with ".part". If a killed process
    leaves one, a later call in the same folder removes it, an hour after its last write.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    for part in path.parent.glob("*.????????.part"):  # as `tempfile` names them
        with contextlib.suppress(FileNotFoundError):  # another process removes it
            if time.time() - part.stat().st_mtime > STALE:
                part.unlink()
    with tempfile.NamedTemporaryFile(
        dir=path.parent, prefix=f"{path.name}.", suffix=".part", delete=False
    ) as file:
        try:
            yield file
            file.flush()
            # Without this, a crash of the machine may leave an empty file of that name.
            os.fsync(file.fileno())
            file.close()
            os.chmod(file.name, 0o644)  # a shared cache is for all its users
            os.replace(file.name, path)
        except BaseException:
            os.unlink(file.name)
            raise


def complete_folder(draft: pathlib.Path, path: pathlib.Path) -> None:
    """Writes a draft folder through to the disk, then renames it to `path`.

    If `path` exists, it is first moved beside the draft. If the process is killed between the
    two renames, `put_back` moves it back.
    """
    to_disk(draft, *draft.rglob("*"))
    if path.exists():
        path.rename(draft.parent / f"{REPLACED}{path.name}")
    draft.rename(path)
    to_disk(path.parent)


def put_back(drafts: pathlib.Path, folder: pathlib.Path) -> None:
    """Moves back the folders that `complete_folder` moved away but did not replace."""
    for path in drafts.glob(f"{REPLACED}*"):
        if not (named := folder / path.name.removeprefix(REPLACED)).exists():
            path.rename(named)


def remove_drafts(drafts: pathlib.Path, folder: pathlib.Path) -> None:
    """Removes the folder of drafts, after `put_back`."""
    put_back(drafts, folder)
    shutil.rmtree(drafts, ignore_errors=True)


def why(error: Exception) -> str:
    """Returns the reason of a failed write in a few words."""
    return (
        "no space left on the disk"
        if "No space left" in str(error)
        else f"{type(error).__name__}: {error}"
    )


@contextlib.contextmanager
def locked(folder: pathlib.Path, *, wait: bool = False) -> Iterator[None]:
    """Locks a folder, by its file `lock`, for as long as the `with` lasts.

    The operating system ends the lock with the process. A file system without locks lets every
    process in.

    Args:
      folder: made if it is missing.
      wait: waits for another process that has the lock.

    Raises:
      BlockingIOError: if another process has the lock and `wait` is False. That process may run
        on another host, if the file system has locks between hosts (NFS, Lustre).
      ValueError: if there is a file in the folder's place, or nothing may be written there.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        # NFS locks only files that are open for writing. The lock of a shared cache, which
        # `wait` is for, belongs to one of its users: the others may only read it.
        access = os.O_RDONLY if wait else os.O_RDWR
        lock = os.open(folder / "lock", access | os.O_CREAT, 0o644)
    except (FileExistsError, NotADirectoryError):
        raise ValueError(
            f"folder={str(folder)!r} must be a folder, and there is a file in its way: name"
            " another"
        ) from None
    except PermissionError:
        raise ValueError(
            f"folder={str(folder)!r} may not be written to: permit it, or name another"
        ) from None
    with open(lock):
        try:
            fcntl.flock(lock, fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise BlockingIOError(
                f"{folder} is in use by another process: wait until that one ends, or end it"
            ) from None
        except OSError:  # a file system without locks
            pass
        yield
