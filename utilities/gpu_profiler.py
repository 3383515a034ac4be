"""List the kernels of a training step: `python utilities/gpu_profiler.py`.

The same as `myxtts profile --kernels`.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # for a package that is not installed

from myxtts.cli import main

if __name__ == "__main__":
    sys.exit(main(["profile", "--kernels", *sys.argv[1:]]))
