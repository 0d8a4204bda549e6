"""Ports at which processes of the tests meet."""

import itertools
import os
import socket

# Below those that Linux hands out itself, from 32768 on: no other process is given one between
# the asking and the use. Each of pytest's workers begins somewhere else, and comes to all
# 12,000.
_candidates = (20_000 + (97 * os.getpid() + number) % 12_000 for number in itertools.count())


def free_port():
    """Returns one at which nobody listens."""
    for port in _candidates:
        with socket.socket() as some:
            try:
                some.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port
