"""Checks of notebook 01's exercises."""

import types

import jax
import jax.numpy as jnp
import numpy as np

from course_lib.lessons.check.answers import call, close, require, run, same_shapes
from course_lib.lessons.check.exercises import (
    Exercise,
    Function,
    Numbered,
    Numbers,
    Outcome,
    change,
    in_case,
)
from course_lib.one_device import mixed_precision

HALF = mixed_precision.describe("float16")


class Exponents(Numbered):
    """Two exponents of 2. Who gives the powers themselves means their exponents."""

    half = HALF
    are_powers = property(lambda it: it.highest > 100)
    note = property(lambda it: f" ({it.lowest:g} is 2^{it.low}.)" if it.are_powers else "")

    def exponent(self, number):
        if self.are_powers:
            number = float(np.log2(number)) if number > 0 else -np.inf
        return int(number) if np.isfinite(number) and number == int(number) else number

    low = property(lambda it: it.exponent(it.lowest))
    high = property(lambda it: it.exponent(it.highest))
    least = property(lambda it: min(it.low, it.high))

    @property
    def is_mixed(self):
        """Whether one number is an exponent, and the other a power."""
        return not isinstance(self.low, int) if self.are_powers else self.lowest > 40

    are_whole = property(
        lambda it: all(isinstance(n, int) and abs(n) < 1000 for n in (it.low, it.high))
    )
    largest = property(lambda it: 2 * 2.0**it.high)
    smallest = property(lambda it: 1e-9 * 2.0**it.low)


loss_scale_range = Numbers(
    "loss_scale_range",
    lambda: {"lowest": 6, "highest": 14},
    outcome=Exponents,
    rows={
        "lowest": {
            "mixed": (
                [{"lowest": 64, "highest": 14}, {"lowest": 6, "highest": 2**14}],
                lambda it: it.is_mixed,
            ),
            "negative": ({"lowest": -6, "highest": -14}, lambda it: it.least < 0),
            "not whole": (5.9, lambda it: not it.are_whole),
            "exchanged": ({"lowest": 14, "highest": 6}, lambda it: it.low > it.high),
        },
        "highest": {
            "infinite": (
                [15, {"lowest": 2**6, "highest": 2**15}],
                lambda it: it.largest > HALF.largest,
            ),
            "another fits": (13, lambda it: 2 * it.largest <= HALF.largest),
            "too small": (
                {"lowest": 5, "highest": 14},
                lambda it: it.smallest < HALF.smallest_subnormal,
            ),
            "another is enough": (
                {"lowest": 7, "highest": 14},
                lambda it: it.smallest / 2 >= HALF.smallest_subnormal,
            ),
        },
    },
)


def tiny_loss(params):
    """Returns 2^-25 w^2, whose gradient is zero in float16."""
    half = params["w"].astype(jnp.float16)
    product = (half * jnp.float16(2**-12)) * (half * jnp.float16(2**-13))
    return jnp.sum(product).astype(jnp.float32)


def one_entry(params):
    """Returns a loss with the gradient [1, nan]."""
    first, second = params["w"].astype(jnp.float16)
    return (first + jnp.sqrt(second - second)).astype(jnp.float32)


def one_array(params):
    """Returns a loss whose gradient is 1 for a and NaN for b."""
    a, b = params["a"].astype(jnp.float16), params["b"].astype(jnp.float16)
    return (a + jnp.sqrt(b - b)).sum().astype(jnp.float32)


def mean_loss(params):
    """Returns 2^-30 |w|^2, as a mean of many numbers: the mean is float32."""
    half = params["w"].astype(jnp.float16)
    return 2.0**-30 * jnp.sum(half.astype(jnp.float32) ** 2)


def losses():
    w, long = {"w": jnp.array([0.5, 0.25])}, {"w": jnp.array([0.503, 0.251])}
    two = {"a": jnp.ones(1), "b": jnp.ones(1)}
    scaled = [(tiny_loss, w, 2.0**14, 2.0**20), (tiny_loss, w, 2.0**40, 2.0**20)]
    not_a_number = [(one_entry, w, 2.0, 0.1), (one_array, two, 2.0, 0.1)]
    exchanged = (lambda p: one_array({"a": p["b"], "b": p["a"]})), two, 2.0, 0.1
    last = (mean_loss, w, 2.0**20, 2.0**28), exchanged, (tiny_loss, long, *scaled[0][2:])
    return [*scaled, *not_a_number, *last]


def step(loss, params, scale, rate):
    """A step of SGD with a loss scale."""
    grads = jax.grad(lambda params: scale * loss(params))(params)
    finite = jnp.array([jnp.isfinite(g).all() for g in jax.tree.leaves(grads)]).all()
    return jax.tree.map(
        lambda p, g: jnp.where(finite, p - rate * (g / scale), p), params, grads
    )


def in_half(params):
    return jax.tree.map(lambda p: p.astype(jnp.float16), params)


def capped(g):
    return jnp.nan_to_num(g, posinf=1e3, neginf=-1e3)


class Step(Outcome):
    """How far a step moves the parameters."""

    def is_close(self, other):
        return close(self.result, other, 1e-4 if self.case == 6 else 1e-3)

    dtype = property(lambda it: jnp.result_type(*jax.tree.leaves(it.result)))
    finite = property(lambda it: all(np.isfinite(x).all() for x in it.result.values()))
    stays = property(lambda it: close(it.result, it.params, 1e-6))

    def moves(self, times):
        """Whether the step is this multiple of the right one."""
        before = np.asarray(self.params["w"])
        return close(
            np.asarray(self.result["w"]) - before,
            times * (np.asarray(self.right["w"]) - before),
            1e-3,
        )


scaled_step = Function(
    "scaled_step",
    step,
    cases=losses,
    # a copy: the step may donate its parameters
    calls=lambda step, loss, w, *args: step(loss, jax.tree.map(jnp.copy, w), *args),
    name="the new parameters",
    outcome=Step,
    rows={
        "not finite": (
            change("))(params)", "))(in_half(params))"),
            in_case(0, lambda it: not it.finite),
        ),
        "too long": change("g / scale", "g"),
        "no rate": (change("rate * ", ""), in_case(0, lambda it: it.moves(2.0**-20))),
        "nothing moved": (
            [
                change("scale * loss", "loss", "g / scale", "g"),
                change("g / scale", "jnp.float32(jnp.float16(g) / jnp.float16(scale))"),
                lambda loss, params, scale, rate: params,
            ],
            in_case(0, lambda it: it.stays),
        ),
        "uphill": change("p - rate", "p + rate"),
        "another": (change("p - rate", "p - 2 * rate"), in_case(0)),
        "not skipped": (
            [change("where(finite", "where(True"), change("jnp.isfinite(g).all()", "g == g")],
            in_case(1, lambda it: not it.finite),
        ),
        "moved": (
            change("where(finite", "where(True", "(g / scale)", "capped(g / scale)"),
            in_case(1, lambda it: not it.stays),
        ),
        "one entry": (
            change("where(finite", "where(jnp.isfinite(g)"),
            in_case(2, lambda it: not it.stays),
        ),
        "one array": (
            [
                change("where(finite", "where(jnp.isfinite(g).all()"),
                change("leaves(grads)]).all()", "leaves(grads)])[-1]"),
                change("leaves(grads)]).all()", "leaves(grads)])[0]"),
            ],
            lambda it: it.case in (3, 5) and not it.stays,
        ),
        "scale in float16": (
            change("scale * loss", "jnp.float32(scale).astype(jnp.float16) * loss"),
            in_case(4, lambda it: it.stays or not it.finite),
        ),
        "rounded": (
            [
                change("(g / scale), p)", "(g / scale), p).astype(jnp.float16)"),
                lambda *args: jax.tree.map(jnp.float32, in_half(step(*args))),
            ],
            lambda it: it.dtype != jnp.float32 or (it.case == 6 and not it.is_right),
        ),
        "large scale": (change("/ scale", "/ min(scale, 2.0**19)"), in_case(4)),
    },
)


def numbers_to_round():
    """Returns keys and copies of a number, three numbers that need no rounding, and copies of a
    number that 16 random bits round up once in 1,024 times, and 8 never.
    """
    keys = jax.random.split(jax.random.key(0))
    low = jnp.full((64, 64), 1 + 2.0**-9, jnp.float32)
    high = jnp.full((32, 128), -3.003, jnp.float32)
    exact = jnp.array([1.0, 0.0, -0.5])
    cases = [(keys[0], low), (keys[0], high), (keys[1], low), (keys[1], exact)]
    return [*cases, (keys[0], jnp.full(2**15, 1 + 2.0**-17, jnp.float32))]


def rounded(key, x):
    """Rounds at random: adds random bits below those that stay, and cuts."""
    noise = jax.random.bits(key, x.shape, jnp.uint32) >> 16
    total = jax.lax.bitcast_convert_type(x, jnp.uint32) + noise
    cut = jax.lax.bitcast_convert_type(total & jnp.uint32(0xFFFF0000), jnp.float32)
    return cut.astype(jnp.bfloat16)


def by_division(key, x):
    """Rounds multiples of the gap between two neighbours. 0 has no exponent."""
    gap = jnp.exp2(jnp.floor(jnp.log2(jnp.abs(x))) - 7)
    return (jnp.floor(x / gap + jax.random.uniform(key, x.shape)) * gap).astype(jnp.bfloat16)


class Rounded(Outcome):
    """How copies of a number are rounded."""

    numbers = property(lambda it: np.asarray(it.result, np.float32))
    value = property(lambda it: float(np.ravel(it.x)[0]))
    dtype = property(lambda it: jnp.result_type(it.result))
    gap = property(lambda it: 2.0**-7 if it.value > 0 else 2.0**-6)
    off = property(lambda it: np.abs(it.numbers - it.value))
    mean = property(lambda it: it.numbers.mean())
    lines = property(lambda it: (it.numbers, it.numbers.T) if it.numbers.ndim > 1 else ())
    before = property(lambda it: it.exercise.outcome_of(it.function, 0).numbers)


stochastic_round = Function(
    "stochastic_round",
    rounded,
    cases=numbers_to_round,
    calls=lambda rounding, key, x: rounding(key, jnp.copy(x)),  # it may donate x
    name="the result",
    outcome=Rounded,
    rows={
        "dtype": (change("jnp.bfloat16", "jnp.float32"), lambda it: it.dtype != jnp.bfloat16),
        "too far": (
            [change(">> 16", ">> 15"), change(" >> 16", "")],
            lambda it: it.case < 2 and not it.off.max() < it.gap,  # NaN, too
        ),
        "all alike": (
            [
                change("x.shape", "()"),
                change(">> 16", ">> 24 << 8"),
                lambda key, x: x.astype(jnp.bfloat16),
            ],
            lambda it: it.case in (0, 1, 4) and len(np.unique(it.numbers)) != 2,
        ),
        "lines alike": (
            [change("x.shape", "x.shape[-1:]"), change("x.shape", "(*x.shape[:-1], 1)")],
            lambda it: any(len(np.unique(one, axis=0)) == 1 for one in it.lines),
        ),
        "mean": (
            change("+ noise", "+ (noise | 0x8000)"),
            lambda it: it.case < 2 and abs(it.mean - it.value) >= 0.05 * it.gap,
        ),
        "same bits": (
            change("(key, x.shape", "(jax.random.key(0), x.shape"),
            in_case(2, lambda it: np.array_equal(it.numbers, it.before)),
        ),
        "exact": (
            [
                lambda key, x: jnp.where(x == x.astype(jnp.bfloat16), 0, rounded(key, x)),
                by_division,
            ],
            in_case(3, lambda it: not np.array_equal(it.numbers, it.x)),
        ),
    },
)


def forward(x):
    return jnp.tanh(x), (1 / jnp.cosh(x) ** 2).astype(jnp.bfloat16)


def subtracts(x):
    """Loses float32's bits where the tanh is near 1."""
    t = jnp.tanh(x)
    return t, (1 - t**2).astype(jnp.bfloat16)


def backward(saved, g):
    return saved.astype(jnp.float32) * g


def of_tanh(t):
    return 1 - t.astype(jnp.float32) ** 2


class SmallTanh(Exercise):
    """The two halves of a tanh: what the forward pass saves, and the gradient."""

    def judge(self, your_forward, your_backward):
        x = 10 * jnp.linspace(-1, 1, 4096) ** 3
        g = jnp.where(jnp.arange(x.size) % 2, jnp.float32(-3), jnp.float32(2))
        pair = call(your_forward, jnp.copy(x), hint=self.first_hint)
        is_pair = isinstance(pair, tuple | list) and len(pair) == 2
        require(is_pair, self.sentences["no pair"])
        result, saved = pair
        same_shapes(result, x, "the result")
        require(close(result, jnp.tanh(x), 1e-6), self.sentences["another tanh"])
        it = types.SimpleNamespace(
            num_bytes=sum(jnp.asarray(one).nbytes for one in jax.tree.leaves(saved)) / x.size
        )
        require(it.num_bytes <= 2, self.say("bytes", it))
        run(your_forward, jnp.zeros_like(x))  # a backward pass knows only what is saved
        yours = run(your_backward, saved, jnp.copy(g))
        require(yours is not None, self.sentences["no gradient"])
        if isinstance(yours, tuple | list) and len(yours) == 1:  # as `jax.custom_vjp` asks for
            (yours,) = yours
        same_shapes(yours, x, "the gradient")
        derivative = 1 / jnp.cosh(x) ** 2
        require(not close(yours, derivative, 0.01), self.sentences["no chain rule"])
        ratio = np.asarray(yours / (derivative * g))
        off = np.abs(ratio - 1)
        central = np.flatnonzero(np.abs(np.asarray(x)) < 4)
        typical, worst = central[np.argsort(off[central])[central.size // 2]], off.argmax()
        it.x, it.ratio = x[typical], ratio[typical]
        require(off[typical] < 0.1, self.say("another", it))
        it.near_zero = off[np.abs(np.asarray(x)) < 0.5].max()
        require(it.near_zero < 0.005, self.say("near zero", it))
        it.x, it.ratio, it.worst, it.slope = (a[worst] for a in (x, ratio, off, derivative))
        require(it.worst < 0.005 or it.worst > 0.02, self.say("rounded first", it))
        require(it.worst < 0.005 or it.slope < 0.01, self.say("another", it))
        require(it.worst < 0.005, self.say("far from zero", it))
        return self.say("done", it)

    def right_answers(self):
        return [(forward, backward)]

    def examples(self):
        def halves(*texts, backward=backward):
            return change(*texts).of(subtracts), backward

        last: list[jax.Array] = []  # in place of what is saved

        def remembers(x):
            last[:] = [x]
            return jnp.tanh(x), ()

        yield "no pair", halves("return t,", "return")
        yield "another tanh", halves("tanh(x)", "tanh(2 * x)")
        yield "bytes", halves("bfloat16", "float32")
        yield "no gradient", (forward, lambda saved, g: None)
        yield "no chain rule", (forward, lambda saved, g: saved.astype(jnp.float32))
        yield "another", (forward, lambda saved, g: of_tanh(saved) * g)
        yield "another", (remembers, lambda saved, g: of_tanh(jnp.tanh(last[0])) * g)
        yield (
            "near zero",
            (forward, lambda saved, g: jnp.float32(saved * g.astype(saved.dtype))),
        )
        yield (
            "another",
            (forward, lambda s, g: backward(s, g) * jnp.where((s > 0.1) & (s < 0.2), 1.1, 1)),
        )
        yield "far from zero", (subtracts, backward)
        for row, saves, derivative in (
            ("rounded first", "jnp.bfloat16(1 / jnp.cosh(x))", jnp.square),
            ("rounded first", "jnp.float16(-2 * jnp.log(jnp.cosh(x)))", jnp.exp),
            ("far from zero", "jnp.bfloat16(t)", of_tanh),
            ("far from zero", "jnp.bfloat16(x)", lambda x: of_tanh(jnp.tanh(x))),
            ("far from zero", "1 - jnp.bfloat16(t) ** 2", jnp.float32),
        ):

            def back(saved, g, derivative=derivative):
                return derivative(saved.astype(jnp.float32)) * g

            yield row, halves("(1 - t**2).astype(jnp.bfloat16)", saves, backward=back)


small_tanh = SmallTanh("small_tanh")
