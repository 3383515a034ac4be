"""Prepares a sharded corpus: plans shards, runs their jobs, and joins what they made.

A job makes one package (see `shards`) in a process of its own: a crash costs that job only. Jobs run in processes
of this machine, as Ray tasks on a cluster, or divided among processes that know nothing of each other (Slurm). The
plan depends on the sources and on what the corpus holds already, so all of them make the same one.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import logging
import os
import re
import threading
import uuid
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple, Protocol, TypeVar

import numpy as np
import xxhash

from myxtts.config import LANGUAGES, SAMPLE_RATE, DataSettings
from myxtts.data.clips import DecodeOptions
from myxtts.data.corpus import METADATA_FILES
from myxtts.data.locations import Entry, Location, answered, shard_cache
from myxtts.data.pool import WorkerContext, behave_as_worker
from myxtts.data.shards import (
    FORMAT,
    Package,
    ShardedCorpus,
    ShardSpec,
    content_settings,
    ids_folder,
    join_ids,
    join_shards,
    location_of,
    read_corpus_file,
    refuse_query,
    remove_leftovers,
    url_of,
    write_ids,
    write_shard,
)
from myxtts.data.sources import Unit, open_source
from myxtts.data.store import cannot_write, checked_json, is_locked_alone, only_process, user_cache
from myxtts.errors import INSTALL_EXTRA, ConfigError, DatasetError, MyXTTSError, Progress, progress_bar
from myxtts.host import usable_cores
from myxtts.text.tokenizer import Tokenizer, train

ATTEMPTS = 12  # to run a job whose process dies
CRASHES = 3  # at the same recording, after which it is set aside
RAY_RETRIES = 16  # of a task whose machine is lost
_LOOKUPS = 16  # packages that are looked for at once
_PACKAGE = re.compile(r"(?:shards/|ids-[0-9a-f]+/|(?=index-))((?:index-)?[0-9a-f]{20})/")

_log = logging.getLogger(__name__)
_starting = threading.Lock()  # processes are started and end one at a time


class Job(Protocol):
    """Makes the package at `target`; it can be sent to another machine."""

    @property
    def target(self) -> Location: ...
    def run(self, report: Callable[[int], object], skip: set[int]) -> object: ...


@dataclass(frozen=True)
class ShardJob:
    spec: ShardSpec
    target: Location

    def run(self, report: Callable[[int], object], skip: set[int]) -> None:
        if self.spec.name != self.target.name:
            raise DatasetError("This machine has other versions of MyXTTS or its libraries than that of the plan")
        write_shard(self.spec, self.target, report, skip)


@dataclass(frozen=True)
class IdsJob:
    shard: Location
    target: Location
    vocabulary: str

    def run(self, report: Callable[[int], object], skip: set[int]) -> None:
        del report, skip
        write_ids(self.shard, self.target, Tokenizer(self.vocabulary))


# Running


class Supervisor:
    """Runs jobs, each in a new process, any number of times until it succeeds. Any thread may call."""

    def __init__(self) -> None:
        self._context, self._live, self._is_closed = WorkerContext(), set[Any](), False

    def run(self, job: Job) -> None:
        crashes: Counter[int] = Counter()
        for _ in range(ATTEMPTS):
            if Package.find(job.target) is not None:
                return
            skip = {number for number, count in crashes.items() if count >= CRASHES}
            at, problem, exit_code = self._attempt(job, skip)
            if problem:
                raise DatasetError(problem)
            if exit_code == 0:
                return
            if exit_code is None or exit_code > 0:
                raise DatasetError(f"{job.target} failed with an error of the program, which is printed above")
            crashes[at] += 1
            _log.warning("The process of %s died (%s): it is started again", job.target, exit_code)
        raise DatasetError(f"{job.target}: its process died {ATTEMPTS} times; is the machine out of memory?")

    def kill(self) -> None:
        """End all jobs at once; they leave nothing."""
        with _starting:
            self._is_closed = True
            for process in self._live:
                process.kill()

    def _attempt(self, job: Job, skip: set[int]) -> tuple[int, str, int | None]:
        """Return the last recording that was begun, the error if one was raised, and the exit code."""
        receiver, sender = self._context.Pipe(duplex=False)
        process = self._context.Process(target=_work, args=(job, skip, sender), daemon=True)
        with _starting:
            if self._is_closed:
                raise DatasetError("stopped")
            process.start()
            self._live.add(process)
        sender.close()
        at, problem = -1, ""
        with contextlib.suppress(EOFError), receiver:
            while True:
                at, problem = receiver.recv()
        with _starting:  # starting a process asks how the others ended, which only one thread may at a time
            process.join()
            self._live.discard(process)
        return at, problem, process.exitcode


def _work(job: Job, skip: set[int], sender: Connection) -> None:
    """In a worker: run a job and report each recording before it is decoded, or the error."""
    behave_as_worker()
    try:
        job.run(lambda number: sender.send((number, "")), skip)
    except MyXTTSError as error:
        sender.send((-1, f"{job.target}: {error}"))
    except OSError as error:
        uploads, made = (user_cache(), "XDG_CACHE_HOME"), (Path(job.target.parent.path), "--out CORPUS")
        place, where = made if job.target.is_local else uploads
        sender.send((-1, str(cannot_write(place, error, where))))


def run_job(job: Job) -> None:
    answered.add(job.target.store)  # the plan was made from it
    Supervisor().run(job)


RunnableJob = TypeVar("RunnableJob", bound=Job)
Runner = Callable[[Sequence[Job]], Iterator[DatasetError | None]]
"""Runs jobs, and yields for each that ends None or its error."""


def run_here(num_workers: int, jobs: Sequence[Job]) -> Iterator[DatasetError | None]:
    supervisor, pool = Supervisor(), ThreadPoolExecutor(num_workers)
    try:
        for future in as_completed([pool.submit(supervisor.run, job) for job in jobs]):
            error = future.exception()
            if error is not None and not isinstance(error, DatasetError):
                raise error
            yield error
    finally:
        pool.shutdown(wait=False, cancel_futures=True)
        supervisor.kill()


def run_on_ray(jobs: Sequence[Job]) -> Iterator[DatasetError | None]:
    """Run jobs as tasks of a Ray cluster; those of a lost machine run again on another."""
    ray = _ray()
    task = ray.remote(num_cpus=1, max_retries=RAY_RETRIES)(run_job)
    pending = {task.remote(job): job for job in jobs}
    try:
        while pending:
            for ready in ray.wait(list(pending), num_returns=1)[0]:
                job = pending.pop(ready)
                try:
                    ray.get(ready)
                    yield None
                except ray.exceptions.RayTaskError as error:
                    if not isinstance(error.cause, DatasetError):
                        raise
                    yield error.cause
                except ray.exceptions.RayError as error:
                    yield DatasetError(f"{job.target}: {type(error).__name__} after {RAY_RETRIES} retries")
    finally:
        for left in pending:
            ray.cancel(left, force=True)


def _ray() -> Any:
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    try:
        import ray
    except ModuleNotFoundError:
        raise ConfigError(f"--on ray needs Ray: {INSTALL_EXTRA.format('ray')}, on every machine") from None
    if not ray.is_initialized():
        try:
            ray.init(address=os.environ.get("RAY_ADDRESS", "auto"), logging_level=logging.WARNING)
        except ConnectionError:
            advice = "Start one with ray start --head, or name one in RAY_ADDRESS"
            raise ConfigError(f"--on ray: there is no Ray cluster here. {advice}.") from None
    return ray


def _run(jobs: Sequence[Job], runner: Runner, title: str, progress: Progress) -> None:
    """Run all jobs; those that can be done are done before an error is raised."""
    errors = []
    with progress_bar(progress, title, len(jobs)) as advance:
        for error in runner(jobs) if jobs else ():
            advance(1)
            errors += [error] if error is not None else []
    if errors:
        more = f"\n{len(errors) - 1} more failed, such as: {errors[1]}" if len(errors) > 1 else ""
        done = f"The other {len(jobs) - len(errors)} of {len(jobs)} are done; the same command continues."
        raise DatasetError(f"{errors[0]}{more}\n{done}")


# Planning


class Plan(NamedTuple):
    body: dict[str, Any] | None  # of corpus.json when the plan was made
    sources: list[str]
    kept: list[dict[str, Any]]  # shards that the corpus has, damaged ones included
    jobs: list[ShardJob]
    specs: list[ShardSpec]  # of the sources given, without units

    @property
    def names(self) -> list[str]:
        """The shards of the corpus, in their order: new ones come last."""
        return list(dict.fromkeys([shard["name"] for shard in self.kept] + [job.spec.name for job in self.jobs]))


def make_plan(corpus: Location, data: DataSettings, shard_mb: float) -> Plan:
    """Return which shards stay and which are to be made: of units that are new or changed, or that are damaged."""
    body = read_corpus_file(corpus)
    sources: list[str] = list(body["sources"]) if body else []
    recorded = list(body["shards"]) if body else []
    wanted: list[tuple[ShardSpec, list[Unit]]] = []
    for given in data.sources:
        location = location_of(given.folder)
        if given.weight != 1:
            raise ConfigError(f"{location}: weights are for training: --train-data CORPUS:{given.weight:g}")
        text = str(given.folder.absolute()) if location.is_local else str(location)
        number = sources.index(text) if text in sources else len(sources)
        sources += [text] if number == len(sources) else []
        folder = location.name or given.folder.absolute().name
        label = folder if number else ""
        options, language = DecodeOptions.of(data), given.language or data.language
        speakers, person = given.speakers or label, (given.speakers or folder) if given.single_speaker else ""
        spec = ShardSpec((), number, label, speakers, language, options, data.use_phonemes, person)
        wanted.append((spec, sorted(open_source(url_of(given.folder)), key=lambda unit: unit.name)))
    offered = {(spec.source, unit.name): unit for spec, units in wanted for unit in units}
    kept = [shard for shard in recorded if not _is_stale(shard, offered)]
    held = {tuple(unit): shard["source"] for shard in kept for unit in shard["units"]}
    jobs = []
    for spec, units in wanted:
        new = [unit for unit in units if (unit.name, unit.key) not in held]
        elsewhere = [unit for unit in units if held.get((unit.name, unit.key), spec.source) != spec.source]
        if elsewhere:
            what = "%d of %d parts of %s, such as %s, are in the corpus from another source: they are left out"
            _log.warning(what, len(elsewhere), len(units), sources[spec.source], elsewhere[0].name)
        for group in _grouped(new, shard_mb * 1e6):
            own = replace(spec, units=tuple(group))
            jobs.append(ShardJob(own, corpus / "shards" / own.name))
    found = _found([corpus / "shards" / shard["name"] for shard in kept])
    jobs += [_repair(shard, wanted, corpus) for shard, package in zip(kept, found, strict=True) if package is None]
    return Plan(body, sources, kept, jobs, [spec for spec, _ in wanted])


def _is_stale(shard: dict[str, Any], offered: dict[tuple[int, str], Unit]) -> bool:
    """True if a unit of the shard has changed since; one that is gone from its source stays in the corpus."""
    units = [(name, key, offered.get((shard["source"], name))) for name, key in shard["units"]]
    if all(unit is None or unit.key == key for _, key, unit in units):
        return False
    if gone := [name for name, _, unit in units if unit is None]:
        changed = next(name for name, key, unit in units if unit is not None and unit.key != key)
        what = f"{changed} has changed, and its shard {shard['name']} also holds {gone[0]}, which is gone"
        raise DatasetError(f"{what}.\nRestore {gone[0]}, or prepare the corpus again in another folder.")
    return True


def _grouped(units: Sequence[Unit], most_bytes: float) -> Iterator[list[Unit]]:
    """Yield neighbouring units that together have at most so many bytes; a larger one stays alone."""
    group: list[Unit] = []
    size = 0
    for unit in units:
        if group and size + unit.num_bytes > most_bytes:
            yield group
            group, size = [], 0
        group.append(unit)
        size += unit.num_bytes
    if group:
        yield group


def _repair(shard: dict[str, Any], wanted: Sequence[tuple[ShardSpec, list[Unit]]], corpus: Location) -> ShardJob:
    for spec, units in wanted:
        own = {unit.name: unit for unit in units}
        if spec.source == shard["source"] and all(name in own for name, _ in shard["units"]):
            again = replace(spec, units=tuple(own[name] for name, _ in shard["units"]))
            if again.name == shard["name"]:
                return ShardJob(again, corpus / "shards" / again.name)
    what = f"Shard {shard['name']} of {corpus} is missing or damaged, and the sources given lack its recordings"
    raise DatasetError(f"{what}, or the settings are others.\nGive the same sources and settings as before.")


# The whole


@dataclass(frozen=True)
class JobOptions:
    on: str = "local"
    share: tuple[int, int] = (0, 1)  # the jobs k, k + n, … are run here
    shard_mb: float = 1000
    prune: bool = False  # delete what the corpus no longer names


class Outcome(NamedTuple):
    made: int
    kept: int
    waiting: int  # shards that other processes have yet to make; the corpus is finished if there are none
    unnamed: int  # bytes of packages that the corpus no longer names


def share_of(text: str | None) -> tuple[int, int]:
    """Return K and N of `--shard K/N`, by default of Slurm or torchrun."""
    env = os.environ
    for rank, size in (("SLURM_PROCID", "SLURM_NTASKS"), ("RANK", "WORLD_SIZE")):
        if text is None and rank in env and size in env:
            text = f"{env[rank]}/{env[size]}"
    first, _, last = (text or "0/1").partition("/")
    if first.isdecimal() and last.isdecimal() and int(first) < int(last):
        return int(first), int(last)
    raise ConfigError(f"--shard {text}: expected K/N with K from 0 to N-1, such as 0/8 to 7/8")


def prepare_sharded(
    data: DataSettings, out: Path, options: JobOptions, base: Path | None, progress: Progress
) -> Outcome:
    """Make the shards that the corpus at `out` lacks, or a share of them; join all when the last is there.

    A new corpus has the tokenizer that is named, else that of `base` if it has the languages, else one of its own.
    Without sources a corpus is only pruned.
    """
    corpus = refuse_query(location_of(out))
    workers = min(data.num_workers, usable_cores())
    runner: Runner = run_on_ray if options.on == "ray" else lambda jobs: run_here(workers, jobs)
    (first, step), place = options.share, Path(corpus.path)
    if corpus.store.startswith("http"):
        raise ConfigError(f"--out {corpus}: web servers are only read. Write to a folder, s3:// or gs://.")
    given = [source.folder.absolute() for source in data.sources]
    if corpus.is_local and (place in given or any((place / name).is_file() for name in METADATA_FILES)):
        raise ConfigError(f"--out {out} holds recordings, and later starts would no longer see them: name another")
    is_begun = any((place / name).exists() for name in ("corpus.json", ".held", "shards"))
    if corpus.is_local and not is_begun and (others := sorted(path.name for path in place.glob("[!.]*"))):
        held = ", ".join(others[:4]) + ", …" * (len(others) > 4)
        raise ConfigError(f"--out {out} holds no corpus but {held}. Name an empty folder: --out {out / 'corpus'}")
    body = None if given else read_corpus_file(corpus)
    if body is None and not given:
        raise ConfigError(f"--prune: {out} is no finished corpus, it has no corpus.json. Name one with --out.")
    try:
        if corpus.is_local:
            (place / "shards").mkdir(parents=True, exist_ok=True)
        with _held(corpus) as find_other:
            if body is not None:
                return Outcome(0, len(body["shards"]), 0, _prune(corpus, find_other))
            remove_leftovers(corpus)
            plan = make_plan(corpus, data, options.shard_mb)
            mine = plan.jobs[first::step]
            absent = _absent(mine)
            _run(absent, runner, "Preparing shards", progress)
            waiting, unnamed = len(_absent(plan.jobs)), 0
            if not waiting:
                lock = only_process(place, ".lock", "Another process is finishing %s: waiting for it")
                with lock if corpus.is_local else contextlib.nullcontext():
                    if read_corpus_file(corpus) != plan.body:  # another process has finished the same, or added
                        plan = make_plan(corpus, data, options.shard_mb)
                    _finish(corpus, plan, data, base, runner, progress)
                    unnamed = _prune(corpus, find_other if options.prune else None)
        return Outcome(len(absent), len(plan.names) - len(absent) - waiting, waiting, unnamed)
    except OSError as error:
        raise cannot_write(place, error, "--out CORPUS") from error


def _found(locations: Sequence[Location]) -> list[Package | None]:
    with ThreadPoolExecutor(_LOOKUPS) as pool:
        return list(pool.map(Package.find, locations))


def _absent(jobs: Sequence[RunnableJob]) -> list[RunnableJob]:
    """Return the jobs whose package is not there."""
    found = _found([job.target for job in jobs])
    return [job for job, package in zip(jobs, found, strict=True) if package is None]


def _finish(
    corpus: Location, plan: Plan, data: DataSettings, base: Path | None, runner: Runner, progress: Progress
) -> None:
    """Join the shards, make vocabulary and ids, and replace corpus.json; what it no longer names stays."""
    names = plan.names
    shards = [package for package in _found([corpus / "shards" / name for name in names]) if package is not None]
    if len(shards) < len(names):
        raise DatasetError(f"{corpus} was changed by another process meanwhile: run the same command again")
    if not shards:
        raise DatasetError("The sources hold nothing to prepare")
    numbers = {job.target.name: job.spec.source for job in plan.jobs}
    numbers |= {shard["name"]: shard["source"] for shard in plan.kept}
    facts = [
        {"name": name, "source": numbers[name], "clips": shard.facts["clips"], "units": shard.facts["units"]}
        | {"audio": shard.files["audio.bin"]}
        for name, shard in zip(names, shards, strict=True)
    ]
    key = xxhash.xxh3_128_hexdigest(json.dumps(names).encode())[:20]
    join_shards(shards, corpus / f"index-{key}")
    params = content_settings(data)
    body = {"format": FORMAT, "params": params, "sources": plan.sources, "index": key, "shards": facts}
    with shard_cache(data) as cache:
        opened = ShardedCorpus(corpus, cache, body)
        if plan.body is not None:
            opened.require(data, plan.body["params"])
        _warn_of_clips(opened, plan)
        tokenizer = _vocabulary(opened, plan, data, base)
    folder = corpus / ids_folder(tokenizer)
    jobs = [IdsJob(shard.location, folder / shard.location.name, tokenizer.to_json()) for shard in shards]
    if corpus.is_local:
        Path(folder.path).mkdir(exist_ok=True)
    _run(_absent(jobs), runner, "Tokenising", progress)
    join_ids([Package.require(job.target) for job in jobs], folder / f"index-{key}")
    (corpus / "vocab.json").write(tokenizer.to_json().encode())
    (corpus / "corpus.json").write(checked_json(body))
    for cut_off in Path(corpus.path).glob(".*.json.*") if corpus.is_local else ():
        cut_off.unlink(missing_ok=True)  # of a process that was killed: only one at a time finishes a corpus


def _warn_of_clips(opened: ShardedCorpus, plan: Plan) -> None:
    """Say how many clips options have not given a speaker, and how many have the samples of another source's."""
    hashes, source, samples = (opened.index[name] for name in ("hash", "source", "num_samples"))
    sources, unnamed = plan.sources, opened.speakers.index("") if "" in opened.speakers else -1
    for spec in [spec for spec in plan.specs if spec.person or spec.speakers != spec.label]:
        if count := np.count_nonzero((opened.index["speaker"] == unnamed) & (source == spec.source)):
            one = f"{sources[spec.source]}:single-speaker,speakers={spec.speakers or spec.person}"
            what = "%d clips of %s have no speaker, and keep none. If one person speaks, make another corpus of %s"
            _log.warning(what, count, sources[spec.source], one)
    order = np.lexsort((source, hashes)) if len(sources) > 1 else np.arange(0)
    first, again = order[:-1], order[1:]
    is_again = (hashes[first] == hashes[again]) & (source[first] != source[again])
    if not is_again.any():
        return
    first, again = first[is_again], again[is_again]
    (one, other), _ = Counter(zip(source[first].tolist(), source[again].tolist(), strict=True)).most_common(1)[0]
    found = f"{len(again)} clips ({samples[again].sum() / SAMPLE_RATE / 3600:.2f} h)"
    such = f"such as {opened.names(again[:1], '').name(0)}, most of {sources[one]} and {sources[other]}"
    _log.warning("%s are in two sources, %s: each is trained on twice. Leave one of them out.", found, such)


def _vocabulary(opened: ShardedCorpus, plan: Plan, data: DataSettings, base: Path | None) -> Tokenizer:
    named = Tokenizer.load(data.tokenizer) if data.tokenizer else None
    if plan.body is not None:
        own = opened.tokenizer()
        if named is not None and named.fingerprint != own.fingerprint:
            advice = "Leave out --tokenizer; training with another one makes ids for it in the cache"
            raise ConfigError(f"{opened.location} has a vocabulary, which stays as shards are added. {advice}.")
        return own
    if named is not None:
        return named
    codes = {LANGUAGES[number] for number in set(opened.index["language"].tolist())}
    if base is not None and codes <= set((known := Tokenizer.load(base)).languages):
        return known
    sentences = opened.sentences()
    _log.info("Training a vocabulary of up to %d tokens on %d sentences", data.vocab_size, len(sentences))
    return train([one.text for one in sentences], [one.language for one in sentences], data.vocab_size)


@contextlib.contextmanager
def _held(corpus: Location) -> Iterator[Callable[[], Location | None]]:
    """Share a corpus with the processes that add to it. Gives a function that returns a trace of another one.

    If that returns None, no other process begins before the end. An object store has no locks: there a process has
    an object while it adds.
    """
    if corpus.is_local:
        with open(Path(corpus.path, ".held"), "a+b") as lock:  # NFS shares only what may be read
            fcntl.flock(lock, fcntl.LOCK_SH)
            yield lambda: None if is_locked_alone(lock) else corpus / ".held"
        return
    folder, own = corpus / "preparing", uuid.uuid4().hex
    (folder / own).write(b"")
    try:
        yield lambda: next((entry.location for entry in folder.list() if entry.location.name != own), None)
    finally:
        with contextlib.suppress(DatasetError):  # the store may be what failed
            folder.delete([own])


def _prune(corpus: Location, find_other: Callable[[], Location | None] | None) -> int:
    """Return the bytes of packages that the corpus does not name, after deleting them if `find_other` is given."""
    body = read_corpus_file(corpus)
    used = {f"index-{body['index']}", *(shard["name"] for shard in body["shards"])} if body else set[str]()
    entries = list[Entry]()
    with contextlib.nullcontext() if find_other else contextlib.suppress(DatasetError):  # if it may not be listed
        entries = corpus.list()
    sizes = {entry.location.path.removeprefix(f"{corpus.path}/"): entry.size for entry in entries}
    unnamed = [name for name in sizes if (found := _PACKAGE.match(name)) and found[1] not in used]
    num_bytes = sum(sizes[name] for name in unnamed)
    if not unnamed or find_other is None:
        return num_bytes
    if (other := find_other()) is not None:
        advice = "" if corpus.is_local else "; if that was killed, delete this object"
        _log.warning("Nothing is deleted: another prepare adds to the corpus (%s)%s", other, advice)
        return num_bytes
    for is_rest in (False, True):  # a package without its meta.json is none: others make it again
        corpus.delete([name for name in unnamed if name.endswith("/meta.json") != is_rest])
    _log.info("%.1f MB are deleted that %s no longer names", num_bytes / 1e6, corpus)
    return 0
