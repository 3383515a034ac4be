"""`python -m myxtts`: the command line."""

from myxtts.cli import main

if __name__ == "__main__":
    raise SystemExit(main())
