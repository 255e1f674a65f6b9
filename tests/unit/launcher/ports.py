"""Ports for nodes that are started by hand."""

import socket


def free_pair() -> int:
    """A port that is free, and the next one too."""
    while True:
        with socket.create_server(("", 0)) as first:
            port = int(first.getsockname()[1])
            try:
                socket.create_server(("", port + 1)).close()
            except (OSError, OverflowError):
                continue
            return port
