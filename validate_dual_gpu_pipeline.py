"""Test the GPUs and the pipeline: `python validate_dual_gpu_pipeline.py --data-gpu 0 --model-gpu 1`.

The same as `myxtts check --gpus`.
"""

import sys

from myxtts.cli import main

if __name__ == "__main__":
    sys.exit(main(["check", "--gpus", *sys.argv[1:]]))
