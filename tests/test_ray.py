"""A sharded corpus prepared by a Ray cluster whose machines are killed meanwhile: the same bytes as here."""

from __future__ import annotations

import os
import random
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import soundfile as sf
from conftest import SENTENCES
from shard_fixtures import shard, tree

from myxtts.data import sources
from myxtts.data.jobs import JobOptions

ray = pytest.importorskip("ray")


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    """Three nodes that work, and one that only plans."""
    from ray.cluster_utils import Cluster

    here = Path(__file__).parent
    os.environ |= {"PYTHONPATH": os.pathsep.join([str(here), str(here.parent)]), "RAY_USAGE_STATS_ENABLED": "0"}
    head = {"num_cpus": 0, "include_dashboard": False, "object_store_memory": 80_000_000}
    cluster = Cluster(initialize_head=True, head_node_args=head)
    for _ in range(3):
        cluster.add_node(num_cpus=1, object_store_memory=80_000_000)
    ray.init(address=cluster.address, log_to_driver=False)
    yield cluster
    ray.shutdown()
    cluster.shutdown()


def write_recordings(folder: Path, count: int) -> Path:
    """Recordings that take a while to prepare: noise in stereo at 48 kHz."""
    noise = np.random.default_rng(0)
    (folder / "wavs").mkdir(parents=True)
    for number in range(count):
        sf.write(folder / "wavs" / f"c{number}.flac", noise.uniform(-0.5, 0.5, (12 * 48_000, 2)), 48_000)
    lines = [f"c{number}|{SENTENCES[number % len(SENTENCES)]}" for number in range(count)]
    (folder / "metadata.csv").write_text("\n".join(lines))
    return folder


@pytest.mark.soak
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("kills", [1, 20])
def test_killed_nodes_cost_their_shards_in_flight(
    kills: int, tmp_path: Path, cluster: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sources, "SLICE_CLIPS", 2)
    recordings, choice = write_recordings(tmp_path / "recordings", 30), random.Random(1)
    whole = shard(recordings, tmp_path / "whole")
    assert whole.made > 5
    for attempt in range(kills):
        out = tmp_path / f"out{attempt}"

        with ThreadPoolExecutor(1) as pool:
            made = pool.submit(shard, recordings, out, JobOptions(on="ray", shard_mb=0.2))
            most = choice.randrange(whole.made)
            while len(list(out.glob("shards/*/meta.json"))) < most and not made.done():
                time.sleep(0.01)
            victim = choice.choice(sorted(cluster.worker_nodes, key=lambda node: node.unique_id))
            cluster.remove_node(victim, allow_graceful=False)
            cluster.add_node(num_cpus=1, object_store_memory=80_000_000)
            assert made.result(120) == whole
        shard(recordings, out)  # removes what the killed jobs left
        assert tree(out) == tree(tmp_path / "whole")
