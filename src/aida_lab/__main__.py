"""``python -m aida_lab`` is the command ``aida``."""

from aida_lab.cli import main

if __name__ == "__main__":
    main()
