def changes(step: Step, found: Mapping[str, Any], make: Any) -> Iterator[tuple[str, Any]]:
    """Yields what to try next: in words, and a function that returns the changed step, or the
    reason why it cannot be tried from outside.
    """
    switches = inspect.signature(make).parameters if make else {}
    missed = found["donation"]
    if missed["missed_bytes"] > found["peak_bytes"] / 100:
        numbers = tuple(missed["missed_argnums"])
        what = f"donate {', '.join(missed['missed'])}: donate_argnums={numbers} (notebook 4)"
        both = tuple(sorted(step.donated + numbers))
        yield what, lambda: dataclasses.replace(step, donated=both)
    flops = found["flops"] or {}
    if 2 * flops.get("float32", 0) > sum(flops.values()):
        if "dtype" in switches:
            yield (
                "make_step(dtype=jnp.bfloat16) (notebook 1)",
                lambda: read(_made(make, dtype=jnp.bfloat16)),
            )
        else:
            yield (
                "all float32 arguments in bfloat16, also weights and moments, which should stay"
                " float32 (notebook 1)",
                lambda: _reshaped(step, lambda leaf: (leaf.shape, _half_dtype(leaf))),
            )
    if "remat" in switches:
        yield "make_step(remat=True) (notebook 2)", lambda: read(_made(make, remat=True))
    else:
        yield (
            "recompute in the backward pass (jax.checkpoint, notebook 2)",
            "give make_step a parameter remat=False, and it is tried",
        )
    numbers, size = _batch(step)
    if size:
        names = ", ".join(step.names[n] for n in numbers)
        yield (
            f"half the batch ({names}, {size // 2} in place of {size}): gradient accumulation has"
            " this peak, and one sum of gradients (notebook 3)",
            lambda: _reshaped(
                step, lambda leaf: ((size // 2, *leaf.shape[1:]), leaf.dtype), numbers
            ),
        )
    else:
        yield (
            "half the batch (notebook 3)",
            "no argument is seen to be the batch, arrays with one even first dimension",
        )


def _half_dtype(leaf: Any) -> Any:
    return jnp.bfloat16 if leaf.dtype == jnp.float32 else leaf.dtype


def _batch(step: Step) -> tuple[list[int], int]:
    """Returns the numbers of the arguments that are the batch, and its even size, or 0."""
    numbers, size = [], 0
    state = _reusable(step)
    for number in reversed(range(len(step.names))):
        leaves = jax.tree.leaves(step.arguments[number])
        leaves = [leaf for leaf in leaves if leaf.shape and _kind(leaf) != ((2,), "uint32")]
        sizes = {leaf.shape[0] for leaf in leaves}
        if number not in state and len(sizes) == 1 and (not numbers or sizes == {size}):
            numbers, [size] = [number, *numbers], sizes
    return numbers, size if size % 2 == 0 else 0


def _reshaped(step: Step, change: Callable[[Any], tuple], numbers: Any = None) -> Step:
    """Returns a step whose arguments (all, or those of some numbers) have other shapes and
    dtypes, divided as before.
    """

    def shape(leaf: Any) -> jax.ShapeDtypeStruct:
        if jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key) or not leaf.shape:
            return leaf
        sharding = getattr(leaf, "sharding", None)
        sharding = sharding if isinstance(sharding, NamedSharding) else None
        return jax.ShapeDtypeStruct(*change(leaf), sharding=sharding)

    arguments = tuple(
        jax.tree.map(shape, arg) if numbers is None or n in numbers else arg
        for n, arg in enumerate(step.arguments)
    )
    return _traced(dataclasses.replace(step, arguments=arguments))


