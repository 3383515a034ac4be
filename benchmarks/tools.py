"""The tools proved right on this machine: what they say is planted, predicted or timed, and measured again.

python benchmarks/tools.py planted [--case NAME]…    known bottlenecks: is each the first finding?
python benchmarks/tools.py tune [--config NAME]…     bad settings: does the predicted gain come in a training?
python benchmarks/tools.py overhead                  what tracing and sampling cost
python benchmarks/tools.py commands                  every command that users are promised, as written
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

import torch
from tools_commands import run_commands
from tools_overhead import overhead
from tools_planted import CASES, planted
from tools_tune import BAD, tuned, tuned_normal


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    commands = parser.add_subparsers(required=True, dest="command")
    command = commands.add_parser("planted")
    command.add_argument("--case", action="append", choices=list(CASES), help="may be given again [all]")
    command.add_argument("--size", default="tiny", choices=("tiny", "small"))
    command.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    command.add_argument("--compile", action="store_true", help="a minute for each case")
    command = commands.add_parser("tune")
    command.add_argument("--config", action="append", choices=list(BAD), help="may be given again [all]")
    command.add_argument("--size", default="tiny", choices=("tiny", "small"))
    command.add_argument("--normal", action="store_true", help="tuned `normal` against batches chosen by hand")
    command.add_argument("--minutes", type=float, default=4.0, help="with --normal, that tuning may take")
    command.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    command = commands.add_parser("overhead")
    command.add_argument("--size", default="normal", choices=("tiny", "small", "normal"))
    command.add_argument("--batch", type=int, default=64)
    command.add_argument("--seconds", type=float, default=30.0, help="of measuring, in turns")
    command.add_argument("--no-compile", action="store_true")
    command = commands.add_parser("commands")
    command.add_argument("--match", default="", help="only commands that hold this text")
    command.add_argument("--at-once", type=int, default=6, help="commands that run beside each other")
    command.add_argument("--keep", type=Path, help="file for all that they print")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="myxtts-tools-", ignore_cleanup_errors=True) as name:
        folder = Path(name)
        if options.command == "planted":
            on_gpu = options.device != "cpu"
            names = options.case or [name for name, case in CASES.items() if on_gpu or case.on_cpu]
            return int(not planted(folder, names, options.size, on_gpu, options.compile))
        if options.command == "tune" and options.normal:
            return int(not tuned_normal(folder, options.minutes))
        if options.command == "tune":
            names = options.config or list(BAD)
            return int(not tuned(folder, names, options.size, options.device != "cpu"))
        if options.command == "overhead":
            return int(not overhead(folder, options.size, options.batch, options.seconds, not options.no_compile))
        return int(not run_commands(folder, options.match, options.at_once, options.keep))


if __name__ == "__main__":
    sys.exit(main())
