"""Reading shards from an object store on this machine: a warm cache, a cold one, a slow link, and faults.

    python benchmarks/remote.py [--shards 16] [--mb 64] [--need 40]

A process of its own serves the shards over S3 at a given rate. Shards are packed stores of noise; a batch is 32
rows of 6 seconds in random order inside a window of two shards, and two windows are fetched ahead. The last cases
read at the pace of training, which needs so many MB/s; the share of waiting leaves out the first window, which is
a wait by definition.
"""

from __future__ import annotations

import argparse
import logging
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import xxhash
from harness import LiveTable, console, machine

sys.path.append(str(Path(__file__).parent.parent / "tests"))
from s3_fixtures import LoopbackStore, Throttle

from myxtts.data.locations import FileCache, Location, Wanted
from myxtts.data.store import Store, StoreWriter

ROW_SAMPLES, BATCH, WINDOW, AHEAD, PAIRS = 6 * 22050, 32, 2, 2, 25
FAULTS = ("503", "reset", "truncate")


def write_shards(folder: Path, count: int, num_bytes: int) -> list[Wanted]:
    """Write packed stores below `folder`, and return their data files as the server names them."""
    noise, wanted = np.random.default_rng(0), list[Wanted]()
    rows = num_bytes // (2 * ROW_SAMPLES)
    for number in range(count):
        writer = StoreWriter(folder / f"{number:03d}", np.arange(rows, dtype=np.uint64))
        for row in range(rows):
            writer.append([row], [noise.integers(-9999, 9999, ROW_SAMPLES, np.int16)])
        writer.finish({})
        content = writer.data_path.read_bytes()
        writer.data_path.write_bytes(content)  # in one piece as a cache writes it, which is faster to read
        location = Location.parse(f"s3://bucket/{number:03d}")
        wanted.append((location, len(content), xxhash.xxh3_128_hexdigest(content)))
    return wanted


def serve(folder: Path, mb_per_s: float, fault_share: float, corrupt: str) -> None:
    """Serve data files until the input ends; `corrupt` is damaged when it is read first."""
    store, draw, left = LoopbackStore(), random.Random(0), {f"bucket/{corrupt}"}

    def fault_of(key: str) -> str:
        if key in left:
            left.remove(key)
            return "corrupt"
        return draw.choice(FAULTS) if draw.random() < fault_share else ""

    store.objects = {f"bucket/{path.parent.name}": path.read_bytes() for path in folder.glob("*/data.bin")}
    store.fault_of, store.throttle = fault_of, Throttle(1e6 * mb_per_s) if mb_per_s else None
    os.write(1, f"{store.url}\n".encode())
    sys.stdin.read()


@contextmanager
def serving(folder: Path, mb_per_s: float = 0.0, fault_share: float = 0.0, corrupt: str = "") -> Iterator[None]:
    given = ["--serve", str(folder), str(mb_per_s), str(fault_share), corrupt]
    with subprocess.Popen(
        [sys.executable, __file__, *given], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as server:
        assert server.stdin and server.stdout
        from myxtts.data.locations import _client

        os.environ |= {"AWS_ENDPOINT_URL": server.stdout.readline().strip(), "AWS_REGION": "us-east-1"}
        os.environ |= {"AWS_ACCESS_KEY_ID": "key", "AWS_SECRET_ACCESS_KEY": "secret"}
        _client.cache_clear()
        yield
        server.stdin.close()


class Epoch:
    """One pass over all shards, window by window."""

    def __init__(self, folder: Path, wanted: list[Wanted], cache: FileCache | None) -> None:
        self.folder, self.wanted, self.cache = folder, wanted, cache
        self.first_s = self.steady_wait_s = self.seconds = 0.0
        self.num_bytes = 0
        if cache:
            self.linked = cache.folder.with_name(f"{cache.folder.name}-linked")
            for shard, (_, _, checksum) in enumerate(wanted):
                linked = self.linked / f"{shard:03d}"
                if not linked.exists():
                    linked.mkdir(parents=True)
                    for name in ("meta.json", "index.npy"):
                        (linked / name).symlink_to(folder / f"{shard:03d}" / name)
                    (linked / "data.bin").symlink_to(cache.folder / checksum)

    def run(self, need_mb_per_s: float = 0.0) -> float:
        """Return the MB/s read; with a need, no faster than that."""
        out, started = np.empty((BATCH, ROW_SAMPLES), np.int16), time.perf_counter()
        order = np.random.default_rng(1).permutation(len(self.wanted)).tolist()
        for first in range(0, len(order), WINDOW):
            began = time.perf_counter()
            stores = [self.open(shard) for shard in order[first : first + WINDOW]]
            waited = time.perf_counter() - began
            if self.cache:
                self.cache.fetch_ahead([self.wanted[shard] for shard in order[first + WINDOW :][: AHEAD * WINDOW]])
            if first:
                self.steady_wait_s += waited
            else:
                self.first_s, steady = waited, time.perf_counter()
            rows = np.concatenate([np.full(len(store), at) for at, store in enumerate(stores)])
            places = np.concatenate([np.arange(len(store)) for store in stores])
            mixed = np.random.default_rng(first).permutation(len(rows))
            for start in range(0, len(mixed), BATCH):
                due = time.perf_counter()
                chosen = mixed[start : start + BATCH]
                for slot, row in enumerate(chosen):
                    stores[rows[row]].gather(places[row : row + 1], out[slot : slot + 1])
                self.num_bytes += len(chosen) * ROW_SAMPLES * 2
                if need_mb_per_s:
                    pause_s = len(chosen) * ROW_SAMPLES * 2 / (1e6 * need_mb_per_s) + due - time.perf_counter()
                    time.sleep(max(pause_s, 0))
        ended = time.perf_counter()
        self.seconds = ended - steady
        return self.num_bytes / 1e6 / (ended - started)

    def open(self, shard: int) -> Store:
        """Open a shard; the data file of a remote one is in the cache, the rest is here."""
        if self.cache is None:
            return Store(self.folder / f"{shard:03d}", np.int16)
        self.cache.get(*self.wanted[shard])
        return Store(self.linked / f"{shard:03d}", np.int16)


def measure(shards: int, mb: int, need: float) -> None:
    table = LiveTable(
        f"{shards} shards of {mb} MB over loopback ({machine()})", "case", "MB/s", "of", "share", "hits", "waited",
        left=["case", "of"],
    )  # fmt: skip
    with tempfile.TemporaryDirectory() as name:
        root = Path(name)
        wanted = write_shards(root / "store", shards, mb << 20)
        total, room = sum(size for _, size, _ in wanted), (2 + AHEAD) * WINDOW * wanted[0][1]

        def add(case: str, rate: float, of: str, share: float, cache: FileCache | None = None) -> None:
            seen = (f"{cache.hits}/{cache.hits + cache.misses}", f"{cache.wait_s:.2f} s") if cache else ("", "")
            table.add(case, f"{rate:.0f}", of, f"{100 * share:.1f} %", *seen)

        with serving(root / "store", corrupt="001"), FileCache(root / "warm", 2 * total) as cache:
            rate = Epoch(root / "store", wanted, cache).run()
            add("cold, free link, one shard corrupt", rate, "", 1.0, cache)
            local, warm = [], []
            for _ in range(PAIRS):  # in turn, because the machine has other work too
                local.append(Epoch(root / "store", wanted, None).run())
                warm.append(Epoch(root / "store", wanted, cache).run())
            add("local", max(local), "", 1.0)
            add("warm cache", max(warm), f"local, best of {PAIRS}", max(warm) / max(local))
            medians = float(np.median(warm)), float(np.median(local))
            add("warm cache", medians[0], f"local, median of {PAIRS}", medians[0] / medians[1])
        for link in (need, 4 * need):
            with (
                serving(root / "store", link),
                FileCache(root / f"cold{link:.0f}", room) as cache,
            ):
                rate = Epoch(root / "store", wanted, cache).run()
                add("cold, read ahead", rate, f"a link of {link:.0f} MB/s", rate / link, cache)
        for link, faults in ((1.2 * need, 0.0), (1.2 * need, 0.02), (0.8 * need, 0.0)):
            with (
                serving(root / "store", link, faults),
                FileCache(root / f"{link}{faults}", room) as cache,
            ):
                epoch = Epoch(root / "store", wanted, cache)
                rate = epoch.run(need)
                case = f"idle at {need:.0f} MB/s" + (f", {100 * faults:.0f} % faults" if faults else "")
                add(case, rate, f"a link of {link:.0f} MB/s", epoch.steady_wait_s / epoch.seconds, cache)
    table.show()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shards", type=int, default=16)
    parser.add_argument("--mb", type=int, default=64, help="size of a shard")
    parser.add_argument("--need", type=float, default=40.0, help="MB/s that training reads")
    parser.add_argument("--serve", nargs=4, help=argparse.SUPPRESS)
    args = parser.parse_args()
    logging.basicConfig(format="%(levelname)s %(message)s")
    if args.serve:
        folder, rate, faults, corrupt = args.serve
        serve(Path(folder), float(rate), float(faults), corrupt)
    else:
        console.print("A warning about the damaged shard is expected.")
        measure(args.shards, args.mb, args.need)


if __name__ == "__main__":
    main()
