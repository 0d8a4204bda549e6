"""Laws of files that are written completely or not at all."""

import errno
import os
import pathlib
import subprocess
import sys

import pytest

from course_lib import files


def test_a_file_is_there_only_when_it_is_complete_and_others_may_read_it(tmp_path):
    path = tmp_path / "folder" / "file"
    with files.atomic_write(path) as file:
        file.write(b"content")
        file.flush()
        assert not path.exists()
    assert path.read_bytes() == b"content" and list(path.parent.iterdir()) == [path]
    assert path.stat().st_mode & 0o777 == 0o644


def test_a_writer_that_fails_leaves_what_was_there_and_nothing_else(tmp_path):
    path = tmp_path / "file"
    path.write_bytes(b"before")
    with pytest.raises(KeyboardInterrupt), files.atomic_write(path) as file:
        file.write(b"half")
        raise KeyboardInterrupt
    assert path.read_bytes() == b"before" and list(tmp_path.iterdir()) == [path]


def test_a_part_that_a_killed_writer_left_goes_and_one_that_is_being_written_stays(tmp_path):
    path = tmp_path / "file"
    names = {"file.kille_d1.part", "earlier.killed_2.part", "users-own.part", "a.killed_3.txt"}
    for name in names:
        (tmp_path / name).write_bytes(b"half")
        os.utime(tmp_path / name, (0, 0))
    with files.atomic_write(path) as first:
        with files.atomic_write(path) as second:
            second.write(b"second")
        first.write(b"first")
    assert path.read_bytes() == b"first"
    left = {file.name for file in tmp_path.iterdir()}
    assert left == {"file", "users-own.part", "a.killed_3.txt"}


def test_a_file_system_that_syncs_no_folders_is_left_to_itself_but_no_error_is(
    tmp_path, monkeypatch
):
    def fails(number):
        def fsync(file):
            raise OSError(number, os.strerror(number))

        monkeypatch.setattr(os, "fsync", fsync)

    (tmp_path / "file").touch()
    fails(errno.EINVAL)
    files.to_disk(tmp_path)
    with pytest.raises(OSError):
        files.to_disk(tmp_path / "file")
    fails(errno.EIO)
    with pytest.raises(OSError):
        files.to_disk(tmp_path)


def test_what_a_file_holds_is_on_the_disk_before_it_has_its_name(tmp_path, monkeypatch):
    done = []
    for name in ("fsync", "replace"):
        real = getattr(os, name)
        monkeypatch.setattr(
            os, name, lambda *args, name=name, real=real: (done.append(name), real(*args))[1]
        )
    with files.atomic_write(tmp_path / "file") as file:
        file.write(b"content")
    assert done == ["fsync", "replace"]


def test_the_cache_is_where_the_environment_says(monkeypatch, tmp_path):
    monkeypatch.setenv("COURSE_CACHE", "")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert files.cache_folder() == tmp_path / "course_lib"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert files.cache_folder() == pathlib.Path.home() / ".cache" / "course_lib"
    monkeypatch.setenv("COURSE_CACHE", "/elsewhere")
    assert files.cache_folder() == pathlib.Path("/elsewhere")


def test_a_second_program_in_a_folder_is_refused_until_the_first_one_is_killed(tmp_path):
    program = (
        "import pathlib, sys\n"
        "from course_lib import files\n"
        "with files.locked(pathlib.Path(sys.argv[1])):\n"
        "    print('locked', flush=True)\n"
        "    sys.stdin.readline()\n"
    )
    command = [sys.executable, "-c", program, str(tmp_path / "run")]
    pipes = dict(stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    with subprocess.Popen(command, **pipes) as process:
        assert process.stdout.readline() == "locked\n"
        with (
            pytest.raises(BlockingIOError, match="run is in use by another process"),
            files.locked(tmp_path / "run"),
        ):
            pass
        process.kill()
    with files.locked(tmp_path / "run"), pytest.raises(BlockingIOError):
        with files.locked(tmp_path / "run"):
            pass
    with files.locked(tmp_path / "run", wait=True):  # after an error it is free
        pass
    assert (tmp_path / "run" / "lock").stat().st_mode & 0o777 == 0o666  # for all users


def test_a_folder_that_cannot_be_one_and_a_name_that_is_not_utf_8_are_refused(
    tmp_path, monkeypatch
):
    (tmp_path / "file").write_text("")
    for path in (tmp_path / "file", tmp_path / "file" / "run"):
        with pytest.raises(ValueError, match=f"folder='{path}' must be a folder"):
            with files.locked(path):
                pass
    (tmp_path / "run" / "lock").mkdir(parents=True)
    for path in (tmp_path / "run", tmp_path / ("a" * 300)):
        with pytest.raises(OSError, match=f"folder='{path}' cannot be used .*name another"):
            with files.locked(path):
                pass
    files.check_name("ä")
    with pytest.raises(ValueError, match=r"'/a/\\udcff' has a name that is not UTF-8"):
        files.check_name(os.fsdecode(b"/a/\xff"))

    def forbidden(*args, **options):  # root, who may run the tests, would be permitted
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(os, "open", forbidden)
    with pytest.raises(ValueError, match=r"folder='.*/run' may not be written to"):
        with files.locked(tmp_path / "run"):
            pass


def test_a_full_disk_is_called_by_its_name():
    full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    assert files.why(full) == "no space left on the disk"
    assert files.why(OSError("no")) == "OSError: no"
