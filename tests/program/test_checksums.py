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
    assert checksums.damage(tmp_path) is None
    return tmp_path


@pytest.mark.parametrize("name", ["numbers", "inner/text", "SHA256SUMS"])
def test_a_flipped_bit_or_a_file_cut_short_is_detected_and_named(folder, name):
    """In the list, a flipped bit may change a file name, or join two lines."""
    path = folder / name
    original, draw = path.read_bytes(), random.Random(0)
    for bit in draw.sample(range(8 * len(original)), k=min(60, 8 * len(original))):
        flipped = bytearray(original)
        flipped[bit // 8] ^= 1 << bit % 8
        path.write_bytes(flipped)
        assert name in checksums.damage(folder), f"bit {bit}"
    for length in draw.sample(range(len(original)), k=min(20, len(original))):
        path.write_bytes(original[:length])
        assert name in checksums.damage(folder), f"{length} bytes"


@pytest.mark.parametrize("name", ["numbers", "inner/text", "inner/nothing", "SHA256SUMS"])
def test_a_missing_file_is_named(folder, name):
    (folder / name).unlink()
    assert name in checksums.damage(folder)


def test_an_added_file_is_named(folder):
    (folder / "inner" / "more").touch()
    assert checksums.damage(folder) == "'inner/more' is not what SHA256SUMS says"


def test_an_empty_list_alone_is_damage(tmp_path):
    (tmp_path / "SHA256SUMS").touch()
    assert checksums.damage(tmp_path) == "SHA256SUMS is empty"


@pytest.mark.skipif(shutil.which("sha256sum") is None, reason="no command sha256sum here")
def test_the_command_sha256sum_reads_the_list(folder):
    check = ["sha256sum", "--check", "--strict", "--quiet", "SHA256SUMS"]
    assert subprocess.run(check, cwd=folder).returncode == 0
    (folder / "numbers").write_bytes(bytes(256))
    assert subprocess.run(check, cwd=folder, capture_output=True).returncode == 1
