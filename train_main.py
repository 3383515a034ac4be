"""Train a model: `python train_main.py --train-data DIR`. The same as `myxtts train`."""

import sys

from myxtts.cli import main

if __name__ == "__main__":
    sys.exit(main(["train", *sys.argv[1:]]))
