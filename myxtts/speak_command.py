"""`myxtts speak`: a sentence or a file of them, in the voice of a recording, to a sound file."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from myxtts.config import LANGUAGES
from myxtts.errors import ConfigError

ABOUT = "speak a text in the voice of a recording"


def add_speak(commands: Any) -> None:
    """Add the command to the command line."""
    speak = commands.add_parser("speak", help=ABOUT, description=ABOUT, allow_abbrev=False)
    speak.add_argument("text", nargs="?", help="what to say")
    speak.add_argument(
        "--from-file", type=Path, metavar="FILE", help="a text file to read instead; - for the input"
    )
    speak.add_argument(
        "--model", type=Path, default=Path("checkpoints"), metavar="DIR", help="a run or an XTTS-v2 folder"
    )
    speak.add_argument(
        "--speaker", type=Path, action="append", metavar="FILE", help="a recording of the voice; may be repeated"
    )
    speak.add_argument("--voice", metavar="NAME", help="a voice kept under this name; with --speaker: keep it so")
    speak.add_argument("--language", choices=LANGUAGES, required=True, help="language of the text")
    speak.add_argument("--out", type=Path, default=Path("speech.wav"), metavar="FILE", help="wav or flac to write")
    speak.add_argument("--stream", action="store_true", help="write the sound while it is made")
    speak.add_argument("--speed", type=float, default=1.0, help="2 is twice as fast [default: 1]")
    speak.add_argument("--seed", type=int, help="the same seed says it the same way")
    speak.add_argument("--temperature", type=float, help="how adventurous [default: 0.75]")
    speak.add_argument(
        "--repetition-penalty", type=float, help="against repeated codes [default: 5; 1 for a run from scratch]"
    )
    speak.add_argument(
        "--guidance", type=float, help="above 1 the text counts more, for a run with --text-dropout [default: 1]"
    )
    speak.add_argument(
        "--central", action="store_true", default=None, help="the middle of the likely codes: clearer, but flatter"
    )
    speak.add_argument("--best", action="store_true", help="the GPT that validated best, not the newest")
    speak.add_argument("--vocoder", choices=["hifigan", "griffin-lim"], help="what makes the sound")
    speak.set_defaults(run=run, refuse=speak.error)


def run(options: argparse.Namespace) -> int:
    """Load the model, find the voice, speak and write."""
    from myxtts.assembly.voice import load_synthesizer
    from myxtts.data.fill import NoProgress
    from myxtts.screens import ProgressLines, show_lines
    from myxtts.synthesis.loudness import FAINT_NOTE, is_faint
    from myxtts.synthesis.speech import as_asked, check_output
    from myxtts.synthesis.voices import VoiceFolder

    text = _text(options)
    if not options.speaker and not options.voice:
        raise ConfigError(
            "speak: name a recording of the voice with --speaker FILE, or a kept one with --voice NAME"
        )
    check_output(options.out)
    synthesizer = load_synthesizer(options.model, vocoder=options.vocoder, best_gpt=options.best)
    voices = VoiceFolder(options.model / "voices")
    if options.speaker:
        voice = synthesizer.voice(options.speaker, options.voice)
        if options.voice:
            voices.save(voice)
    else:
        voice = voices.load(options.voice, synthesizer.fingerprint)
    sampling = as_asked(synthesizer.sampling, options)
    manner = {"sampling": sampling, "speed": options.speed, "seed": options.seed}
    manner["progress"] = ProgressLines() if sys.stderr.isatty() else NoProgress()
    if options.stream:
        stream = synthesizer.stream(text, voice, options.language, **manner)
        faint = _write_stream(options.out, stream)
        report = stream.report
    else:
        speech = synthesizer.speak(text, voice, options.language, **manner)
        speech.save(options.out)
        faint, report = is_faint(speech.wave), speech.report
    show_lines([*report.notes(), *([FAINT_NOTE] if faint else []), str(options.out)])
    return 0


def _text(options: argparse.Namespace) -> str:
    if (options.text is None) == (options.from_file is None):
        raise ConfigError('speak: give either a text, as in myxtts speak "Hello.", or --from-file FILE')
    if options.text is not None:
        return str(options.text)
    try:
        path = Path("/dev/stdin") if str(options.from_file) == "-" else options.from_file
        return str(path.read_text(encoding="utf-8-sig"))
    except (OSError, UnicodeDecodeError) as error:
        why = "it is no text in UTF-8" if isinstance(error, UnicodeDecodeError) else error.strerror or str(error)
        raise ConfigError(f"speak: --from-file {options.from_file} cannot be read: {why}") from None


def _write_stream(path: Path, stream: Any) -> bool:
    """Write every piece as soon as it is there; whether hardly anything can be heard in all of them."""
    from contextlib import closing

    import soundfile

    from myxtts.model.vocoder import OUTPUT_SAMPLE_RATE
    from myxtts.synthesis.loudness import Loudness

    loudness = Loudness()
    with closing(stream), soundfile.SoundFile(path, "w", OUTPUT_SAMPLE_RATE, 1, "PCM_16") as file:
        for piece in stream:
            file.write(piece)
            file.flush()
            loudness.add(piece)
    return loudness.is_faint
