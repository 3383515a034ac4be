"""Find and mend what makes the settings slow on this machine: `python quick_gpu_fix.py [--apply]`.

The same as `myxtts tune`.
"""

import sys

from myxtts.cli import main

if __name__ == "__main__":
    sys.exit(main(["tune", *sys.argv[1:]]))
