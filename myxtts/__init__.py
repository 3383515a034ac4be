"""MyXTTS: the XTTS trainer that never lets a GPU wait.

    from pathlib import Path
    from myxtts import load_synthesizer, train
    from myxtts.config import DataSettings, Settings

    train(Settings(data=DataSettings(train_data=Path("recordings"), language="en")))
    synthesizer = load_synthesizer("checkpoints")
    voice = synthesizer.voice(["recordings/wavs/0001.wav"])
    synthesizer.speak("Hello there.", voice, "en").save("hello.wav")

A function is imported when it is first used, so that `import myxtts` and `myxtts --help` are immediate.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from myxtts.data.prepare import prepare
    from myxtts.run import train
    from myxtts.synthesis.synthesizer import load_synthesizer

__version__ = "0.1.0"
__all__ = ["__version__", "load_synthesizer", "prepare", "train"]

_HOMES = {"load_synthesizer": "synthesis.synthesizer", "prepare": "data.prepare", "train": "run"}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"myxtts.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return __all__
