"""Runs, corpora and a studio over them, without training: files as runs leave them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import soundfile as sf
import torch
from conftest import make_voice, step_record, validation_record, write_corpus
from review_fixtures import HOSTILE, collected
from serve_fixtures import hosted
from synthesis_fixtures import make_model, speaking, vocabulary

from myxtts.checkpoints import Checkpoints, Snapshot
from myxtts.run_dir import RunDir
from myxtts.synthesis.synthesizer import Synthesizer
from myxtts.synthesis.voices import Voice, VoiceLibrary
from myxtts.web.limits import Limits
from myxtts.web.serve import make_app
from myxtts.web.speech import HostedModel, Models
from myxtts.web.studio import Studio

TEXTS = ["The harbour was quiet today.", HOSTILE, "باران عصر بند آمد."]
PROCESS = """
import signal, sys, time
from pathlib import Path
sys.path.insert(0, sys.argv[1])
from myxtts.files import lock
asked = []
signal.signal(signal.SIGINT, lambda *_: asked.append(1))
with lock(Path(sys.argv[2])):
    print("held", flush=True)
    while not asked:
        time.sleep(0.02)
    Path(sys.argv[2], "saved").write_text("yes")
"""
"""Holds the lock of a run until SIGINT, as training does."""


def write_run(folder: Path, loss: float = 3.0, settings: str = "", sentences: list[str] = TEXTS) -> Path:
    """A run whose GPT has reported ten times and spoken twice."""
    (folder / "samples").mkdir(parents=True)
    RunDir(folder).start(make_model(), vocabulary(), [], {})
    (folder / "settings.yaml").write_text(settings or "training:\n  max_steps: 100\n", encoding="utf-8")
    lines: list[dict[str, Any]] = [{"kind": "begin", "stage": "gpt", "step": 0}]
    for number in range(1, 11):
        lines.append(step_record(10 * number, losses={"total": loss + 3 / number}, total_steps=100))
    lines += [validation_record(50, loss + 0.5), validation_record(100, loss)]
    for step in (50, 100):
        rows = []
        for number, text in enumerate(sentences):
            for name in (f"{step}-{number}.wav", f"recorded-{number}.wav"):
                sf.write(folder / "samples" / name, make_voice(0.3, 8000, seed=number), 8000)
            about = {"text": text, "language": "en", "problem": "", "reference": "x"}
            rows.append({**about, "file": f"{step}-{number}.wav", "recording": f"recorded-{number}.wav"})
        rows.append({"text": "Escape.", "file": "../../outside.wav", "recording": "/etc/passwd"})
        lines.append({"kind": "spoken", "stage": "gpt", "step": step, "sentences": rows})
    notes = {"languages": ["en", "fa"], "identity": {}}
    state = {"done": False, "total_steps": 200, "val_loss": loss, "notes": notes}
    checkpoints = Checkpoints(folder / "gpt", keep=1)
    checkpoints.save(100, Snapshot({"gpt.w": torch.zeros(1)}, {}, state))
    checkpoints.close()
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    return folder


def write_places(folder: Path) -> tuple[Path, Path]:
    """Folders with two runs and two corpora."""
    runs, corpora = folder / "runs", folder / "corpora"
    sf.write(folder / "outside.wav", make_voice(0.3, 8000), 8000)
    write_run(runs / "first", 3.0, f"data:\n  train_data: {corpora / 'tales'}\ntraining:\n  max_steps: 100\n")
    write_run(runs / "second", 2.5, "data:\n  batch_size: 7\ntraining:\n  max_steps: 100\n")
    write_corpus(corpora / "tales")
    with open(corpora / "tales" / "metadata.csv", "a", encoding="utf-8") as file:
        file.write(f"missing|{HOSTILE}\n")
    collected(corpora / "collected", 6)
    return runs, corpora


def make_studio(folder: Path, synthesizer: Synthesizer, anna: Voice, port: int = 4321) -> tuple[Studio, Models]:
    """A studio with a small random network; its runs and corpora are in `folder`."""
    models = Models([hosted(folder, synthesizer, anna)])

    def load(name: str, _: Path) -> HostedModel:
        return HostedModel(name, speaking(), VoiceLibrary(folder / name))

    runs, corpora = folder / "runs", folder / "corpora"
    return Studio(models, load, [runs], [corpora], ("127.0.0.1", port)), models


def application(studio: Studio, models: Models, key: str = "") -> Any:
    limits = Limits(key, per_minute=100_000)
    return studio.with_api(make_app(models, limits), key)
