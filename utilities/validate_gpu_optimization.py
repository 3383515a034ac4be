"""Check the settings against this machine: `python utilities/validate_gpu_optimization.py [--config F]`.

The same as `myxtts check`.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # for a package that is not installed

from myxtts.cli import main

if __name__ == "__main__":
    sys.exit(main(["check", *sys.argv[1:]]))
