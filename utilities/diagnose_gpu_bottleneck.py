"""Find out why a GPU idles or oscillates: `python utilities/diagnose_gpu_bottleneck.py --num-batches 50`.

The same as `myxtts profile`.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # for a package that is not installed

from myxtts.cli import main

if __name__ == "__main__":
    sys.exit(main(["profile", *sys.argv[1:]]))
