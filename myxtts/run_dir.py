"""One run on disk: the weights it started with, the checkpoints of its stages, and the model they make together.

    DIR/base.safetensors     initial weights of all parts that no stage of the run trains in full
    DIR/model.json           sizes of the network, and facts about the start of the run
    DIR/vocab.json           the vocabulary, pinned: a corpus that grows later does not change it
    DIR/<stage>/step-*/      checkpoints: the part that this stage trains (see `checkpoints`)

Trains nothing and needs no corpus: `export` and `speak` read a run through this module too.
"""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Collection, Iterator, Mapping
from functools import cached_property
from pathlib import Path
from types import EllipsisType
from typing import Any, NamedTuple

import torch
from safetensors import safe_open
from torch import Tensor

from myxtts.checkpoints import (
    Checkpoints,
    Notes,
    Tensors,
    UnreadableWeights,
    file_hash,
    read_tensors,
    write_tensors,
)
from myxtts.config import BUILDS_ON, STAGE_PARTS, STAGES, Settings, stages_of
from myxtts.errors import ConfigError
from myxtts.files import write_text_atomically
from myxtts.model.gpt import add_adapters, merge_adapters
from myxtts.model.xtts import SIZES, XTTS, XTTSDims, sizes_of
from myxtts.observe.metrics import RUN_FILES
from myxtts.settings import load
from myxtts.text.tokenizer import Tokenizer
from myxtts.weights import (
    READERS_FILE,
    Provenance,
    is_trained_in,
    load_folder,
    load_state,
    require_shipped,
    shipped_files,
)

BASE_FILE, DIMS_FILE, VOCABULARY_FILE = "base.safetensors", "model.json", "vocab.json"
RESET_PREFIX = "before-reset-"
INITIAL = "initial"
"""Stands for the fingerprint of a stage that the run has not trained: it has the weights of the start."""

_log = logging.getLogger(__name__)


class StageStatus(NamedTuple):
    """How far a stage of a run is. It is stale if it was trained on other weights of an earlier stage."""

    stage: str
    state: str = "missing"  # or unfinished, complete, stale
    step: int = 0
    target: int = 0  # steps that the last command asked for
    best_loss: float | None = None
    why: str = ""  # why it is stale


class RunSummary(NamedTuple):
    """One run as `myxtts runs` lists it."""

    folder: Path
    stages: list[StageStatus]
    again: dict[str, str]  # what the command of the run, given again, does with each stage
    size: str
    num_bytes: int
    languages: list[str]
    corpus: str  # the folders; "" for the embedded one
    saved_at: float  # in seconds since 1970


def find_runs(folder: Path) -> list[RunSummary]:
    """The runs in a folder and up to two folders below it, the last saved first."""
    found = []
    for path in [path for pattern in ("", "*/", "*/*/") for path in folder.glob(f"{pattern}{DIMS_FILE}")]:
        run = RunDir(path.parent)
        is_aside = run.folder != folder and run.folder.name.startswith(RESET_PREFIX)
        try:
            found += [run.summary()] if run.has_begun and not is_aside else []
        except (UnreadableWeights, OSError) as error:
            _log.warning("%s is left out: %s", run.folder, error)
    return sorted(found, key=lambda summary: summary.saved_at, reverse=True)


class Mismatch(NamedTuple):
    """A stage that is used with other weights of an earlier stage than it was trained on; both by fingerprint."""

    stage: str
    earlier: str
    trained_on: str
    used_with: str

    def __str__(self) -> str:
        there, here = _of_step(self.trained_on), _of_step(self.used_with)
        return (
            f"{self.stage} was trained on the {self.earlier} of {there}, and this is the {self.earlier} of {here}"
        )


def mismatches(found: Mapping[str, Notes]) -> Iterator[Mismatch]:
    """The first mismatch of each stage, given the notes of the checkpoints that are used together."""
    for stage, notes in found.items():
        for earlier in reversed(BUILDS_ON.get(stage, ())):
            trained_on = notes.trained_on.get(earlier)
            used_with = found[earlier].fingerprint if earlier in found else INITIAL
            if trained_on not in (None, used_with):
                yield Mismatch(stage, earlier, str(trained_on), used_with)
                break


def _of_step(fingerprint: str) -> str:
    return "the start" if fingerprint == INITIAL else f"step {fingerprint.partition('-')[0]}"


class RunDir:
    """The folder of a run."""

    def __init__(self, folder: Path, keep: int = 3, best_by: str | EllipsisType | None = ...) -> None:
        """`best_by` is the setting of that name; by default, that of the run's last command."""
        self.folder = folder
        self._keep, self._best_by = keep, best_by

    @cached_property
    def best_by(self) -> str | None:
        """The score by which a GPT is chosen; None for the newest."""
        if not isinstance(self._best_by, EllipsisType):
            return self._best_by
        try:
            return load(self.folder / "settings.yaml", {}).settings.training.best_by
        except ConfigError:  # not written yet, or by another version
            return None

    @property
    def exists(self) -> bool:
        return (self.folder / DIMS_FILE).is_file()

    @property
    def has_begun(self) -> bool:
        """True if a checkpoint was saved; until then another start in the same folder is free to differ."""
        return self.exists and any(self.has_checkpoint(stage) for stage in STAGES)

    def has_checkpoint(self, stage: str) -> bool:
        return any(path.name.startswith(("step-", "replaced-")) for path in (self.folder / stage).glob("*step-*"))

    def newest_notes(self) -> dict[str, Notes]:
        """The notes of the last checkpoint of every stage that has one."""
        found = {stage: self.checkpoints(stage).all_notes() for stage in STAGES}
        return {stage: notes[0] for stage, notes in found.items() if notes}

    def used_notes(self) -> dict[str, Notes]:
        """The notes of the checkpoint of every stage that the run speaks with, and that later stages build on."""
        found = {stage: self.checkpoints(stage).used_notes() for stage in STAGES}
        return {stage: notes for stage, notes in found.items() if notes is not None}

    def status(self, stage: str, changed: Collection[str] = ()) -> StageStatus:
        """How far a stage is; `changed` are earlier stages that are about to change."""
        newest = self.newest_notes()
        if stage not in newest:
            return StageStatus(stage)
        notes, checkpoints = newest[stage], self.checkpoints(stage)
        known = [*checkpoints.current(), *checkpoints.evaluated()]
        validated = [found.val_loss for found in known if found.val_loss is not None]
        used = self.used_notes() | {stage: notes}
        why = next((str(found) for found in mismatches(used) if found.stage == stage), "")
        if not why and (first := next((name for name in changed if name in notes.trained_on), "")):
            why = f"it builds on {first}, which changes"
        state = "stale" if why else "complete" if notes.state["done"] else "unfinished"
        target = int(notes.state.get("total_steps", notes.step))
        return StageStatus(stage, state, notes.step, target, min(validated, default=None), why)

    def summary(self) -> RunSummary:
        """What the folder says about the run; its stages are those of the last command, and trained ones."""
        try:
            settings = load(self.folder / "settings.yaml", {}).settings
        except ConfigError:  # written by another version
            settings = Settings()
        facts, asked, changed, stages = self.started_with(), stages_of(settings), list[str](), list[StageStatus]()
        again = {}
        for stage in STAGES:
            status, then = self.status(stage), self.status(stage, changed).state
            if stage in asked:
                again[stage] = {"complete": "nothing", "unfinished": "continues", "missing": "trains it"}.get(
                    then, "starts over"
                )
                changed += [stage] * (then != "complete")
            if stage in asked or status.state != "missing":
                stages.append(status)
        newest = list(self.newest_notes().values())
        saved_at = max((notes.folder.stat().st_mtime for notes in newest), default=0.0)
        languages = sorted({code for notes in newest for code in notes.state["notes"].get("languages", [])})
        num_bytes = sum(path.stat().st_size for path in self.folder.rglob("*") if path.is_file())
        about = (str(facts.get("model.size", "")), num_bytes, languages)
        corpora = ", ".join(str(source.folder) for source in settings.data.sources)
        return RunSummary(self.folder, stages, again, *about, corpora, saved_at)

    def fingerprints(self, stage: str) -> dict[str, str]:
        """The fingerprints of the stages that this one builds on, as they are loaded."""
        loaded = {name: self.checkpoints(name).used() for name in BUILDS_ON.get(stage, ())}
        return {name: INITIAL if found is None else found.notes.fingerprint for name, found in loaded.items()}

    @property
    def vocabulary_file(self) -> Path:
        return self._undamaged(VOCABULARY_FILE)

    def checkpoints(self, stage: str) -> Checkpoints:
        return Checkpoints(self.folder / stage, self._keep, self.best_by if stage == "gpt" else None)

    def start(
        self,
        model: XTTS,
        vocabulary: Tokenizer,
        trained_in_full: Collection[str],
        facts: Mapping[str, Any],
        readers: Path | None = None,
    ) -> None:
        """Write the folder of a new run, with a copy of `readers`; `started_with` returns the `facts`."""
        self.folder.mkdir(parents=True, exist_ok=True)
        state = {
            name: tensor
            for name, tensor in model.state_dict().items()
            if not any(is_trained_in(stage, name) for stage in trained_in_full)
        }
        write_tensors(self.folder / BASE_FILE, state)
        vocabulary.save(self.folder / VOCABULARY_FILE)
        if readers is not None:
            shutil.copyfile(readers, self.folder / READERS_FILE)
        names = (BASE_FILE, VOCABULARY_FILE, *([READERS_FILE] if readers is not None else []))
        checksums = {name: file_hash(self.folder / name) for name in names}
        content = {"dims": model.dims.to_dict(), "started_with": dict(facts), "xxh3": checksums}
        write_text_atomically(self.folder / DIMS_FILE, json.dumps(content, indent=2))

    def reset(self) -> Path | None:
        """Move everything of an earlier run to a subfolder and return that; None if there is nothing."""
        files = (BASE_FILE, DIMS_FILE, VOCABULARY_FILE, READERS_FILE, "tensorboard", "report.html", "sample.wav")
        reports = ("reference.wav", "evaluation", "samples", *(name for name in RUN_FILES if "/" not in name))
        present = [path for name in (*STAGES, *files, *reports) if (path := self.folder / name).exists()]
        if not present:
            return None
        numbers = [path.name.removeprefix(RESET_PREFIX) for path in self.folder.glob(f"{RESET_PREFIX}*")]
        number = 1 + max((int(number) for number in numbers if number.isdigit()), default=0)
        aside = self.folder / f"{RESET_PREFIX}{number}"
        aside.mkdir(parents=True)
        for path in present:
            path.rename(aside / path.name)
        return aside

    def dims(self) -> XTTSDims:
        try:
            return XTTSDims.from_dict(self._description()["dims"])
        except (KeyError, TypeError) as error:
            raise UnreadableWeights(f"{self.folder} is no run of MyXTTS: {DIMS_FILE}: {error}") from None

    def started_with(self) -> dict[str, Any]:
        """The facts about the start of the run."""
        return dict(self._description().get("started_with", {}))

    @property
    def from_scratch(self) -> bool:
        """True if neither this run nor the one it was started from began with published weights."""
        facts = self.started_with()
        return bool(facts.get("from_scratch", facts.get("training.init_from") is None))

    def is_whole(self, without: Collection[str] = ()) -> bool:
        """True if every part of the model is on disk, in the initial weights or a checkpoint of another stage."""
        with safe_open(self._undamaged(BASE_FILE), "pt") as file:
            kept = tuple(file.keys())
        return all(
            (self.has_checkpoint(stage) and stage not in without)
            or any(is_trained_in(stage, name) for name in kept)
            for stage in STAGES
        )

    def languages(self) -> list[str]:
        """Languages that the GPT was trained on, here or before the run started; empty if they are not known."""
        facts, gpt = self.started_with(), self.newest_notes().get("gpt")
        own = gpt.state["notes"].get("languages", []) if gpt is not None else []
        return sorted({*facts["languages"], *own}) if "languages" in facts else []

    def trained_with(self) -> dict[str, Any]:
        """Settings of the GPT's training that speaking depends on, here or before the run started."""
        gpt = self.newest_notes().get("gpt")
        own = gpt.state["notes"].get("trained_with") if gpt is not None else None
        return dict(own or self.started_with().get("trained_with", {}))

    def initially_untrained(self) -> list[str]:
        """Stages whose weights were random when the run started."""
        before = self.started_with().get("untrained", STAGES if self.from_scratch else ())
        return [stage for stage in STAGES if stage in before]

    def untrained(self) -> list[str]:
        """Stages whose weights are random: trained neither here nor in the weights the run was started from."""
        return [stage for stage in self.initially_untrained() if not self.has_checkpoint(stage)]

    def _description(self) -> dict[str, Any]:
        path = self.folder / DIMS_FILE
        try:
            return dict(json.loads(path.read_text(encoding="utf-8")))
        except (OSError, ValueError, TypeError, RecursionError) as error:
            raise UnreadableWeights(f"{self.folder} is no run of MyXTTS: {path.name}: {error}") from None

    def vocabulary(self) -> Tokenizer:
        return Tokenizer.load(self.vocabulary_file)

    def readers_file(self) -> Path | None:
        """The voices that the GPT learnt before the run; None if they are unknown or the run trained its GPT."""
        has_some = (self.folder / READERS_FILE).is_file() and not self.has_checkpoint("gpt")
        return self._undamaged(READERS_FILE) if has_some else None

    def _undamaged(self, name: str) -> Path:
        """The path of a file that the run was started with; raises an error if it has changed since."""
        path, expected = self.folder / name, self._description().get("xxh3", {}).get(name)
        if expected is not None and file_hash(path) != expected:
            advice = "Restore it from a backup, or start over with --reset-training."
            raise UnreadableWeights(f"{path} does not match its checksum.\n{advice}")
        return path

    def load_model(
        self,
        fresh: XTTS | None = None,
        without: Collection[str] = (),
        best_gpt: bool = False,
        warn: bool = True,
    ) -> XTTS:
        """The model of the run: its initial weights, then the newest checkpoint of every stage.

        Of the GPT it is the one that `best_by` chooses; with `best_gpt`, the best one where that is the newest.
        Parts that were never saved come from `fresh`. Stages `without` keep their initial weights, for a caller
        that loads them itself. Stages that were not trained together get a warning in the log.
        """
        dims = self.dims()
        state: Tensors = dict(read_tensors(self._undamaged(BASE_FILE)))
        adapters: dict[str, Tensor] = {}
        used: dict[str, Notes] = {}
        rank = 0
        for stage in STAGES:
            loaded = None if stage in without else self.checkpoints(stage).used()
            if loaded is None:
                continue
            if stage == "gpt" and best_gpt:
                loaded = self.checkpoints(stage).best(optimizer=False)
                if loaded is None:
                    raise UnreadableWeights(
                        f"No checkpoint of {stage} in {self.folder} is known to be the best: none was validated, "
                        "or it is damaged. Leave out --best to use the newest."
                    )
            used[stage] = loaded.notes
            if loaded.state["notes"]["identity"].get("training.ema_decay") and not loaded.notes.is_averaged:
                loaded = self.checkpoints(stage).read(loaded.folder)
            averaged = {name.removeprefix("ema."): value for name, value in loaded.optimizer.items()}
            weights = averaged_weights(stage, loaded.weights, averaged)
            rank = int(loaded.state["notes"].get("lora_rank", 0)) if stage == "gpt" else rank
            kept = {name: value for name, value in weights.items() if is_trained_in(stage, name)}
            (adapters if stage == "gpt" and rank else state).update(kept)
        if warn:
            self._warn_of_mismatches(used)
        with torch.device("meta"):
            model = XTTS(dims)
        if fresh is not None:
            state = {**{name: value for name, value in fresh.state_dict().items() if name not in state}, **state}
        absent = set(load_state(model, state, str(self.folder))) - {"mel_stats"}
        missing = [stage for stage in STAGES if stage not in without and absent.intersection(STAGE_PARTS[stage])]
        if missing:
            raise UnreadableWeights(
                f"The run in {self.folder} has not trained {', '.join(missing)} yet: there are no weights of it.\n"
                f"Train it first: --stages {','.join(missing)}"
            )
        if adapters:
            add_adapters(model.gpt, rank)
            model.load_state_dict(adapters, strict=False)
            merge_adapters(model.gpt)
        model.speaker_is_trained = "speaker" not in self.untrained()
        return model

    def _warn_of_mismatches(self, used: Mapping[str, Notes]) -> None:
        usual = self.used_notes()
        for found in mismatches(used):
            cure = f"the command of the run, or train --stages {found.stage}, trains {found.stage} again"
            if usual[found.earlier].fingerprint == found.trained_on if found.earlier in usual else False:
                cure = f"leave out --best to use the {found.earlier} that {found.stage} was trained on"
            _log.warning("WARNING: %s: %s. Speech gets worse; %s.", self.folder, found, cure)


def averaged_weights(
    stage: str, weights: Mapping[str, Tensor], averaged: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """Weights, replaced by their running averages where the run keeps these."""
    merged = dict(weights)
    for name, value in averaged.items():
        if stage == "decoder" and name.startswith("generator."):
            name = name.replace("generator", STAGE_PARTS["decoder"][0], 1)
        if name in merged:
            merged[name] = value
    return merged


def initial_model(settings: Settings, vocabulary: Tokenizer) -> XTTS:
    """The model that a new run starts with: that of `init_from`, or a random one from the seed."""
    torch.manual_seed(settings.training.seed)
    source = settings.training.init_from
    if source is not None:
        is_run = RunDir(source).exists
        model = RunDir(source).load_model() if is_run else load_folder(source, vocabulary).model
        found = sizes_of(model.dims)
        if settings.model.size not in found:
            raise ConfigError(
                f"The weights in {source} are of size {found[0] if found else 'unknown'}, and --model-size is "
                f"{settings.model.size}; give --model-size {found[0] if found else 'normal'}"
            )
        if model.dims.gpt.text_tokens != vocabulary.num_tokens:
            raise ConfigError(
                f"The run in {source} knows {model.dims.gpt.text_tokens} text tokens, and the vocabulary given "
                f"has {vocabulary.num_tokens}; leave out --tokenizer to use that of the run"
            )
        return model
    dims = SIZES[settings.model.size]
    return XTTS(dims.with_vocabulary(vocabulary.num_tokens, vocabulary.start_id, vocabulary.stop_id))


def inherited(source: Path | None) -> dict[str, Any]:
    """Facts for `RunDir.start` about the weights of `init_from`, which may be an unfinished run."""
    if source is None:
        return {"from_scratch": True, "untrained": list(STAGES), "languages": []}
    run = RunDir(source)
    if run.exists:
        about = {"languages": tuple(run.languages()), "guidance": run.started_with().get("guidance", 0.0)}
        known = Provenance(tuple(run.untrained()), run.from_scratch, **about)
        learnt = run.trained_with()
    else:
        known = Provenance.read(source)
        learnt = {"training.text_dropout": known.text_dropout, "training.code_noise": known.code_noise}
    has_vocabulary = (source / VOCABULARY_FILE).is_file()  # published weights know the languages of theirs
    languages = known.languages or (Tokenizer.load(source).languages if has_vocabulary else ())
    untrained = list(known.untrained)
    facts = {"from_scratch": known.from_scratch, "untrained": untrained, "languages": sorted(languages)}
    return facts | {"trained_with": learnt, "guidance": known.guidance}


def readers_file(folder: Path) -> Path | None:
    """The voices that the GPT of a run or of a folder of weights learnt, if they are known."""
    run = RunDir(folder)
    if run.exists:
        return run.readers_file()
    if not (path := folder / READERS_FILE).is_file():
        return None
    return require_shipped(folder, READERS_FILE) if READERS_FILE in shipped_files(folder) else path
