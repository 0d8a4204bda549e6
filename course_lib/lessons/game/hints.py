"""Hints for the next move: what the compiled step shows, and where to read, never the move."""

from course_lib import measure
from course_lib.lessons.game import model, score
from course_lib.lessons.game.score import Program, Score
from course_lib.lessons.game.setups import Setup


def hint(submission: Score, program: Program, earlier: list[Score]) -> str:
    """Returns a sentence on what to look at next, after `earlier` ones for the same GPU."""
    sizes = model.REAL
    total = program.flops.total
    array = program.largest
    dims = array.shape if array else ()
    largest = f"The largest temporary at the peak is {_spell(array)}" if array else ""
    whole_batch = {sizes.batch_size * n for n in (1, sizes.length, sizes.heads)}
    so_far = [*earlier, submission]
    state = score.state_bytes()
    small, fast = (any(getattr(one, goal) for one in so_far) for goal in ("small", "fast"))
    part_three = (small and fast) or bool(score.open_levels(so_far))

    if 2 * sum(n for dtype, n in total.items() if "float32" in dtype) > sum(total.values()):
        return (
            "Most products take float32 numbers. How many bytes does a product need per"
            " number, and which dtype do the matrix units multiply fastest? (Notebook 1.)"
        )
    if dims[:1] == (sizes.layers,) and not program.flops.recomputed and not part_three:
        if small:
            return (
                f"{largest}: a scan stacks what its layers save. What would the compiler save"
                " if it saw all layers at once? (Notebook 6.)"
            )
        return (
            f"{largest}: {sizes.layers} layers save one slice each. Which of them must wait for"
            " the backward pass? (Notebook 2.)"
        )
    if dims[:1] == (sizes.layers,) and len(dims) > 4 and not small:
        return (
            f"{largest}: {sizes.layers} layers save one slice each, though the step recomputes."
            " Is `jax.checkpoint` around each whole layer, inside the scan? (Notebook 2.)"
        )
    if not small and whole_batch & set(dims):
        return f"{largest}: it belongs to the whole batch at once. (Notebook 3.)"
    if not small and program.aliased < 0.9 * state:
        return (
            f"The state is {measure.gib(state)}, of which"
            f" {measure.gib(program.aliased)} are overwritten by the new one; the rest exists"
            " twice. (Notebook 4.)"
        )
    if not small and sizes.vocabulary in dims:
        return (
            f"{largest}: one number per token and word of the vocabulary. The loss is a mean"
            " over tokens. (Notebook 5.)"
        )
    if not small:
        return f"{largest}. Is there a way to hold a smaller piece of it at a time?"
    if not part_three:
        return _slow(submission, program)
    level = score.next_level(so_far)
    if level is None:
        return "The last target is reached. For another GPU's, submit(make_step, gpu='t4')."
    reached = "The first two targets are reached. " if small and fast else ""
    for one in score.open_levels(so_far):
        if one.is_reached(submission) and not score.is_reached(one, earlier):
            reached = f"Target {one.notebook} is reached. "
    optimizer = f" with {level.optimizer}" if level.optimizer else ""
    return (
        f"{reached}Target {level.notebook} asks for two things at once{optimizer}:"
        f" {measure.gib(level.peak)} and {1e3 * level.seconds(submission.gpu):.0f} ms."
        f" {_where_to_look(level.notebook, largest, submission, program)}"
        f" (Notebook {level.notebook}.)"
    )


def _where_to_look(notebook: int, largest: str, submission: Score, program: Program) -> str:
    """Returns what to look at for the level of a notebook of Part III."""
    if notebook == 15:
        return (
            "If the small step has more FLOPs than the first one, it computes blocks or logits"
            " twice. Does the gradient of the logits have to wait for the backward pass?"
        )
    if notebook == 16:
        moved = _moved(program, 3)
        return f"{largest}. The bytes are moved by {moved}. Which arrays grow with L squared?"
    if notebook == 19:
        return (
            f"{largest}. With minibatches, all gradients of one stand beside the sum of those"
            " before it. Which of them does the backward pass of one layer make?"
        )
    if submission.moments == "host":
        return f"{largest}. Which part of the moments does the GPU need at one time?"
    state = score.state_bytes(Setup(submission.optimizer))
    share = f"Parameters and optimizer state take {measure.gib(state)} of the peak."
    if notebook == 17:
        return f"{share} How many bits does each of these numbers need between two steps?"
    return f"{share} For how much of the step does the GPU need each of them?"


def _slow(submission: Score, program: Program) -> str:
    """Returns where the time of a step comes from, and the memory that is free."""
    free = measure.gib(max(score.limit(submission.gpu) - submission.peak, 0))
    return (
        f"Small enough; now fast. {free} are free, {submission.extra_flops:.0%} of the FLOPs"
        f" are extra, and the bytes are moved by {_moved(program, 4)}. Which of your savings"
        " costs time, and is not needed to fit? (Notebook 6.)"
    )


def _moved(program: Program, most: int) -> str:
    kinds = list(program.traffic.by_kind().items())[:most]
    return ", ".join(f"{kind} {n / program.traffic.bytes:.0%}" for kind, n in kinds)


def _spell(array: measure.LiveArray) -> str:
    shape = " ".join(map(str, array.shape))
    parts = [part for part in ("attention", "mlp", "loss", "embed") if part in array.scope]
    of = f", of the part `{parts[0]}`" if parts else ""
    return f"{array.dtype} [{shape}], {measure.gib(array.bytes)}{of}"
