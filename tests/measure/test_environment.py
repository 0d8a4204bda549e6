"""Laws of what is set before JAX starts, and of the memory that a CPU keeps."""

import os
import platform
import subprocess
import sys

import pytest


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="glibc alone returns memory")
@pytest.mark.parametrize("kept", [False, True])
def test_an_array_gets_the_pages_of_the_one_before_if_memory_is_kept(kept):
    program = f"""
import resource
import numpy as np
from course_lib.measure import environment
if {kept}:
    environment.keep_memory()
for _ in range(2):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    array = np.ones(2**23)
    print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
    del array
"""
    environment = {k: v for k, v in os.environ.items() if not k.startswith("MALLOC_")}
    output = subprocess.check_output(
        [sys.executable, "-c", program], text=True, env=environment
    )
    first, second = map(int, output.split())
    assert second < first / 10 if kept else second > first / 2
