"""``python -m rlvet``: the `rlvet` command of this interpreter."""

import os
import sys

# ``python -m`` puts the current folder first on sys.path. It may be the folder of a downloaded run, whose modules must
# not shadow installed packages.
try:
    current_folder = os.getcwd()
except FileNotFoundError:
    print("error: the current folder was deleted; change to one that is there", file=sys.stderr)
    sys.exit(2)
if not sys.flags.safe_path and sys.path[:1] == [current_folder]:
    del sys.path[0]

from rlvet.cli import main

if __name__ == "__main__":
    main()
