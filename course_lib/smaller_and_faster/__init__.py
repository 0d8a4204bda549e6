"""Techniques that make a step smaller or faster. All but those of `optimizer_memory` leave what
it computes as it is.
"""
