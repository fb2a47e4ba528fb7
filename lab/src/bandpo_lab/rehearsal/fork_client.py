"""Asks the fork server for a Python, and stands in for it: `fork_client.py ADDRESS ARGUMENT...`.

It loads nothing that takes time, bandpo included.
"""

import json
import os
import socket
import sys

PYTHON = "BANDPO_REHEARSAL_PYTHON"
"""Environment variable with the script that takes the place of `sys.executable` in forks."""


def request(
    address: str, arguments: list[str], env: dict[str, str], cwd: str, files: tuple[int, int, int] = (0, 1, 2)
) -> socket.socket:
    """Sends one request; the process id comes back on the first line, and its exit status on the second."""
    connection = socket.socket(socket.AF_UNIX)
    connection.connect(address)
    message = json.dumps([arguments, cwd, env]).encode() + b"\n"
    socket.send_fds(connection, [message[:1]], files)
    connection.sendall(message[1:])
    return connection


def receive(connection: socket.socket) -> tuple[list[str], str, dict[str, str], list[int]]:
    """The other side of `request`: arguments, working folder, environment, and the three standard files.

    Raises:
        EOFError: The client ended in the middle.
    """
    part, files, _, _ = socket.recv_fds(connection, 1, 3)
    message = part
    while not message.endswith(b"\n"):
        if not part:
            for file in files:
                os.close(file)
            raise EOFError
        part = connection.recv(1 << 16)
        message += part
    arguments, cwd, env = json.loads(message)
    return arguments, cwd, env, files


if __name__ == "__main__":
    with request(sys.argv[1], sys.argv[2:], dict(os.environ), os.getcwd()) as connection:
        pid, status = (int(line) for line in connection.makefile())
    sys.exit(status if status >= 0 else 128 - status)
