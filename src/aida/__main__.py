"""``python -m aida`` is the command ``aida``."""

from aida.cli import main

if __name__ == "__main__":
    main()
