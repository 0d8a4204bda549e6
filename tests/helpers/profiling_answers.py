"""Right and wrong answers to the exercise on busy and idle time of notebook 06, for
`test_check`.
"""

import numpy as np

from course_lib.lessons import check

FUNCTIONS = [check.busy_and_idle]


def busy_and_idle(*, order=sorted, latest=max, begin=None, whole=None):
    """Busy and idle seconds, or with a mistake."""

    def answer(events):
        events = order(events)
        first = events[0][0] if begin is None else begin
        busy, reached = 0, first
        for start, duration in events:
            busy += max(0, start + duration - max(start, reached))
            reached = latest(reached, start + duration)
        return busy, (reached - first if whole is None else whole(events)) - busy

    return answer


def by_edges(events):
    """Counts how many events run between each two neighbouring starts or ends."""
    edges = sorted({t for start, duration in events for t in (start, start + duration)})
    busy = sum(
        later - earlier
        for earlier, later in zip(edges, edges[1:], strict=False)
        if any(start <= earlier < start + duration for start, duration in events)
    )
    return busy, edges[-1] - edges[0] - busy


def by_arrays(events):
    start, duration = np.array(sorted(events), np.float32).T
    reached = np.maximum.accumulate(start + duration)
    idle = np.maximum(0, start[1:] - reached[:-1]).sum()
    return [reached[-1] - start[0] - idle, idle]


def sums(events):
    busy = sum(duration for _, duration in events)
    first, last = (one(busy_end(events)) for one in (min, max))
    return busy, last - first - busy


def busy_end(events):
    return [time for start, duration in events for time in (start, start + duration)]


def of_neighbours(events):
    """Forgets that an event may end after those that start later."""
    events = sorted(events)
    ends = [start + duration for start, duration in events]
    idle = sum(max(0, later[0] - end) for end, later in zip(ends[:-1], events[1:], strict=True))
    return max(ends) - events[0][0] - idle, idle


def last_to_start(events):
    start, duration = max(events)
    return start + duration - min(events)[0]


def as_ends(events):
    return busy_and_idle()([(start, end - start) for start, end in events])


def swapped(events):
    return busy_and_idle()(events)[::-1]


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
    return busy_and_idle()(events)[0], max(gaps)


def rounds(events):
    busy, idle = busy_and_idle()(events)
    return round(busy), round(idle)


RIGHT = [
    (check.busy_and_idle, (by_edges,)),
    (check.busy_and_idle, (by_arrays,)),
    (check.busy_and_idle, (busy_and_idle(),)),
]
WRONG = [
    (check.busy_and_idle, (lambda events: (events[0][1], 0),), "first event alone"),
    (
        check.busy_and_idle,
        (lambda events: (busy_and_idle()(events)[0], 0),),
        "what the busy seconds leave",
    ),
    (check.busy_and_idle, (sums,), "from 2 to 3 twice"),
    (check.busy_and_idle, (busy_and_idle(order=list),), "in any order"),
    (
        check.busy_and_idle,
        (busy_and_idle(whole=lambda events: events[-1][0] - events[0][0]),),
        "not to the last start",
    ),
    (check.busy_and_idle, (busy_and_idle(latest=lambda reached, end: end),), "keep the latest"),
    (check.busy_and_idle, (of_neighbours,), "lies inside (0, 6)"),
    (check.busy_and_idle, (busy_and_idle(whole=last_to_start),), "the one that ends last"),
    (check.busy_and_idle, (busy_and_idle(begin=0),), "not at 0"),
    (check.busy_and_idle, (as_ends,), "not its end"),
    (check.busy_and_idle, (swapped,), "busy seconds first"),
    (check.busy_and_idle, (longest_gap,), "longest gap alone"),
    (
        check.busy_and_idle,
        (lambda events: (busy_and_idle()(events)[0], last_to_start(events)),),
        "whole time",
    ),
    (check.busy_and_idle, (without_the_last,), "The last event is missing"),
    (check.busy_and_idle, (rounds,), "A list of 60 events"),
    (check.busy_and_idle, (lambda events: sum(d for _, d in events),), "Return two numbers"),
]
