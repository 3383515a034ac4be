"""Checkpoints of a run: saved whole or not at all, found again after kills, full disks and damaged checkpoints."""

import errno
import logging
import os
import resource
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

import myxtts.checkpoints
from myxtts.checkpoints import Checkpoints, LoadedCheckpoint, Snapshot, to_host, write_pth, write_tensors
from myxtts.errors import ConfigError, DatasetError
from myxtts.files import lock, write_text_atomically

LOCK_AND_WAIT = """import pathlib, sys
from myxtts.files import lock
with lock(pathlib.Path(sys.argv[1])):
    print("locked", flush=True)
    sys.stdin.read()
"""

# One process imports torch once and forks those that are killed: first at the n-th call to the system of two saves
# (one of them of a step that exists) for n = 0, 1, ... until one survives, then at random moments of many saves.
KILLED_WHILE_SAVING = """
import os, random, shutil, signal, sys, time
from pathlib import Path
import torch
from myxtts import checkpoints as module
from myxtts.checkpoints import Checkpoints, Snapshot

torch.set_num_threads(1)
folder = Path(sys.argv[1])
calls_left = None

def deadly(function):
    def call(*arguments, **options):
        global calls_left
        if calls_left == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        if calls_left is not None:
            calls_left -= 1
        return function(*arguments, **options)
    return call

def make_calls_deadly():
    os.fsync = lambda descriptor: None  # slow, and a kill of the process alone loses nothing that was written
    for owner, names in (
        (os, ("fsync", "unlink", "rmdir")), (module, ("save_file",)),
        (Path, ("mkdir", "rename", "replace", "chmod", "write_text")),
    ):
        for name in names:
            setattr(owner, name, deadly(getattr(owner, name)))

def save(step):
    tensors = {"a": torch.full((1000,), float(step))}
    checkpoints.save(step, Snapshot(tensors, dict(tensors), {"val_loss": 1 / step}))
    checkpoints.wait()
    assert checkpoints.num_failed == 0
    os.write(report, b"%d " % step)

def child(deadly_call):
    global checkpoints, calls_left
    checkpoints = Checkpoints(folder, keep=1)
    before = checkpoints.newest()
    first = before.step if before else 1
    if deadly_call is None:
        for step in range(first + 1, 10**9):
            save(step)
    calls_left = deadly_call
    make_calls_deadly()
    save(first)
    save(first + 1)
    os._exit(0)

def check(reported):
    checkpoints = Checkpoints(folder, keep=1)
    for path in folder.glob("step-*"):
        checkpoints.load(int(path.name[5:]))
    loaded = checkpoints.newest()
    assert loaded.step >= reported[-1], (loaded.step, reported)
    for tensors in loaded.weights, loaded.optimizer:
        assert torch.equal(tensors["a"], torch.full((1000,), float(loaded.step)))
    assert checkpoints.best().step == loaded.step
    checkpoints.prune()
    assert [path.name for path in folder.iterdir()] == [loaded.folder.name]

def fork(deadly_call, seconds=None):
    global report
    reading, report = os.pipe()
    pid = os.fork()
    if pid == 0:
        child(deadly_call)
    os.close(report)
    if seconds is not None:
        time.sleep(seconds)
        os.kill(pid, signal.SIGKILL)
    _, status = os.waitpid(pid, 0)
    reported.extend(map(int, os.read(reading, 10**6).split()))
    os.close(reading)
    check(reported)
    return status

random.seed(int(sys.argv[2]))
reported = []
fork(10**9)
deadly_call = 0
while (status := fork(deadly_call)) != 0:
    assert os.WTERMSIG(status) == signal.SIGKILL, status
    deadly_call += 1
assert deadly_call > 25
for _ in range(8):
    fork(None, random.uniform(0.01, 0.12))
print("last step", reported[-1])
"""


def snapshot(value: int) -> Snapshot:
    tensors = {"layer.weight": torch.full((40, 5), float(value)), "layer.bias": torch.arange(7) + value}
    return Snapshot(tensors, {"layer.weight.exp_avg": torch.full((40, 5), value / 3)}, {"value": value})


def assert_same(found: LoadedCheckpoint | None, step: int, expected: Snapshot) -> None:
    assert found is not None
    assert (found.step, found.state) == (step, expected.state)
    assert save(found.weights) == save(expected.weights)
    assert save(found.optimizer) == save(expected.optimizer)


def saved(folder: Path, *steps: int, keep: int = 5) -> Checkpoints:
    checkpoints = Checkpoints(folder, keep)
    for step in steps:
        checkpoints.save(step, snapshot(step))
        checkpoints.wait()
    checkpoints.close()
    assert checkpoints.num_failed == 0
    return Checkpoints(folder, keep)


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def test_what_is_read_is_bit_for_bit_what_was_saved_and_readable_by_other_programs(tmp_path: Path) -> None:
    tensors = {
        "fp32": torch.tensor([[1.5, -0.0], [float("nan"), float("inf")]]),
        "bf16": torch.randn(3, 5).to(torch.bfloat16),
        "int64": torch.tensor([-(2**62), 2**62]),
        "bool": torch.tensor([True, False, True]),
        "uint8": torch.arange(11, dtype=torch.uint8),
        "empty": torch.empty(0, 4),
        "scalar": torch.tensor(7.0),
        "transposed": torch.randn(3, 4).t(),
    }
    state = {"cursor": {"epoch": 1, "at": [3, 4]}, "best_loss": float("inf"), "text": "سلام", "10": 1, "2": None}
    original = Snapshot(to_host(tensors), {}, state)
    checkpoints = Checkpoints(tmp_path / "run" / "gpt", keep=1)
    checkpoints.save(12, original)
    checkpoints.close()
    assert checkpoints.wait() is None
    assert_same(checkpoints.newest(), 12, original)
    assert_same(checkpoints.load(12), 12, original)

    folder = tmp_path / "run" / "gpt" / "step-00000012"
    assert names(folder) == {"weights.safetensors", "optimizer.safetensors", "state.json"}
    with safe_open(folder / "weights.safetensors", "pt") as file:
        assert torch.equal(file.get_tensor("transposed"), tensors["transposed"])


def test_every_file_has_the_permissions_of_the_umask(tmp_path: Path) -> None:
    before = os.umask(0o027)
    try:
        write_tensors(tmp_path / "base.safetensors", {"a": torch.ones(1)})
        write_pth(tmp_path / "model.pth", {"a": torch.ones(1)})
        write_text_atomically(tmp_path / "settings.yaml", "")
        saved(tmp_path / "gpt", 1)
    finally:
        os.umask(before)
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert len(files) == 6
    assert {path.stat().st_mode & 0o777 for path in files} == {0o640}


def test_a_save_in_the_background_sees_no_later_changes_and_a_second_one_waits_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    may_write, save_file, at_work, most_at_work = threading.Event(), myxtts.checkpoints.save_file, [], []

    def watched_save_file(tensors: dict[str, Tensor], path: Path) -> None:
        at_work.append(path)
        assert may_write.wait(30)
        most_at_work.append(len(at_work))
        save_file(tensors, path)
        at_work.remove(path)

    monkeypatch.setattr(myxtts.checkpoints, "save_file", watched_save_file)
    live, state = torch.arange(6.0).requires_grad_(), {"losses": [1.0]}
    checkpoints = Checkpoints(tmp_path / "gpt", keep=2)
    checkpoints.save(1, Snapshot(to_host({"w": live}), {}, state))
    with torch.no_grad():
        live.mul_(-1)
    state["losses"].append(2.0)
    assert checkpoints.newest() is None
    second = threading.Thread(target=checkpoints.save, args=(2, snapshot(2)))
    second.start()
    second.join(0.1)
    assert second.is_alive(), "the second save did not wait"
    may_write.set()
    second.join(30)
    checkpoints.close()
    assert set(most_at_work) == {1}
    assert_same(checkpoints.load(1), 1, Snapshot({"w": torch.arange(6.0)}, {}, {"losses": [1.0]}))
    assert_same(checkpoints.newest(), 2, snapshot(2))
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("checkpoint-writer")]


def test_host_copies_reuse_their_memory_and_are_copies() -> None:
    live = {"a": torch.randn(4, 3).t(), "b": torch.arange(5)}
    first = to_host(live)
    assert all(copy.is_contiguous() and torch.equal(copy, live[name]) for name, copy in first.items())
    assert all(first[name].data_ptr() != tensor.data_ptr() for name, tensor in live.items())
    live = {"a": torch.randn(3, 4), "b": torch.arange(6), "c": torch.ones(2)}
    second = to_host(live, into=first)
    assert second["a"].data_ptr() == first["a"].data_ptr()
    assert all(torch.equal(copy, live[name]) for name, copy in second.items())


def test_after_starting_over_the_last_saved_is_the_newest_and_replaces_its_step(tmp_path: Path) -> None:
    saved(tmp_path / "gpt", 8000, 9000, keep=2)
    checkpoints = saved(tmp_path / "gpt", 1000, keep=2)
    assert_same(checkpoints.newest(), 1000, snapshot(1000))
    saved(tmp_path / "gpt", 2000, keep=2)
    checkpoints.save(2000, snapshot(44))
    checkpoints.wait()
    checkpoints.close()
    assert names(tmp_path / "gpt") == {"step-00001000", "step-00002000"}
    assert_same(checkpoints.newest(), 2000, snapshot(44))


def truncate(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def flip_last_bit(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-20] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize("damage", [truncate, flip_last_bit, Path.unlink])
@pytest.mark.parametrize("file", ["weights.safetensors", "optimizer.safetensors", "state.json"])
def test_a_damaged_checkpoint_is_passed_over_with_a_warning(
    file: str, damage: Callable[[Path], None], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    checkpoints = saved(tmp_path / "gpt", 1, 2)
    damage(tmp_path / "gpt" / "step-00000002" / file)
    assert_same(checkpoints.newest(), 1, snapshot(1))
    assert f"step-00000002/{file}" in caplog.text
    alone = checkpoints.newest(optimizer=False)
    assert alone is not None and (alone.step, alone.optimizer) == (2 if "optimizer" in file else 1, {})
    with pytest.raises(DatasetError, match=file):
        checkpoints.load(2)
    assert "step-00000002" in names(tmp_path / "gpt")
    saved(tmp_path / "gpt", 2)
    assert_same(checkpoints.newest(), 2, snapshot(2))


def test_a_run_whose_checkpoints_are_all_damaged_is_not_silently_started_over(tmp_path: Path) -> None:
    checkpoints = saved(tmp_path / "gpt", 1)
    assert Checkpoints(tmp_path / "dvae", keep=1).newest() is None
    truncate(tmp_path / "gpt" / "step-00000001" / "weights.safetensors")
    with pytest.raises(DatasetError, match=r"step-00000001.*\n.*--reset-training"):
        checkpoints.newest()


def test_pruning_never_removes_the_last_good_checkpoint(tmp_path: Path) -> None:
    """As when a kill came before the older one was removed, and the newer one is damaged later."""
    saved(tmp_path / "gpt", 1, 2, keep=2)
    truncate(tmp_path / "gpt" / "step-00000002" / "weights.safetensors")
    checkpoints = Checkpoints(tmp_path / "gpt", keep=1)
    checkpoints.prune()
    assert_same(checkpoints.newest(), 1, snapshot(1))


def test_leftovers_of_a_killed_save_are_removed_by_the_next_save_only(tmp_path: Path) -> None:
    saved(tmp_path / "gpt", 1)
    leftover = tmp_path / "gpt" / "tmp-step-00000002"
    leftover.mkdir()
    (leftover / "weights.safetensors").write_bytes(b"half")
    assert_same(Checkpoints(tmp_path / "gpt", keep=3).newest(), 1, snapshot(1))
    assert leftover.exists(), "a reader removed what another process may be writing"
    saved(tmp_path / "gpt", 3)
    assert names(tmp_path / "gpt") == {"step-00000001", "step-00000003"}


@pytest.mark.parametrize(
    ("owner", "function", "error"),
    [
        (os, "fsync", OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))),
        (os, "fsync", OSError(errno.EIO, os.strerror(errno.EIO))),
        (myxtts.checkpoints, "save_file", SafetensorError("I/O error: No space left on device (os error 28)")),
        (Path, "rename", OSError(errno.EIO, os.strerror(errno.EIO))),
    ],
)
def test_a_save_that_fails_costs_a_checkpoint_and_nothing_else(
    owner: object, function: str, error: Exception, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*_: object) -> None:
        raise error

    words = os.strerror(error.errno if isinstance(error, OSError) else errno.ENOSPC)
    checkpoints = saved(tmp_path / "gpt", 1, keep=1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(owner, function, fail)
        checkpoints.save(2, snapshot(2))
        assert str(checkpoints.wait()) == words
    assert checkpoints.num_failed == 1
    assert names(tmp_path / "gpt") == {"step-00000001"}
    [record] = [record for record in caplog.records if record.levelno == logging.ERROR]
    for part in ("gpt/step-00000002", "MB needed", "MB free", f"failed: {words} ("):
        assert part in record.getMessage()
    checkpoints.save(3, snapshot(3))
    assert checkpoints.wait() is None
    assert checkpoints.num_failed == 1
    assert_same(checkpoints.newest(), 3, snapshot(3))
    checkpoints.close()


def test_a_kill_at_any_moment_leaves_a_whole_checkpoint(tmp_path: Path) -> None:
    run = subprocess.run(
        [sys.executable, "-c", KILLED_WHILE_SAVING, str(tmp_path / "gpt"), str(os.getpid())],
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert run.returncode == 0, run.stdout + run.stderr
    assert "last step" in run.stdout


def test_a_run_directory_belongs_to_one_process_until_it_dies(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    holder = subprocess.Popen(
        [sys.executable, "-c", LOCK_AND_WAIT, str(folder)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    with holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == b"locked\n"
        with pytest.raises(ConfigError, match=rf"process {holder.pid} on .+\n.*--checkpoint-dir"), lock(folder):
            pass
        holder.kill()
        holder.wait()
    with lock(folder), lock(tmp_path / "another"):
        pass


def test_a_folder_that_cannot_be_made_is_refused_to_a_run(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=r"Cannot keep a run in .*\n.*--checkpoint-dir"), lock(tmp_path / "file"):
        pass


def test_a_disk_without_room_for_the_lock_is_explained(tmp_path: Path) -> None:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, before[1]))  # every write fails, as on a full disk
    try:
        with pytest.raises(ConfigError, match="Cannot keep a run in"), lock(tmp_path / "run"):
            pass
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
def test_pinned_host_copies_are_complete_on_return() -> None:
    live = {f"w{number}": torch.randn(1000, 1000, device="cuda") for number in range(50)}
    into = to_host(live, pin=True)
    for _ in range(3):
        for tensor in live.values():
            tensor.add_(1)
        into = to_host(live, into, pin=True)
        expected = {name: tensor.cpu() for name, tensor in live.items()}
        assert all(copy.is_pinned() and torch.equal(copy, expected[name]) for name, copy in into.items())


# Scores that come later, and weights that were only evaluated


def rated(folder: Path, best_by: str | None = None, keep: int = 1) -> Checkpoints:
    return Checkpoints(folder / "gpt", keep, best_by)


def evaluated(step: int) -> Snapshot:
    return snapshot(step)._replace(optimizer=None, state={"done": False})


def test_scores_that_come_later_choose_the_best_and_what_is_kept(tmp_path: Path) -> None:
    checkpoints = rated(tmp_path, "wer", keep=2)
    for step, scores in ((10, {"loss": 1.0}), (20, {"loss": 2.0}), (30, {"loss": 3.0})):
        checkpoints.save(step, snapshot(step)._replace(state={"done": False}))
        checkpoints.rate(step, scores)
    checkpoints.save_evaluated(25, evaluated(25))
    assert kept_in(tmp_path) == ["evaluated-step-00000025", "step-00000010", "step-00000020", "step-00000030"]
    used = checkpoints.used()
    assert used is not None and used.step == 10, "as long as nothing is judged, the loss decides"
    checkpoints.rate(25, {"wer": 0.2, "mos": 3.0})
    checkpoints.rate(30, {"wer": 0.4})
    checkpoints.close()
    assert kept_in(tmp_path) == ["evaluated-step-00000025", "step-00000020", "step-00000030"]
    for by, step in (("wer", 25), (None, 30)):
        found = rated(tmp_path, by).used()
        assert found is not None and found.step == step
    newest = checkpoints.newest()
    assert newest is not None and newest.step == 30, "nothing continues from evaluated weights"
    (tmp_path / "gpt" / "evaluated-step-00000025" / "scores.json").write_text('{"wer": [')
    found = rated(tmp_path, "wer").best(optimizer=False)
    assert found is not None and found.step == 30, "damaged scores are no scores"


def test_evaluated_weights_wait_for_their_scores_a_few_at_a_time(tmp_path: Path) -> None:
    checkpoints = rated(tmp_path, "wer")
    for step in range(1, 7):
        checkpoints.save_evaluated(step, evaluated(step))
    assert kept_in(tmp_path) == [f"evaluated-step-0000000{step}" for step in (4, 5, 6)]
    assert not checkpoints.all_notes() and checkpoints.newest() is None
    checkpoints.rate(5, {"wer": 0.9})
    checkpoints.rate(1, {"wer": 0.1})  # its weights are gone
    checkpoints.close()
    best = checkpoints.best(optimizer=False)
    assert best is not None and (best.step, best.notes.is_averaged) == (5, True)


def kept_in(folder: Path) -> list[str]:
    return sorted(path.name for path in (folder / "gpt").iterdir())
