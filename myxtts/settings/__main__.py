"""`python -m myxtts.settings`: writes the generated files of the repository this package lies in."""

from pathlib import Path

from myxtts.settings.pages import write_pages

if __name__ == "__main__":
    write_pages(Path(__file__).resolve().parents[2])
