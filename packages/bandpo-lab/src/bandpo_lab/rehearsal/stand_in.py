"""The script that Ray starts in place of Python: `stand_in.py ADDRESS ARGUMENT...` requests a fork.

It exits with the status of the fork. It imports nothing that takes time, bandpo included.
"""

import os
import sys
from multiprocessing.connection import Client
from multiprocessing.reduction import send_handle

with Client(sys.argv[1]) as server:
    server.send((sys.argv[2:], os.getcwd(), dict(os.environ)))
    for descriptor in range(3):  # standard input, output and errors
        send_handle(server, descriptor, None)
    status = server.recv()
sys.exit(status if status >= 0 else 128 - status)
