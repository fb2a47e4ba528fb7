"""``python -m bandpo``: the `bandpo` command of this interpreter."""

from bandpo.cli import main

if __name__ == "__main__":
    main()
