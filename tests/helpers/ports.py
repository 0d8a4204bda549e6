"""Ports at which the processes of a test meet."""

import itertools
import os
import socket

# Linux itself hands out ports from 32768 on. Below, no other program gets a port between the
# check and its use. Each of pytest's workers starts at another port, and tries all 12,000.
_candidates = (20_000 + (97 * os.getpid() + number) % 12_000 for number in itertools.count())


def free_port():
    """Returns a port at which nobody listens."""
    for port in _candidates:
        with socket.socket() as listener:
            try:
                listener.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port
