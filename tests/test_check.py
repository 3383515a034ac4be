"""`myxtts check`: every check on machines that pass, warn and fail; the dry run; what is shown."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
import sysconfig
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import load_values
from rich.console import Console
from test_diagnosis import Line
from training_fixtures import Clips, clips, small  # noqa: F401 - fixtures

import myxtts.host
from myxtts.cli import main
from myxtts.data.prepare import EMBEDDED_CORPUS, prepare
from myxtts.devices import Gpu, Machine, Plan
from myxtts.errors import NoProgress, PipelineError
from myxtts.observe.findings import Finding
from myxtts.pipeline.frontend import GptFrontend
from myxtts.settings import specs
from myxtts.terminal import show_findings
from myxtts.tools import check as checks
from myxtts.tools.check import CHECKS, CheckContext, Host, check, passed, to_json
from myxtts.tools.dry_run import Observation
from myxtts.training.trainer import StepMode

ROOT = Path(__file__).resolve().parents[1]
CPU, OTHER_CPU, DATA, MODEL = map(torch.device, ("cpu", "cpu:0", "cuda:0", "cuda:1"))
GB = 10**9


pytestmark = pytest.mark.usefixtures("empty_working_folder")


def machine(num_gpus: int = 1, *memory_mb: int, peers: bool = True) -> Machine:
    memory = memory_mb or (24000,) * num_gpus
    pairs = frozenset({(0, 1), (1, 0)}) if peers and num_gpus > 1 else frozenset()
    return Machine([Gpu(index, f"Card {index}", memory[index]) for index in range(num_gpus)], pairs)


def host(cores: int = 8, memory_gb: float = 64, free_gb: float = 500, driver: str = "550.54") -> Host:
    return Host(cores, int(memory_gb * 2**30), driver, lambda _: int(free_gb * GB))


def context(here: Machine | None = None, there: Host | None = None, **given: object) -> CheckContext:
    return CheckContext(load_values(**given), here or machine(), there or host())


def found(code: str, *place: Any, **given: object) -> Finding:
    return CHECKS[code](context(*place, **given))


NO_GPU, TWO = machine(0), machine(2)
FAST = {"train_data": str(EMBEDDED_CORPUS)}
NO_DRIVER = host(driver="")
DUAL = {"data_gpu": "0", "model_gpu": "1"}
ISOLATED = {"enable_memory_isolation": True}
CAPPED = ISOLATED | {"model_gpu_memory": "8192"}
WHOLE = {"size": "normal"}


# Every check


@pytest.mark.parametrize(
    ("code", "place", "given", "level", "says"),
    [
        ("gpus", (machine(),), {}, "pass", "0: Card 0, 24000 MB"),
        ("gpus", (NO_GPU, NO_DRIVER), {}, "warn", "CPU"),
        ("gpus", (NO_GPU,), {}, "fail", "550.54"),
        ("devices", (machine(),), {}, "pass", "Single-GPU"),
        ("devices", (TWO,), DUAL, "pass", "Dual-GPU"),
        ("devices", (machine(2, 24000, 12000),), DUAL, "warn", "--data-gpu 1 --model-gpu 0"),
        ("devices", (machine(),), DUAL, "fail", "Multi-GPU requires at least 2 GPUs. GPUs found: 0: C"),
        ("caps", (TWO,), DUAL | ISOLATED, "pass", "data 22976 MB, model 22976 MB"),
        ("caps", (machine(),), {"model_gpu_memory": "8192"}, "warn", "isolation is off"),
        ("caps", (machine(),), ISOLATED | {"data_gpu_memory": "4096"}, "warn", "no effect"),
        ("caps", (NO_GPU,), ISOLATED, "warn", "CPU"),
        ("caps", (machine(1, 12000),), ISOLATED, "pass", "model 10976 MB"),
        ("caps", (machine(1, 12000),), ISOLATED | {"model_gpu_memory": "11500"}, "fail", "give at most 11488"),
        ("native-loading", (), {"native_loading": False}, "fail", "--native-loading"),
        ("native-loading", (machine(), host(free_gb=0)), {"native_loading": False}, "warn", "no room"),
        ("workers", (), {"num_workers": "2"}, "warn", "--num-workers 8"),
        ("workers", (), {"num_workers": "2", "native_loading": False}, "fail", "2 of 8 usable cores"),
        ("prefetch", (), {"prefetch_buffer_size": "2"}, "warn", "slow clip"),
        ("prefetch", (), {"prefetch_buffer_size": "1"}, "fail", "--prefetch-buffer-size 16"),
        ("prefetch", (NO_GPU,), {"prefetch_buffer_size": "1"}, "warn", "Only 1"),
        ("upload", (), {"optimize_cpu_gpu_overlap": False}, "warn", "trainer's stream"),
        ("upload", (), {"enhanced_gpu_prefetch": False}, "warn", "pageable"),
        ("upload", (), {"prefetch_to_gpu": False}, "fail", "--prefetch-to-gpu"),
        ("upload", (NO_GPU,), {"prefetch_to_gpu": False}, "fail", "--prefetch-to-gpu"),
        ("upload", (NO_GPU,), {}, "skip", "no GPU"),
        ("batch-size", (), {"batch_size": "4"}, "warn", "--batch-size 32"),
        ("batch-size", (), {"batch_size": "2"}, "fail", "--batch-size 32"),
        ("batch-size", (NO_GPU,), {"batch_size": "2"}, "pass", "2 clips"),
        ("batch-size", (), WHOLE | {"batch_size": "128"}, "warn", "may not fit"),
        ("batch-size", (machine(1, 80000),), CAPPED | {"batch_size": "1"}, "fail", "--batch-size 4,"),
        ("fixed-shapes", (), {"pad_to_fixed_length": False}, "fail", "only a step with fixed shapes"),
        ("compilation", (), {"enable_xla_compilation": False}, "warn", "fused"),
        ("compilation", (), {"enable_graph_mode": False}, "fail", "eagerly"),
        ("compilation", (), WHOLE | {"enable_graph_mode": False}, "warn", "eagerly"),
        ("compilation", (), {"enable_eager_debug": True}, "fail", "--disable-eager-debug"),
        ("compilation", (NO_GPU,), {"enable_graph_mode": False}, "skip", "no GPU"),
        ("precision", (), {"mixed_precision": False}, "fail", "--mixed-precision"),
        ("precision", (NO_GPU,), {"mixed_precision": False}, "skip", "no GPU"),
        ("model-memory", (), WHOLE, "pass", "6729 MB"),
        ("model-memory", (machine(1, 8000),), WHOLE, "warn", "--model-size base"),
        ("model-memory", (machine(1, 4000),), WHOLE, "fail", "does not fit"),
        ("model-memory", (machine(1, 4000),), WHOLE | {"init_from": "w"}, "fail", "lora_rank"),
        ("model-memory", (machine(1, 8000),), WHOLE | {"lora_rank": "16"}, "pass", "gpt"),
        ("model-memory", (NO_GPU, host(memory_gb=4)), WHOLE, "fail", "does not fit"),
        ("buffers", (TWO,), DUAL, "pass", "on cuda:1"),
        ("buffers", (), {"prefetch_buffer_size": "100000000"}, "fail", "--buffer-size"),
        ("buffers", (NO_GPU,), DUAL, "skip", "Not checked"),
        ("preset", (machine(1, 11900),), {}, "info", "batch_size 8, gradient_accumulation_steps 2"),
        ("preset", (), {"preset": "40gb"}, "warn", "larger card"),
        ("preset", (NO_GPU,), {}, "skip", "no GPU"),
        ("preset", (machine(2, 8000, 40000),), DUAL | {"data_gpu": "5"}, "info", "40gb"),
        ("weights", (), {"init_from": "missing"}, "fail", "--init-from"),
        ("corpus", (), {}, "info", "embedded"),
        ("corpus", (), {"train_data": "missing"}, "fail", "No such corpus folder"),
        ("prepared", (), {}, "info", "not prepared yet"),
        ("disk-cache", (machine(), host(free_gb=0.015)), FAST, "warn", "--cache-dir"),
        ("disk-cache", (machine(), host(free_gb=0.01)), FAST, "fail", "--cache-dir"),
        ("disk-checkpoints", (), WHOLE, "pass", "40.9 GB"),
        ("disk-checkpoints", (machine(), host(free_gb=50)), WHOLE, "warn", "--keep 1"),
        ("disk-checkpoints", (machine(), host(free_gb=20)), WHOLE, "fail", "--checkpoint-dir"),
    ],
)
def test_a_check_and_its_finding(
    code: str, place: tuple[Any, ...], given: dict[str, object], level: str, says: str
) -> None:
    finding = found(code, *place, **given)
    assert finding.level == level, finding
    assert says in f"{finding.what} {finding.why} {finding.fix}", finding
    assert finding.code == code
    assert finding.fix or finding.level in ("pass", "info", "skip") or code == "caps"
    assert finding.gain is None, "check measures no gain"
    assert not finding.setting or finding.setting in specs()


def test_every_check_is_made_in_order_and_a_good_configuration_gives_no_alarm() -> None:
    findings = check(load_values(batch_size="32", preset="24gb", **FAST), machine(), host())
    assert [finding.code for finding in findings if finding.code != "hint"] == list(CHECKS)
    assert [finding for finding in findings if finding.level in ("warn", "fail")] == []


def test_hints_join_the_findings_unless_a_check_or_a_bundle_settles_them() -> None:
    given = {"enable_eager_debug": True, "num_workers": "99", "warmup_steps": "10000000"}
    findings = check(load_values(**given), TWO, host())
    hints = {finding.setting: finding for finding in findings if finding.code == "hint"}
    assert {"data.num_workers", "training.warmup_steps", ""} <= hints.keys()
    assert "training.enable_eager_debug" not in hints
    assert hints["data.num_workers"].fix == "give --num-workers 8, or set data.num_workers: 8"
    assert "torchrun" in hints[""].fix and all(hint.level == "warn" for hint in hints.values())
    loaded = load_values(**given)
    bundled = replace(loaded, origin=dict(loaded.origin) | {"training.warmup_steps": "preset"})
    assert "training.warmup_steps" not in {finding.setting for finding in check(bundled, TWO, host())}


def test_a_prepared_corpus_is_recognised_until_it_changes(corpus: Path) -> None:
    given = {"train_data": str(corpus), "language": "en", "vocab_size": "256"}
    assert found("prepared", **given).what == "The corpus is not prepared yet"
    time.sleep(0.05)  # a corpus that has just changed is not trusted to be at rest
    prepare(load_values(**given).settings.data)
    assert found("prepared", **given).level == "pass"
    assert found("disk-cache", machine(), host(free_gb=0), **given).level == "pass"
    assert "other settings" in found("prepared", **(given | {"max_text_length": "50"})).what


def test_a_corpus_of_which_much_is_unusable_is_a_warning_with_reasons(corpus: Path) -> None:
    with open(corpus / "metadata.csv", "a") as metadata:
        metadata.write("absent|Nobody.\n")
    answer = found("corpus", train_data=str(corpus))
    assert (answer.level, answer.why) == ("warn", "1 × missing file")
    for path in (corpus / "wavs").iterdir():
        path.unlink()
    assert found("corpus", train_data=str(corpus)).level == "fail"


# The GPUs


def test_the_version_of_the_driver_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(myxtts.host, "DRIVER_FILE", tmp_path / "version")
    monkeypatch.setattr(myxtts.host, "DRIVER_DEVICES", (tmp_path / "device",))
    assert Host.look().driver == ""
    (tmp_path / "device").touch()
    assert Host.look().driver == "unknown"
    (tmp_path / "version").write_text("NVRM version: NVIDIA UNIX x86_64 Kernel Module  550.54.15  Tue\nGCC 12\n")
    assert Host.look().driver == "550.54.15"


def test_peer_access_matters_only_between_two_gpus() -> None:
    assert [finding.level for finding in checks.peers(context(TWO, **DUAL))] == ["pass"]
    assert [finding.level for finding in checks.peers(context(machine(2, peers=False), **DUAL))] == ["warn"]
    assert list(checks.peers(context(TWO))) == list(checks.peers(context(NO_GPU, **DUAL))) == []


def test_bytes_are_copied_and_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checks, "COPY_BYTES", 5_000_000)
    across = Plan(CPU, OTHER_CPU, "dual")
    for least, level in ((0.0, "pass"), (1e6, "warn")):
        monkeypatch.setattr(checks, "MIN_GB_PER_S", least)
        answer = checks.transfer(across)
        assert answer.level == level and "pinned memory → cpu" in answer.what and "→ cpu:0" in answer.what
    monkeypatch.setattr(torch.Tensor, "copy_", lambda *_, **__: None)
    assert checks.transfer(across).level == "fail"


def test_a_cap_that_is_not_held_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    capped = Plan(CPU, CPU, data_cap_mb=1, model_cap_mb=1)
    assert [finding.level for finding in checks.caps_held(capped)] == ["fail"]
    assert list(checks.caps_held(Plan(CPU, CPU))) == []

    def refuse(*_: object, **__: object) -> None:
        raise torch.OutOfMemoryError

    monkeypatch.setattr(torch, "empty", refuse)
    assert [finding.level for finding in checks.caps_held(capped)] == ["pass"]


@pytest.mark.parametrize(
    ("changes", "given", "code", "level", "says"),
    [
        ({}, {}, "optimisations", "pass", "captured step"),
        ({"spans": {"gather", "upload", "encode"}}, {}, "rehearsal", "fail", "handoff"),
        ({"changed_tensors": {"ids"}}, {}, "rehearsal", "fail", "arrived changed: ids"),
        ({"losses": [5.0, float("nan")]}, {}, "rehearsal", "fail", "not finite"),
        ({"has_learnt": False}, {}, "rehearsal", "fail", "no weight"),
        ({"model_devices": {DATA, MODEL}}, {}, "placement", "fail", "cuda:0 and cuda:1"),
        ({"batch_devices": {DATA, MODEL}}, {}, "placement", "fail", "cuda:0 and cuda:1"),
        ({"frozen_devices": {DATA, MODEL}}, {}, "placement", "fail", "cuda:0 and cuda:1"),
        ({"is_pinned": False}, {}, "optimisations", "fail", "pinned memory"),
        ({"is_pinned": False}, {"enhanced_gpu_prefetch": False}, "optimisations", "warn", "pinned memory"),
        ({"is_ahead": False}, {}, "optimisations", "fail", "uploaded ahead"),
        ({"sizes": {None, 1}}, {}, "optimisations", "fail", "fixed shapes"),
        (
            {"mode": StepMode(autocast=True)},
            {"enable_graph_mode": False},
            "optimisations",
            "fail",
            "compiled step",
        ),
        ({"grew_mb": 40.0}, {}, "optimisations", "fail", "no allocation"),
        ({"num_recompiled": 1}, {}, "optimisations", "fail", "no recompilation"),
        ({}, {}, "grade", "pass", "Grade: excellent"),
        ({"profile": Line(gather=200).data()}, {}, "grade", "warn", "Grade: below minimum not minimum: the model"),
    ],
)
def test_a_dry_run_on_two_gpus_is_judged_by_what_was_seen(
    changes: dict[str, Any],
    given: dict[str, object],
    code: str,
    level: str,
    says: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    plan = Plan(DATA, MODEL, "dual")
    seen = Observation("gpt", plan, StepMode(autocast=True, compiled=True, captured=True), [5.0, 4.0])
    seen.spans, seen.sizes = {"gather", "upload", "encode", "handoff", "wait"}, {None}  # type: ignore[arg-type]
    seen.model_devices = seen.batch_devices = {MODEL}
    seen.frozen_devices = {DATA}
    seen.is_pinned = seen.is_ahead = seen.has_learnt = True
    seen.profile = Line().data()
    monkeypatch.setattr(checks, "prepare", lambda *_: None)
    monkeypatch.setattr(checks, "observe_pipeline", lambda *_: replace(seen, **changes))
    answers = list(checks.dry_run(context(TWO, **given), plan, NoProgress(), lambda _: None))
    assert [answer.code for answer in answers] == ["rehearsal", "placement", "optimisations", "grade"]
    for answer in answers:
        assert answer.level == (level if answer.code == code else "pass"), answer
        assert answer.code != code or says in f"{answer.what} {answer.why}"


@pytest.fixture
def prepared_corpus(small: None, clips: Clips) -> dict[str, object]:  # noqa: F811, ARG001
    """Settings of a prepared corpus."""
    given = {
        "train_data": str(clips(4)), "language": "en", "vocab_size": "256",
        "max_mel_frames": "128", "max_text_length": "40", "val_fraction": "0",
        "num_workers": "1",
    }  # fmt: skip
    time.sleep(0.05)
    prepare(load_values(**given).settings.data)
    return given


@pytest.mark.parametrize("dual", [False, True])
def test_the_pipeline_is_tried_on_the_cpu_and_leaves_nothing(
    prepared_corpus: dict[str, object], dual: bool
) -> None:
    said: list[str] = []
    given = prepared_corpus | (DUAL if dual else {})
    before = set(context(**given).cache_folder.iterdir())
    findings = checks.check_gpus(load_values(**given), NO_GPU, NO_DRIVER, say=said.append)
    by_code = {finding.code: finding for finding in findings}
    assert by_code["rehearsal"].level == "pass", by_code["rehearsal"]
    assert ("handoff" in by_code["rehearsal"].what) == dual
    assert by_code["placement"].level == "pass" and by_code["driver"].level == "skip"
    assert {by_code[code].level for code in ("optimisations", "transfer", "grade")} == {"skip"}
    assert "copies between GPUs" in by_code["not-checked"].what
    assert by_code["devices"].level == ("fail" if dual else "pass")
    assert by_code.keys() >= {"native-loading", "corpus", "disk-checkpoints"}, "the other findings follow"
    codes = [finding.code for finding in findings if finding.code != "hint"]
    assert len(codes) == len(set(codes)), "nothing is said twice"
    assert not any("embedded" in line for line in said)
    assert set(context(**given).cache_folder.iterdir()) == before and not Path("checkpoints").exists()


def test_the_corpus_of_the_dry_run_is_the_users_if_it_was_ever_prepared(
    prepared_corpus: dict[str, object], corpus: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> Observation:
        raise PipelineError("tried")

    def told(**given: object) -> str:
        said: list[str] = []
        (answer,) = checks.dry_run(context(**given), Plan(CPU, CPU), NoProgress(), said.append)
        assert (answer.level, answer.why) == ("fail", "tried")
        return said[0]

    asked: list[Path | None] = []
    monkeypatch.setattr(checks, "prepare", lambda data, _: asked.append(data.train_data))
    monkeypatch.setattr(checks, "observe_pipeline", fail)
    for given in ({}, {"batch_size": "7"}, {"trim_silence_db": "50"}):
        assert told(**prepared_corpus | given).startswith("Dry run")
    assert asked == [Path(str(prepared_corpus["train_data"]))], "what was prepared serves all but the last"
    assert "embedded" in told(train_data=str(corpus)) and asked[1:] == [None]


def test_changed_batches_fail_the_dry_run(
    prepared_corpus: dict[str, object], monkeypatch: pytest.MonkeyPatch
) -> None:
    encode = GptFrontend.encode

    def encode_and_spoil(self: GptFrontend, batch: Any, out: Any, *rest: Any) -> None:
        encode(self, batch, out, *rest)
        out["ids"][0, 0] += 1

    monkeypatch.setattr(GptFrontend, "encode", encode_and_spoil)
    ctx = context(NO_GPU, **prepared_corpus)
    answer = next(checks.dry_run(ctx, Plan(CPU, CPU), NoProgress(), lambda _: None))
    assert answer.level == "fail" and "arrived changed: ids" in answer.why


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
def test_a_real_gpu_passes(prepared_corpus: dict[str, object]) -> None:
    caps = ISOLATED | {"model_gpu_memory": "6000", "batch_size": "4"}
    try:
        findings = {
            finding.code: finding for finding in checks.check_gpus(load_values(**(prepared_corpus | caps)))
        }
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    for code in ("driver", "gpus", "caps-held", "transfer", "rehearsal", "placement", "optimisations"):
        assert findings[code].level == "pass", findings[code]
    assert "not-checked" not in findings and findings["grade"].what.startswith("Grade: ")


# What is shown


GOOD = [Finding("gpus", "pass", "1 GPU [red]"), Finding("workers", "warn", "2 of 8", "because", "give more")]
UNSEEN = [*GOOD, Finding("precision", "skip", "Not checked: there is no GPU")]
BAD = [*UNSEEN, Finding("devices", "fail", "Multi-GPU requires at least 2 GPUs", fix="drop it")]


def shown(findings: list[Finding], with_passed: bool = False) -> list[str]:
    console = Console(file=io.StringIO(), width=60)
    show_findings(findings, console, with_passed=with_passed)
    return console.file.getvalue().splitlines()  # type: ignore[attr-defined]


def test_the_table_begins_with_what_fails_and_ends_with_the_outcome() -> None:
    assert shown(GOOD)[-2:] == ["All validation checks passed: 1 passed, 1 warning", "ALL CHECKS PASSED"]
    assert shown(UNSEEN)[-1] == "NOT CHECKED: precision"
    assert not any("passed:" in line.lower() or "ALL" in line for line in shown(UNSEEN)[-2:])
    *table, last = shown(BAD)
    assert last == "CHECKS FAILED: devices" and not any("PASSED" in line for line in table)
    assert table[0].startswith("FAIL") and table[2].startswith("WARN")
    assert "Passed: gpus (--all shows them)" in table and not any(line.startswith("SKIP") for line in table)
    for part in ("because", "→ give more", "→ drop it"):
        assert part in "\n".join(table)
    everything = "\n".join(shown(BAD, with_passed=True))
    assert "1 GPU [red]" in everything and "SKIP  precision" in everything


def test_json_holds_everything() -> None:
    content = json.loads(to_json(BAD))
    assert content["passed"] is False and passed(GOOD) and not passed(BAD)
    assert content["counts"] == {"pass": 1, "warn": 1, "skip": 1, "fail": 1}
    assert [Finding(**item) for item in content["findings"]] == BAD
    json.loads(to_json(check(load_values(**WHOLE), machine(1, 4000), host())))


# The command


@pytest.mark.parametrize("here", [machine(), NO_GPU], ids=["gpu", "cpu"])
def test_without_a_corpus_the_values_of_the_file_are_judged(
    here: Machine, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Machine, "look", lambda: here)
    (tmp_path / "own.yaml").write_text("data:\n  batch_size: 16\n")
    main(["check", "--config", str(tmp_path / "own.yaml"), "--all"])
    shown = capsys.readouterr().out
    assert "16 clips per batch" in shown and "demonstration:" not in shown


def test_the_command_passes_on_a_plain_configuration_and_fails_when_something_does(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert main(["check", "--json"]) == 0 and json.loads(capsys.readouterr().out)["passed"]
    for here, words in ((machine(), "ALL CHECKS PASSED"), (NO_GPU, "NOT CHECKED: upload, compilation, precision")):
        monkeypatch.setattr(Machine, "look", lambda here=here: here)
        monkeypatch.setattr(Host, "look", lambda here=here: host() if here.gpus else NO_DRIVER)
        assert main(["check"]) == 0 and words in capsys.readouterr().out.splitlines()[-1]
    assert main(["check", "--train-data", "missing"]) == 1
    assert "CHECKS FAILED: corpus" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("command", "says"),
    [
        ("check --train-data nodir", "No such corpus folder"),
        ("check --init-from nodir", "training.init_from = nodir: there is no such file or folder"),
        ("tune --train-data nodir", "No such corpus folder"),
        ("profile --tokenizer nodir", "--tokenizer nodir: there is no such file"),
        ("export nodir --out new", "nodir: no such folder"),
    ],
)
def test_a_path_that_does_not_exist_is_answered_as_such(
    command: str, says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(command.split()) in (1, 2)
    shown = capsys.readouterr()
    assert says in shown.out + shown.err and "vocabular" not in shown.out + shown.err


def test_scripts_find_the_package_from_anywhere(tmp_path: Path) -> None:
    """Without `site` the installed link to this folder has no effect; the other packages are still found."""
    environment = os.environ | {"PYTHONPATH": sysconfig.get_path("purelib")}
    script = ROOT / "utilities/validate_gpu_optimization.py"
    command = [sys.executable, "-S", str(script), "--help"]
    result = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert result.returncode == 0 and "--gpus" in result.stdout, result.stderr
