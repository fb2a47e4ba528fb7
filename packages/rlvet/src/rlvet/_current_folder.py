"""Removes the current folder from the path of imports if this process is ``python -m rlvet``.

``python -m`` puts the current folder first on ``sys.path``, and imports the package before its ``__main__``. The folder
may be that of a downloaded run, whose modules must not shadow installed packages. So the package imports this module
before any other.
"""

import os
import sys

# While python -m imports a package to find its __main__, the first argument is "-m".
if sys.argv[:1] == ["-m"] and not sys.flags.safe_path:
    try:
        current_folder = os.getcwd()
    except FileNotFoundError:
        print("error: the current folder was deleted; change to one that is there", file=sys.stderr)
        sys.exit(2)
    if sys.path[:1] == [current_folder]:
        del sys.path[0]
