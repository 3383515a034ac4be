"""Files that are damaged, cut off or removed: what is wrong is rebuilt or refused, and never used."""

from __future__ import annotations

import os
import random
import shutil
import signal
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import contents
from training_fixtures import Clips, arguments, newest, train
from training_processes import Server

from myxtts.config import DataSettings
from myxtts.data.codes import CodesCache
from myxtts.data.prepare import prepare
from myxtts.errors import DatasetError, MyXTTSError
from myxtts.observe.report import write_report
from myxtts.run_dir import RunDir

pytest_plugins = ["training_fixtures", "training_processes"]
few_or_many = pytest.mark.parametrize("times", [20, pytest.param(500, marks=pytest.mark.soak)])


def damage(folder: Path, chance: random.Random) -> Path:
    """Change a byte of some file below `folder`, or cut the file off somewhere; returns its path."""
    path = chance.choice(sorted(path for path in folder.rglob("*") if path.is_file() and path.stat().st_size))
    content = bytearray(path.read_bytes())
    place = chance.randrange(len(content))
    content[place] ^= chance.randrange(1, 256)
    path.write_bytes(content[:place] if chance.random() < 0.5 else content)
    return path


def replace_folder(folder: Path, source: Path) -> None:
    shutil.rmtree(folder)
    shutil.copytree(source, folder)


@few_or_many
def test_a_damaged_cache_is_rebuilt_or_refused(times: int, corpus: Path, tmp_path: Path) -> None:
    """Every row is compared with its checksum when it is first read; the next start rebuilds what was refused."""
    settings, chance = DataSettings(train_data=corpus, num_workers=1), random.Random(times)
    expected, root = contents(prepare(settings)), corpus / ".myxtts"
    shutil.copytree(root, tmp_path / "whole")
    for _ in range(times):
        replace_folder(root, tmp_path / "whole")
        harmed = damage(root, chance)
        try:
            found = contents(prepare(settings))
        except DatasetError:
            found = contents(prepare(settings))
        assert found == expected, harmed


@few_or_many
def test_damaged_codes_count_as_absent_and_are_written_again(times: int, tmp_path: Path) -> None:
    chance, lengths = random.Random(times), np.array([5, 9, 0, 12])
    audio, codes = np.arange(1, 5, dtype=np.uint64), np.random.default_rng(0).integers(1, 100, (4, 12))
    codes *= np.arange(12) < lengths[:, None]
    for number in range(times):
        out, clips = np.zeros((4, 12), np.int64), np.arange(4)
        for _ in range(3):  # written, damaged, and opened again
            cache = CodesCache.open(tmp_path / str(number), audio, lengths, "dvae")
            cache.read(clips, out)
            assert (out == codes)[cache.known(clips)].all()
            cache.write(clips, codes)
            assert cache.read(clips, out) and (out == codes).all()
            cache.close()
            damage(next((tmp_path / str(number)).glob("codes-*")), chance)


@few_or_many
@pytest.mark.usefixtures("small")
def test_a_damaged_run_is_repaired_or_refused(
    times: int, clips: Clips, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Weights, optimiser and vocabulary have checksums; model.json, settings and metrics have none."""
    run, flags, chance = tmp_path / "run", "--stages dvae --save-step 2 --max-steps 4", random.Random(times)
    models = {}
    for steps in (2, 4):
        assert train(run, clips(4), flags.replace("4", str(steps))) == 0
        models[steps] = RunDir(run).load_model(without=["gpt", "decoder"]).dvae.state_dict()
    shutil.copytree(run, tmp_path / "whole")
    for number in range(times):
        replace_folder(run, tmp_path / "whole")
        harmed = damage(run, chance)
        if number % 10 == 0:
            capsys.readouterr()
            assert train(run, clips(4), flags) == 0 or "error: " in capsys.readouterr().err, harmed
            assert write_report(run).is_file()
        try:
            found = RunDir(run).load_model(without=["gpt", "decoder"])
            last = RunDir(run).checkpoints("dvae").newest(optimizer=False)
        except MyXTTSError:
            continue
        assert all(map(torch.equal, found.dvae.state_dict().values(), models[last.step].values())), harmed


@pytest.mark.parametrize(
    ("stage", "files", "says"),
    [
        ("dvae", "audio-*/data.bin", "does not match its checksum"),
        ("gpt", "ids-*/data.bin", "does not match its checksum"),
        ("gpt", "codes-*/data.bin", "they are computed again until the next start"),
        ("gpt", "codes-*/checksums.bin", "they are computed again until the next start"),
        ("dvae", "", ""),
    ],
    ids=["audio", "ids", "codes", "checksums", "corpus removed"],
)
@pytest.mark.usefixtures("small")
def test_files_that_shrink_or_vanish_under_a_run_do_not_kill_it(
    stage: str, files: str, says: str, clips: Clips, tmp_path: Path, server: Server
) -> None:
    """Reading beyond the end of a mapped file that has shrunk would end the process by SIGBUS."""
    corpus, run_folder = tmp_path / "corpus", tmp_path / "run"
    shutil.copytree(clips(4), corpus, ignore=shutil.ignore_patterns(".myxtts"))
    run = server.start(arguments(run_folder, corpus, f"--stages {stage} --max-steps 5000 --epochs 5000"))
    run.wait_for("step 5/")
    for path in (corpus / ".myxtts").glob(files) if files else ():
        os.truncate(path, 0)
    if not files:
        shutil.rmtree(corpus)
        run.wait_for("step 60/")
    run.wait_for(says)
    run.signal(signal.SIGTERM)
    refused = says.startswith("does not")
    assert run.wait() == int(refused) and "Traceback" not in run.output
    assert refused or newest(run_folder, stage).step > 5
    if files:  # the next start repairs the files
        assert server.start(arguments(run_folder, corpus, f"--stages {stage}")).wait() == 0
