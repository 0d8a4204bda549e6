"""Techniques that make a step smaller or faster, without changing what it computes."""
