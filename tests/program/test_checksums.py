"""Checksums detect whatever happens to a file."""

import random
import shutil
import subprocess

import pytest

from course_lib.program import checksums


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "inner" / "empty").mkdir(parents=True)
    (tmp_path / "numbers").write_bytes(bytes(range(256)))
    (tmp_path / "inner" / "text").write_text("two words\n")
    (tmp_path / "inner" / "nothing").touch()
    checksums.write(tmp_path)
    return tmp_path


def test_what_was_not_touched_is_whole(folder):
    assert checksums.damage(folder) is None


def test_any_flipped_bit_in_any_file_is_found(folder):
    files = [folder / "numbers", folder / "inner" / "text"]  # of the list itself: below
    for path in files:
        whole = path.read_bytes()
        for bit in random.Random(0).sample(range(8 * len(whole)), k=min(60, 8 * len(whole))):
            flipped = bytearray(whole)
            flipped[bit // 8] ^= 1 << bit % 8
            path.write_bytes(flipped)
            assert path.name in checksums.damage(folder), f"bit {bit} of {path.name}"
        path.write_bytes(whole)
    assert checksums.damage(folder) is None


def test_whatever_happens_to_the_list_alone_it_is_the_list_that_is_named(folder):
    """Also where a flipped bit makes of one name another, or of two lines one."""
    path = folder / "SHA256SUMS"
    whole = path.read_bytes()
    for bit in range(8 * len(whole)):
        flipped = bytearray(whole)
        flipped[bit // 8] ^= 1 << bit % 8
        path.write_bytes(flipped)
        assert "SHA256SUMS" in checksums.damage(folder), f"bit {bit}"
    for length in range(len(whole)):
        path.write_bytes(whole[:length])
        assert "SHA256SUMS" in checksums.damage(folder), f"{length} bytes"


def test_a_file_cut_short_anywhere_is_found(folder):
    path = folder / "inner" / "text"
    whole = path.read_bytes()
    for length in range(len(whole)):
        path.write_bytes(whole[:length])
        assert "inner/text" in checksums.damage(folder), f"{length} bytes"


@pytest.mark.parametrize("name", ["numbers", "inner/text", "inner/nothing", "SHA256SUMS"])
def test_a_missing_file_is_named(folder, name):
    (folder / name).unlink()
    assert name in checksums.damage(folder)


def test_a_file_too_many_is_named(folder):
    (folder / "inner" / "more").touch()
    assert checksums.damage(folder) == "'inner/more' is not what SHA256SUMS says"


def test_where_nothing_is_left_but_an_empty_list_nothing_is_whole(tmp_path):
    (tmp_path / "SHA256SUMS").touch()
    assert checksums.damage(tmp_path) == "SHA256SUMS is empty"


@pytest.mark.skipif(shutil.which("sha256sum") is None, reason="no command sha256sum here")
def test_the_command_sha256sum_reads_them(folder):
    check = ["sha256sum", "--check", "--strict", "--quiet", "SHA256SUMS"]
    assert subprocess.run(check, cwd=folder).returncode == 0
    (folder / "numbers").write_bytes(bytes(256))
    assert subprocess.run(check, cwd=folder, capture_output=True).returncode == 1
