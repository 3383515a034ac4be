"""Every setting of MyXTTS, and the few constants of the XTTS network that all layers share.

One dataclass per section of the YAML file; the string below a field is its description everywhere: in
`--help`, in `configs/config.yaml` and in `docs/configuration.md`. A setting is added here and nowhere else.
This module knows neither files, flags nor error messages (`myxtts.settings` does), nor what a setting does:
the layer that reads a setting gives it its effect.
"""

# ruff: noqa: RUF009 - `setting` returns dataclasses.field, which is what a default may call
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

LANGUAGE_NAMES = {
    "en": "English", "es": "Spanish", "fr": "French", "de": "German", "it": "Italian", "pt": "Portuguese",
    "pl": "Polish", "tr": "Turkish", "ru": "Russian", "nl": "Dutch", "cs": "Czech", "ar": "Arabic",
    "zh": "Chinese", "ja": "Japanese", "hu": "Hungarian", "ko": "Korean", "hi": "Hindi", "fa": "Persian",
}  # fmt: skip
LANGUAGES = tuple(LANGUAGE_NAMES)
"""XTTS-v2's seventeen languages and Persian, in the order of their numbers in a cache."""

SAMPLE_RATE = 22050
"""Samples per second of everything the network hears; recordings of any other rate are resampled."""
HOP_SAMPLES = 256
"""Samples between two mel frames."""
SAMPLES_PER_CODE = 1024
"""Samples that one DVAE code stands for: four mel frames."""
NUM_STOPS = 4
"""STOPs behind the codes of a clip that the GPT learns to predict, as XTTS-v2 did."""
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


MODEL_SIZES = ("tiny", "small", "normal", "big")
STAGE_PARTS = {
    "dvae": ("dvae", "mel_stats"),
    "gpt": ("gpt",),
    "decoder": ("hifigan_decoder.waveform_decoder",),
}
"""The parts of the model that each training stage trains, the main one first; stages in the order of training."""
STAGES = tuple(STAGE_PARTS)
OPTIMIZATION_LEVELS = ("basic", "enhanced", "experimental")
PRESETS = ("8gb", "12gb", "16gb", "24gb", "40gb")


def setting(
    default: Any,
    *,
    flag: str = "",
    on_flags: tuple[str, ...] = (),
    off_flags: tuple[str, ...] = (),
    aliases: tuple[str, ...] = (),
    choices: tuple[str, ...] = (),
    minimum: float | None = None,
    maximum: float | None = None,
    above: float | None = None,
    metavar: str = "",
) -> Any:
    """A field with its default and the values it accepts (`above` is an exclusive minimum).

    `flag` replaces the flag derived from the field's name; `on_flags` and `off_flags` are further spellings
    for a switch; `aliases` are further keys of the YAML file, dotted when they stand in another section.
    """
    metadata = {name: value for name, value in locals().items() if name != "default"}
    return field(default=default, metadata=metadata)


@dataclass(frozen=True, kw_only=True)
class ModelSettings:
    """The network."""

    size: str = setting("tiny", flag="--model-size", choices=MODEL_SIZES)
    """Size of the network. `normal` is exactly XTTS-v2 and loads its weights; `tiny` and `small` are for
    trying things out and for small cards, `big` for large corpora trained from scratch."""

    gradient_checkpointing: bool = setting(False)
    """Recomputes activations layer by layer in the backward pass: less GPU memory for more time. Turn it on
    when a batch does not fit the card."""

    lora_rank: int = setting(0, minimum=0, maximum=1024)
    """Rank of the LoRA adapters trained instead of the whole GPT; 0 trains every weight. 16 to 64 is usual for
    fine-tuning `normal` on small cards."""

    dropout: float = setting(0.0, minimum=0, maximum=0.9)
    """Share of the GPT's embeddings and residuals dropped in training; XTTS-v2 was trained with 0.1. Off by
    default, for it slows learning where data is plenty; 0.1 keeps small corpora from being learnt by heart."""


@dataclass(frozen=True, kw_only=True)
class DataSettings:
    """The corpus, how it is prepared, and the pipeline that carries its batches to the GPU."""

    train_data: Path | None = setting(None, metavar="DIR")
    """Folder of the training corpus: `metadata.csv` beside `wavs/`, as LJSpeech has it. `null` uses the
    small corpus embedded in the package."""

    val_data: Path | None = setting(None, metavar="DIR")
    """Folder of the validation corpus. `null` sets a fixed share of the training data aside
    (`val_fraction`)."""

    val_fraction: float = setting(0.02, minimum=0, maximum=0.5)
    """Share of the training clips kept for validation when no validation corpus is named. Which clips these
    are depends only on the clips, so a run that is started again validates on the same ones."""

    reference_clip: str = setting("other", choices=("other", "same"))
    """Where the reference voice of a training clip is cut from. `other` takes another clip of the same speaker in
    the batch, as in synthesis, so that no word can be overheard there; `same` the clip itself, as XTTS-v2's own
    training does. A clip whose speaker nobody names, or who has no other in the batch, is its own."""

    language: str | None = setting(None, choices=LANGUAGES)
    """Language of the clips whose metadata names none; `null` detects it from their text. Name it when all
    clips share one language: that is quicker and never wrong."""

    tokenizer: Path | None = setting(None, metavar="FILE")
    """A `vocab.json` to use as it is, such as XTTS-v2's. `null` trains a vocabulary on the corpus."""

    vocab_size: int = setting(1024, minimum=256, maximum=65535)
    """Size of a vocabulary trained on the corpus. 1024 suits one language and up to a few dozen hours;
    XTTS-v2 uses 6681 for seventeen languages. Has no effect when `tokenizer` names a vocabulary."""

    use_phonemes: bool = setting(False)
    """Feeds phonemes from espeak-ng to the model instead of letters. Needs the extra `myxtts[phonemes]` and
    a model trained that way; XTTS-v2's weights expect letters."""

    cache_dir: Path | None = setting(None, metavar="DIR")
    """Where prepared corpora are kept. `null` uses `.myxtts` inside the corpus folder, or your user's cache
    folder when the corpus is read-only. Changed settings never meet a stale cache: nothing needs
    deleting."""

    min_clip_seconds: float = setting(0.5, above=0, metavar="SECONDS")
    """Shorter clips are set aside, with the reason."""

    max_text_length: int = setting(200, minimum=8, maximum=400)
    """Longest text in tokens; clips with a longer one are set aside, never cut. XTTS-v2 has room for
    400."""

    max_mel_frames: int = setting(800, minimum=64, maximum=2416)
    """Longest clip in mel frames of 256 samples; longer ones are set aside, never cut. 800 frames are 9.3
    seconds, XTTS-v2 has room for 2416 (28 seconds); memory grows with it."""

    trim_silence_db: float = setting(0.0, minimum=0, maximum=120, metavar="DB")
    """Cuts from both ends of a clip what is this many decibels below its loudest part; 0 leaves clips as
    they are. Try 40 when recordings start or end with long pauses."""

    batch_size: int = setting(16, minimum=1)
    """Clips per micro-step. Raise it until the GPU's memory is used; when it does not fit, halve it and
    double `gradient_accumulation_steps`."""

    pad_to_fixed_length: bool = setting(
        True, on_flags=("--enable-static-shapes",), off_flags=("--disable-static-shapes",)
    )
    """Gives every batch the same shapes, so that the step is compiled once and nothing is allocated after
    warm-up. Off saves the last few per cent of padding and costs recompilations."""

    num_workers: int = setting(16, minimum=1)
    """Threads and processes that prepare the corpus and load batches; never more are started than the
    machine can use."""

    prefetch_buffer_size: int = setting(16, minimum=1)
    """Batches kept ready in host memory. Follows the workers and the free memory unless you set it."""

    pipeline_buffer_size: int = setting(50, flag="--buffer-size", minimum=1)
    """Batches kept ready ahead of the model in all: on the GPU as far as they fit, the rest in pinned host
    memory. Follows the workers and the free memory unless you set it."""

    model_start_delay: float = setting(2.0, minimum=0, metavar="SECONDS")
    """Training starts as soon as the buffers are full, and at the latest this many seconds after the first
    batch is ready."""

    data_gpu: int | None = setting(None, minimum=0, metavar="I")
    """Index of the GPU that prepares batches and runs everything frozen. Give it together with `model_gpu`
    to train on two GPUs; leave both out to do everything on one."""

    model_gpu: int | None = setting(None, minimum=0, metavar="J")
    """Index of the GPU that trains. Give it together with `data_gpu`."""

    enable_memory_isolation: bool = setting(False)
    """Holds each GPU to its cap (`data_gpu_memory`, `model_gpu_memory`), so that neither role can take
    memory that something else needs; exceeding a cap ends the run with the role's name."""

    data_gpu_memory: int = setting(8192, minimum=256, metavar="MB")
    """Cap of the data GPU in MB, under `enable_memory_isolation`."""

    model_gpu_memory: int = setting(16384, minimum=256, metavar="MB")
    """Cap of the model GPU in MB, under `enable_memory_isolation`."""

    native_loading: bool = setting(True, aliases=("use_tf_native_loading",))
    """Gathers batches from the packed cache without any Python per sample. Off decodes the audio files for
    each batch: for comparison, and for corpora too large to pack."""

    mixed_precision: bool = setting(True)
    """Computes in bf16 where that is safe, with weights and sums in fp32. Turn it off only to compare."""

    prefetch_to_gpu: bool = setting(True)
    """Uploads batches before the model asks for them."""

    enhanced_gpu_prefetch: bool = setting(True)
    """Uploads from pinned memory on a copy stream of its own, so that copies run beside computation."""

    optimize_cpu_gpu_overlap: bool = setting(True)
    """Runs the data role's kernels on a stream of their own, beside the training step."""


@dataclass(frozen=True, kw_only=True)
class TrainingSettings:
    """What is trained, for how long, and what is kept."""

    stages: tuple[str, ...] | None = setting(None, choices=STAGES)
    """Which parts to train, in this order: `dvae` (sound to codes), `gpt` (text to codes), `decoder` (back
    to sound). `null` trains all that a start from scratch needs, and only `gpt` with `init_from`."""

    init_from: Path | None = setting(None, metavar="DIR")
    """Folder of weights to start from, such as a downloaded XTTS-v2. `null` starts from scratch."""

    checkpoint_dir: Path = setting(Path("checkpoints"), metavar="DIR")
    """Folder of the run: checkpoints, settings, logs. A run found there is continued from its newest good
    checkpoint."""

    reset_training: bool = setting(False)
    """Starts over instead of continuing the run in `checkpoint_dir`."""

    epochs: int = setting(500, minimum=1)
    """Passes over the training data; training ends here or at `max_steps`, whichever comes first."""

    max_steps: int | None = setting(None, minimum=1)
    """Optimiser steps after which training ends; `null` leaves it to `epochs`."""

    dvae_steps: int | None = setting(None, minimum=1)
    """Optimiser steps of the stage `dvae`, in place of `epochs` and `max_steps`; `null` keeps to those."""

    decoder_steps: int | None = setting(None, minimum=1)
    """Optimiser steps of the stage `decoder`, in place of `epochs` and `max_steps`; `null` keeps to those."""

    learning_rate: float | None = setting(None, flag="--lr", above=0, maximum=1)
    """Highest learning rate of the schedule. `null` takes each stage's own, lower with `init_from`."""

    warmup_steps: int = setting(500, minimum=0)
    """Optimiser steps over which the learning rate rises from zero; afterwards it falls along a cosine."""

    gradient_accumulation_steps: int = setting(1, flag="--grad-accum", minimum=1)
    """Micro-steps per optimiser step: a batch this many times `batch_size` in the memory of one."""

    weight_decay: float = setting(0.01, minimum=0, maximum=1)
    """Weight decay of AdamW; norms, biases and embeddings are always spared."""

    grad_clip: float = setting(1.0, minimum=0)
    """Largest norm of the gradient; larger ones are scaled down to it. 0 turns clipping off."""

    label_smoothing: float = setting(0.0, minimum=0, maximum=0.5)
    """Label smoothing of the GPT's losses; 0, as in XTTS-v2, is off."""

    code_noise: float = setting(0.0, minimum=0, maximum=0.9)
    """Share of the codes that the GPT hears replaced by others at random while it trains. It then leans more on
    the text, which helps where there are only a few hours of speech; 0, as in XTTS-v2, is off."""

    text_dropout: float = setting(0.0, minimum=0, maximum=0.5)
    """Share of the clips whose text the GPT does not get to read while it trains. It then knows how speech goes on
    without a text, and `myxtts speak --guidance` can make the text count more; 0, as in XTTS-v2, is off."""

    ema_decay: float = setting(0.0, minimum=0, maximum=0.99999)
    """Keeps a running average of the weights with this decay beside them, and validates and exports that; 0
    is off. 0.999 is a usual value."""

    early_stop: int = setting(0, minimum=0)
    """Ends training after this many validations in a row without improvement; 0 never does."""

    seed: int = setting(1234, minimum=0, maximum=2**32 - 1)
    """Seed of initial weights, order of clips, reference crops: the same seed gives the same run."""

    log_step: int = setting(10, minimum=1)
    """Optimiser steps between two progress lines and entries of the logs."""

    val_step: int = setting(1000, minimum=1)
    """Optimiser steps between two validations."""

    save_step: int = setting(1000, minimum=1)
    """Optimiser steps between two checkpoints: the most work that a crash can cost."""

    keep_checkpoints: int = setting(3, flag="--keep", minimum=1)
    """Newest checkpoints kept, besides the best one; older ones are deleted."""

    optimization_level: str = setting("enhanced", choices=OPTIMIZATION_LEVELS)
    """Named bundle of settings, printed when applied; what you set yourself wins over it. `basic` is the
    plain and predictable one, `enhanced` the fast one, `experimental` tries what is not yet proven."""

    preset: str | None = setting(None, choices=PRESETS)
    """Named settings for a card with this much memory, printed when applied; what you set yourself wins over
    them. `null` applies none."""

    enable_graph_mode: bool = setting(True)
    """Runs the training step as a compiled or captured graph; off runs it eagerly, which is slower and
    easier to debug."""

    enable_xla_compilation: bool = setting(True, aliases=("data.enable_xla",))
    """Compiles the training step with `torch.compile`; the first step takes longer for it."""

    enable_eager_debug: bool = setting(False)
    """Runs eagerly and synchronously with anomaly checks, slowly, to find the operation that makes a NaN."""


@dataclass(frozen=True, kw_only=True)
class Settings:
    """All settings of one run; never changed once loaded."""

    model: ModelSettings = ModelSettings()
    data: DataSettings = DataSettings()
    training: TrainingSettings = TrainingSettings()
