"""Random damage to caches, checkpoints and everything else in a run: rebuilt or refused, and used only as written."""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from conftest import contents
from training_fixtures import Clips, assert_equal_tensors, clips, newest, small, train

from myxtts.config import DataSettings
from myxtts.data.prepare import prepare
from myxtts.errors import DatasetError
from myxtts.run_dir import RunDir

__all__ = ["clips", "small"]

few_or_many = pytest.mark.parametrize("times", [20, 100, pytest.param(500, marks=pytest.mark.soak)])


def damage(folder: Path, chance: random.Random) -> Path:
    """Change a byte of some file below `folder`, or cut it off somewhere; returns the file."""
    path = chance.choice(sorted(path for path in folder.rglob("*") if path.is_file() and path.stat().st_size))
    content = bytearray(path.read_bytes())
    place = chance.randrange(len(content))
    content[place] ^= chance.randrange(1, 256)
    path.write_bytes(content[:place] if chance.random() < 0.5 else content)
    return path


@few_or_many
def test_a_damaged_cache_is_rebuilt_or_refused(times: int, corpus: Path, tmp_path: Path) -> None:
    """Every row is compared with its checksum when it is first read; what is refused is rebuilt by the next start."""
    settings, chance = DataSettings(train_data=corpus, num_workers=1), random.Random(times)
    expected, root = contents(prepare(settings)), corpus / ".myxtts"
    shutil.copytree(root, tmp_path / "whole")
    for number in range(times):
        shutil.rmtree(root)
        shutil.copytree(tmp_path / "whole", root)
        harmed = damage(root, chance)
        try:
            found = contents(prepare(settings))
        except DatasetError:
            found = contents(prepare(settings))
        assert found == expected, (number, harmed)


@few_or_many
@pytest.mark.usefixtures("small")
def test_a_damaged_run_is_repaired_or_refused(
    times: int, clips: Clips, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run, flags, chance = tmp_path / "run", "--stages dvae --save-step 2 --max-steps 4", random.Random(times)
    assert train(run, clips(4), flags) == 0
    shutil.copytree(run, tmp_path / "whole")
    model = RunDir(run).load_model().state_dict()
    outcomes = {}
    for number in range(times):
        shutil.rmtree(run)
        shutil.copytree(tmp_path / "whole", run)
        harmed = damage(run, chance)
        capsys.readouterr()
        code = train(run, clips(4), flags)
        shown = capsys.readouterr()
        key = harmed.relative_to(run)
        if code:
            outcomes.setdefault((str(key), code), shown.err[:300])
        else:
            import torch

            found = RunDir(run).load_model().state_dict()
            same = all(torch.equal(found[n], v) for n, v in model.items())
            outcomes.setdefault((str(key), "same" if same else "OTHER"), "")
    for k, v in sorted(outcomes.items(), key=str):
        print(k, v)
