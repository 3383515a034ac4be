"""Measure text, audio and feed: `python utilities/analyze_data_pipeline_bottleneck.py [--config F]`; needs no GPU.

The same as `myxtts profile --data-only`.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # for a package that is not installed

from myxtts.cli import main

if __name__ == "__main__":
    sys.exit(main(["profile", "--data-only", *sys.argv[1:]]))
