"""Check on this machine that the optimisations are really on: `python test_gpu_optimization.py`.

The same as `myxtts check --gpus`: a short training shows what is on. Not a test of the suite, which is in tests/.
"""

import sys

from myxtts.cli import main

if __name__ == "__main__":
    sys.exit(main(["check", "--gpus", *sys.argv[1:]]))
