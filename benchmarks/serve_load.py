"""Load on a server of this machine: time to the first sound, throughput, and streams that play without a gap.

    myxtts serve --port 8020 --rate 100000 --per-client 256
    python benchmarks/serve_load.py --port 8020 --clients 1 2 4 8 --requests 3 --seconds 60

Each client sends its requests one after the other and reads PCM as it arrives. A stream has a gap if a listener
who started at the first sound would have had to wait. Bounded in number and time; connects to 127.0.0.1 only.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import time
from dataclasses import dataclass

import numpy as np
from harness import console, machine, make_table

HOST, BYTES_PER_SECOND = "127.0.0.1", 48_000
MOST_CLIENTS, MOST_REQUESTS = 1024, 1000
SENTENCES = (
    "The harbour was quiet that morning and only two boats had gone out.",
    "She opened the old window and listened to the bells of the valley.",
    "My brother wrote every letter twice and kept the second one himself.",
    "They carried the piano up four flights of stairs without a word.",
)


@dataclass(frozen=True)
class Heard:
    """One answer."""

    status: int
    first_s: float = 0.0  # until the first sound
    audio_s: float = 0.0
    gap_s: float = 0.0  # the longest wait of a listener


async def ask(port: int, text: str, seed: int) -> Heard:
    """Send one request and listen to the end."""
    began_at = time.perf_counter()
    reader, writer = await asyncio.open_connection(HOST, port)
    try:
        asked = {"input": text, "language": "en", "response_format": "pcm", "seed": seed, "stream": True}
        body, key = json.dumps(asked).encode(), os.environ.get("MYXTTS_API_KEY", "")
        head = f"POST /v1/audio/speech HTTP/1.1\r\nHost: {HOST}\r\nAuthorization: Bearer {key}\r\n"
        writer.write(f"{head}Connection: close\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body)
        answer = await reader.readuntil(b"\r\n\r\n")
        status = int(answer.split()[1])
        if status != 200:
            return Heard(status)
        first_at, num_bytes, gap_s = 0.0, 0, 0.0
        while size := int(await reader.readline(), 16):
            await reader.readexactly(size + 2)
            now = time.perf_counter()
            first_at = first_at or now
            gap_s = max(gap_s, now - first_at - num_bytes / BYTES_PER_SECOND)
            num_bytes += size
        return Heard(status, first_at - began_at, num_bytes / BYTES_PER_SECOND, gap_s)
    finally:
        writer.close()


async def load(port: int, clients: int, requests: int, seconds: float) -> tuple[list[Heard], float]:
    """All answers and the time they took; after `seconds` no new request is sent."""
    began_at, heard = time.perf_counter(), list[Heard]()

    async def client(number: int) -> None:
        for request in range(requests):
            if time.perf_counter() - began_at > seconds:
                return
            seed = number * requests + request
            heard.append(await ask(port, SENTENCES[seed % len(SENTENCES)], seed))

    await asyncio.gather(*(client(number) for number in range(clients)))
    return heard, time.perf_counter() - began_at


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--port", type=int, default=8020)
    parser.add_argument("--clients", type=int, nargs="+", default=[1, 2, 4, 8])
    parser.add_argument("--requests", type=int, default=3, help="of each client")
    parser.add_argument("--seconds", type=float, default=60.0, help="after which no new request is sent")
    options = parser.parse_args()
    if max(options.clients) > MOST_CLIENTS or not 0 < options.requests <= MOST_REQUESTS:
        parser.error(f"at most {MOST_CLIENTS} clients and {MOST_REQUESTS} requests of each")
    columns = (
        "clients",
        "answers",
        "refused",
        "first sound p50",
        "p95",
        "audio s/s",
        "without a gap",
        "longest gap",
    )
    table = make_table(machine(), *columns)
    asyncio.run(load(options.port, 1, 1, options.seconds))  # the first speech of a process is slower
    for clients in options.clients:
        heard, took_s = asyncio.run(load(options.port, clients, options.requests, options.seconds))
        spoken = [each for each in heard if each.status == 200]
        if not spoken:
            parser.exit(1, f"no speech was answered; the statuses: {sorted({each.status for each in heard})}\n")
        middle, late = np.percentile([each.first_s for each in spoken], [50, 95]) * 1000
        rate = sum(each.audio_s for each in spoken) / took_s
        fluent = sum(each.gap_s < 0.02 for each in spoken) / len(spoken)
        worst = max(each.gap_s for each in spoken)
        counts = (clients, len(heard), len(heard) - len(spoken), f"{middle:.0f} ms", f"{late:.0f} ms")
        table.add_row(*map(str, counts), f"{rate:.2f}", f"{fluent:.0%}", f"{worst:.2f} s")
    console.print(table)


if __name__ == "__main__":
    main()
