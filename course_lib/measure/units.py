"""Units of memory, as compilers and profilers count them: powers of two, where datasheets mean
powers of ten.
"""

MIB, GIB = 2**20, 2**30


def gib(bytes: int | float) -> str:
    """Returns bytes as text: `"14.23 GiB"`, or `"3.52 MiB"` below a hundredth of a GiB."""
    return f"{bytes / GIB:.2f} GiB" if abs(bytes) >= GIB / 100 else f"{bytes / MIB:.2f} MiB"
