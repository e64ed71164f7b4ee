"""`python -m cachekit`."""

from cachekit.cli import main

if __name__ == "__main__":
    main()
