"""``python -m rlvet``: the `rlvet` command of this interpreter."""

from rlvet.cli import main

if __name__ == "__main__":
    main()
