"""Stands in for a Python that Ray starts: `stand_in.py ADDRESS ARGUMENT...` asks for a fork, and ends as it does.

It loads nothing that takes time, bandpo included.
"""

import os
import sys
from multiprocessing.connection import Client
from multiprocessing.reduction import send_handle

with Client(sys.argv[1]) as rehearsal:
    rehearsal.send((sys.argv[2:], os.getcwd(), dict(os.environ)))
    for file in range(3):
        send_handle(rehearsal, file, None)
    status = rehearsal.recv()
sys.exit(status if status >= 0 else 128 - status)
