"""The memory of the host, kept by the process from one step to the next.

On a CPU, XLA takes the temporary memory of a step from the C library when the step begins, and
gives it back at its end. glibc returns blocks of more than 32 MiB to the system at once, and
the system hands out every page anew, filled with zeros, when it is first touched: in each step,
for each 4 KiB that the step uses. That was a sixth of the time of a step that takes 500 MB
(`benchmarks/torch_step.py`).
"""

import ctypes
import sys

# M_TRIM_THRESHOLD: none; M_MMAP_MAX: 0; M_ARENA_MAX: 1, one heap for all threads.
_KEEPING = {-1: -1, -4: 0, -8: 1}


def keep() -> bool:
    """Makes this process keep what it frees, and use it again; it stays as large as it ever
    was.

    Called before JAX starts its threads, it counts for all of them. Only glibc offers this:
    https://man7.org/linux/man-pages/man3/mallopt.3.html

    Returns:
      Whether the C library does so.
    """
    if not sys.platform.startswith("linux"):
        return False
    # Another C library, as musl, has none.
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    return mallopt is not None and all(mallopt(*option) == 1 for option in _KEEPING.items())
