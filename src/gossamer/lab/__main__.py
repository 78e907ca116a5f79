"""Lab module: `python -m gossamer.lab`."""

from gossamer.lab.command import main

if __name__ == "__main__":
    main()
