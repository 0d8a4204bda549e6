"""Units of memory, as compilers and profilers count them: powers of two, where datasheets mean
powers of ten.
"""

MIB, GIB = 2**20, 2**30
