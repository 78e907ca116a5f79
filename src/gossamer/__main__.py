"""``python -m gossamer``: the command line, for launchers that start modules, as ``torchrun -m gossamer plan mine.py``."""

from gossamer.cli import main

if __name__ == "__main__":
    main()
