"""``python -m commhooks``."""

from commhooks.cli import main

if __name__ == "__main__":
    main()
