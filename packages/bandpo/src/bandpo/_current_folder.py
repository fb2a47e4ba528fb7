"""Checks the current folder, and removes it from the path of imports if this process is ``python -m bandpo``.

The package imports this module before any other, because

- torch cannot be loaded in a folder that was deleted, and ends the process with an error that does not say so;
- ``python -m`` puts the current folder first on ``sys.path``, and imports the package before its ``__main__``. The
  folder may be that of a downloaded run, whose modules must not shadow installed packages.
"""

import os
import sys

DELETED = "the current folder was deleted; change to one that is there"

# While python -m imports a package to find its __main__, the first argument is "-m".
_program = os.path.basename(sys.argv[0]) if sys.argv else ""
try:
    _current_folder = os.getcwd()
except FileNotFoundError as error:
    if _program in ("-m", "bandpo", "bandpo.exe"):
        print(f"error: {DELETED}", file=sys.stderr)
        sys.exit(2)
    raise FileNotFoundError(DELETED) from error
if _program == "-m" and not sys.flags.safe_path and sys.path[:1] == [_current_folder]:
    del sys.path[0]
