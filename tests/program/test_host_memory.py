"""What must be true of memory that is kept from one step to the next."""

import platform
import subprocess
import sys

import pytest

from course_lib.program import host_memory

STEPS = """
import ctypes, resource, statistics, sys
# PR_SET_THP_DISABLE: pages of 4 KiB, whatever the system prefers
ctypes.CDLL(None).prctl(41, 1, 0, 0, 0)
import jax, jax.numpy as jnp
from course_lib.program import host_memory

if sys.argv[1] == "keep":
    assert host_memory.keep()
step = jax.jit(lambda x: ((x @ x.T) @ x).sum())  # x @ x.T takes 64 MiB
x = jnp.ones((4096, 4))
found = []
for _ in range(50):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    step(x).block_until_ready()
    found.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
# at JAX 0.7.2 up to ten steps find their old place taken by something small
print(int(statistics.median(found)))
"""


def pages(what: str) -> int:
    """Returns how many pages the system hands out during a step of a process, the median of
    fifty.
    """
    run = subprocess.run(
        [sys.executable, "-c", STEPS, what], capture_output=True, text=True, timeout=600
    )
    assert run.returncode == 0, run.stderr
    return int(run.stdout)


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc keeps memory")
def test_a_step_uses_the_pages_of_the_one_before_it_where_the_process_keeps_them():
    of_64_mib = 64 * 2**20 // 4096
    assert pages("keep") < of_64_mib / 10
    assert pages("return") >= of_64_mib  # else nothing is gained any more


def test_a_system_without_glibc_is_left_as_it_is(monkeypatch):
    monkeypatch.setattr(sys, "platform", "darwin")
    assert not host_memory.keep()
