"""Less work for functions inside of others, which jaxtyping decorates each time the outer one
is called: it compiles the same checks again, 2 ms.
"""

import functools

from jaxtyping import _decorator


def remembered(function):
    """Returns a function that computes a result once, unless an argument has no hash. A module
    stands for its dict.
    """
    results = {}

    @functools.wraps(function)
    def call(*args, **options):
        key = *args, *options.items()
        try:
            key = tuple(one["__name__"] if isinstance(one, dict) else one for one in key)
            found = results.get(key)
        except (KeyError, TypeError):
            return function(*args, **options)
        if found is None:
            found = results[key] = function(*args, **options)
        return found

    return call


def install():
    """Lets jaxtyping remember what follows from names and annotations alone."""
    for name in ("_destring_annotation", "_make_fn_with_signature", "_apply_typechecker"):
        if hasattr(_decorator, name):  # in this version
            setattr(_decorator, name, remembered(getattr(_decorator, name)))
