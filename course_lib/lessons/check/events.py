"""The check of notebook 06's exercise on busy and idle time."""

import functools

import numpy as np

from course_lib.lessons.check.exercises import Function, Outcome, change, in_case


def seconds_of(events):
    """Returns how long at least one event runs, and the rest up to the last end."""
    events = sorted(events)
    begin = events[0][0]
    busy, reached = 0, begin
    for start, duration in events:
        end = start + duration
        busy += max(0, end - max(start, reached))
        reached = max(reached, end)
    return busy, reached - begin - busy


def many_events():
    random = np.random.default_rng(0)  # in sixteenths: some events touch, or start as one
    times = np.stack([random.integers(0, 500, 60), random.integers(1, 16, 60)], axis=1) / 16
    return list(map(tuple, times.tolist()))


def lists_of_events():
    """Returns lists, each with one difficulty more than those before it."""
    return [
        ([(0, 2), (3, 4), (8, 9)],),
        ([(0, 3), (2, 3), (6, 1)],),
        ([(0, 6), (1, 1), (3, 1), (8, 4), (9, 1)],),
        ([(5, 2), (8, 1)],),
        ([(7, 1), (0, 2), (4, 1), (1, 2)],),
        ([(0, 0.5), (0.25, 0.5)],),
        (many_events(),),
    ]


class Times(Outcome):
    """Busy and idle seconds."""

    @functools.cached_property
    def seconds(self):
        try:
            busy, idle = self.result
            is_text = isinstance(busy, str) or isinstance(idle, str)
            return None if is_text else (float(busy), float(idle))
        except (TypeError, ValueError):
            return None

    busy = property(lambda it: it.seconds[0])
    idle = property(lambda it: it.seconds[1])
    is_right = property(lambda it: np.allclose(it.seconds, it.right, atol=1e-4))

    @property
    def words(self):
        count = len(self.events)
        what = self.events if count < 9 else f"A list of {count} events"
        return (
            f"{what}: you say {self.busy:g} s busy and {self.idle:g} s idle; it is"
            f" {self.right[0]:g} s busy and {self.right[1]:g} s idle."
        )

    in_all = property(lambda it: sum(duration for _, duration in many_events()))
    many = property(lambda it: seconds_of(many_events()))


def without_the_last(events):
    """Adds up merged events as they end, and forgets the one that is open at the end."""
    busy, (begin, end) = 0, min(events)
    end = begin + end
    for start, duration in sorted(events):
        if start > end:
            busy, begin = busy + end - begin, start
        end = max(end, start + duration)
    return busy, end - min(events)[0] - busy


def longest_gap(events):
    events = sorted(events)
    gaps = [b[0] - a[0] - a[1] for a, b in zip(events[:-1], events[1:], strict=True)]
    return seconds_of(events)[0], max(gaps)


busy_and_idle = Function(
    "busy_and_idle",
    seconds_of,
    cases=lists_of_events,
    calls=lambda function, events: function(list(events)),
    outcome=Times,
    rows={
        "no pair": (lambda events: sum(d for _, d in events), lambda it: it.seconds is None),
        "unit": (
            change("return busy, reached - begin - busy", "return busy * 1000, 7"),
            lambda it: it.busy > 0 and np.isclose(it.busy, 1000 * it.right[0]),
        ),
        "shares": (
            change("return busy, reached - begin - busy", "return 15 / 17, 2 / 17"),
            in_case(0, lambda it: np.allclose(it.seconds, np.divide(it.right, sum(it.right)))),
        ),
        "swapped": change("busy, reached - begin - busy", "reached - begin - busy, busy"),
        "as ends": (
            lambda events: seconds_of([(start, end - start) for start, end in events]),
            in_case(0, lambda it: it.busy == 4),
        ),
        "without the last": (without_the_last, in_case(0, lambda it: it.busy == 6)),
        "the first": (lambda events: (events[0][1], 0), in_case(0, lambda it: it.busy == 2)),
        "to the last start": [
            change("reached - begin - busy", "0"),
            change("reached - begin - busy", "events[-1][0] - begin - busy"),
            change("reached - begin - busy", "busy"),
        ],
        "whole time": change("reached - begin - busy", "reached - begin"),
        "longest gap": longest_gap,
        "another": (lambda events: (events[0][1] + 3, 0), in_case(0)),
        "twice": (
            change("max(0, end - max(start, reached))", "duration"),
            in_case(1, lambda it: it.busy == 7),
        ),
        "overlap": (
            change("max(0, end - max(start, reached))", "duration * (start >= reached)"),
            in_case(1),
        ),
        "last to start": (
            change("reached - begin - busy", "sum(events[-1]) - begin - busy"),
            in_case(2, lambda it: it.seconds == (10, 0)),
        ),
        "inside": (change("max(reached, end)", "end"), in_case(2)),
        "before the first": (change("events[0][0]", "0"), in_case(3, lambda it: it.idle == 6)),
        "later start": (change("events[0][0]", "events[0][0] and 4"), in_case(3)),
        "any order": (change("sorted(events)", "list(events)"), in_case(4)),
        "fractions": (
            [change("return busy", f"return round(busy, {n})") for n in (0, 1)],
            in_case(5),
        ),
        "many": (change("sorted(events)", "sorted(dict(events).items())"), in_case(6)),
    },
)
