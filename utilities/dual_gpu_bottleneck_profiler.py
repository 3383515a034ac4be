"""Find the bottleneck of the pipeline: `python utilities/dual_gpu_bottleneck_profiler.py --num-steps 100`.

The same as `myxtts profile`.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # for a package that is not installed

from myxtts.cli import main

if __name__ == "__main__":
    sys.exit(main(["profile", *sys.argv[1:]]))
