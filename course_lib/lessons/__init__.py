"""For the course alone: the case study, checks of exercises, and faults of many-device code.
Nothing in the library imports this package.
"""
