"""The catalog of a collected corpus: what is used, what is written, and edits that are journaled and undone."""

from __future__ import annotations

import contextlib
import signal
import sqlite3
import subprocess
import sys
import threading
from collections import defaultdict
from dataclasses import fields, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from myxtts.collect.catalog import (
    Catalog,
    Filters,
    Segment,
    Source,
    StaleEdit,
    Unused,
    reasons,
    table,
    used,
    write_corpus,
)
from myxtts.collect.edits import edit
from myxtts.data.corpus import Row, read_rows
from myxtts.errors import ConfigError, DatasetError

TESTS = Path(__file__).parent
SECONDS = 20.0
GOOD = {"heard_error": 0.0, "mos": 4.0, "snr_db": 40.0, "bandwidth_hz": 11000.0, "music": 0.0}


def cut(source: Source, channel: int, start: float, end: float, gain_db: float) -> str:  # noqa: ARG001
    return f"{source.id}-{channel}-{start:.3f}-{end:.3f}.flac"


def clip(start: float, end: float, text: str = "some words", channel: int = 0, **values: Any) -> Segment:
    scores = GOOD | values.pop("scores", {})
    spoken = {"text": text, "language": "en", "speaker": "ann", "audio": f"{channel}-{start}-{end}.flac"}
    return Segment(source=0, channel=channel, start=start, end=end, scores=scores, **(spoken | values))


def filled(folder: Path) -> Catalog:
    """A catalog with two recordings: one in two channels, one that is half done."""
    catalog = Catalog(folder, create=True)
    call = catalog.add_source("/r/call.wav", 1, 1, SECONDS, 48000, 2)
    half = catalog.add_source("/r/half | way.mp3", 2, 2, SECONDS, 44100, 1)
    for channel in (0, 1):
        clips = [clip(1, 4, channel=channel), clip(4, 8, "more of it", channel), clip(9.5, 12, "end", channel)]
        spans = [Unused(0, channel, 0, 1, "silence"), Unused(0, channel, 8, 9.5, "music", "0.9")]
        spans = [replace(span, source=call.id) for span in (*spans, Unused(0, channel, 12, SECONDS, "silence"))]
        catalog.add_segments(call.id, clips, spans, SECONDS, channel)
    catalog.update_source(call.id, state="done")
    catalog.add_segments(half.id, [clip(0, 3), clip(3.5, 6, speaker="bob")], [], 8.0)
    return catalog


def state(catalog: Catalog) -> dict[int, Segment]:
    return {segment.id: replace(segment, version=0) for segment in catalog.segments()}


def spans(folder: Path) -> dict[tuple[str, str], list[tuple[float, float]]]:
    """The spans in the two CSV files by source and channel."""
    found = defaultdict(list)
    for name in ("metadata.csv", "rejected.csv"):
        header, *rows = (line.split("|") for line in (folder / name).read_text(encoding="utf-8").splitlines())
        for values in rows:
            row = dict(zip(header, values, strict=True))
            found[row["source"], row["channel"]].append((float(row["start"]), float(row["end"])))
    return found


def check_every_second(folder: Path) -> None:
    found = spans(folder)
    assert len(found) == 3
    for where, held in found.items():
        held.sort()
        assert held[0][0] == 0.0 and held[-1][1] == SECONDS, where
        assert all(before[1] == after[0] for before, after in pairwise(held)), (where, held)


def test_what_is_used_and_why_not() -> None:
    filters = Filters(min_snr_db=15.0)
    assert used(clip(0, 3), filters) and used(clip(0, 3, scores={"mos": float(filters.min_mos or 0)}), filters)
    bad = clip(0, 1, flags=("repeated take",), notes={"repeated take": "as at 0:12"}, scores={"snr_db": 3.0})
    assert reasons(bad, filters) == [
        ("repeated take", "as at 0:12"),
        ("noise", "3 dB, at least 15"),
        ("too short", "1 s, at least 2"),
    ]
    assert used(replace(bad, decision="keep"), filters)
    assert reasons(replace(clip(0, 3), decision="reject"), filters) == [("rejected by a person", "")]
    assert reasons(replace(clip(0, 3), text="", decision="keep"), filters) == [("no text", "")]
    assert used(replace(clip(0, 3), scores={}), filters), "a score that was not measured refuses nothing"
    misheard = clip(0, 3, scores={"heard_error": 0.5})
    assert not used(misheard, filters) and used(replace(misheard, origin="person"), filters)
    off = Filters(**{item.name: None for item in fields(Filters)})
    assert used(clip(0, 0.5, scores={"snr_db": -9.0}), off)


def test_filters_come_from_names_and_numbers_only() -> None:
    assert Filters.checked({"min_mos": 3, "max_music": None}) == Filters(min_mos=3, max_music=None)
    for wrong in ({"min_moss": 3}, {"min_mos": "3"}, {"min_mos": float("nan")}, {"min_mos": True}):
        with pytest.raises(ConfigError, match="min_mos"):
            Filters.checked(wrong)


def test_the_corpus_is_one_that_prepare_reads(tmp_path: Path) -> None:
    with filled(tmp_path) as catalog:
        first = catalog.segments()[0].id
        edit(catalog, "set_text", {"id": first, "value": '"He said:\n a|b"\t\u200c\ud800'}, cut)
        write_corpus(catalog)
        rows = [row for row in read_rows(tmp_path / "metadata.csv") if isinstance(row, Row)]
        assert [row.text for row in rows][:3] == ['"He said: a b" \u200c', "more of it", "end"]
        assert {row.speaker for row in rows} == {"ann", "bob"} and {row.language for row in rows} == {"en"}
        check_every_second(tmp_path)
        rejected = (tmp_path / "rejected.csv").read_text(encoding="utf-8")
        assert "/r/call.wav|0|8.000|9.500|music|0.9||\n" in rejected
        assert "/r/half way.mp3|0|3.000|3.500|outside the cuts|||\n" in rejected
        assert "/r/half way.mp3|0|8.000|20.000|not processed yet|||\n" in rejected


def test_a_failed_recording_has_its_reason(tmp_path: Path) -> None:
    with Catalog(tmp_path, create=True) as catalog:
        catalog.add_source("/r/empty.wav", 0, 0, state="failed", reason="empty file", detail="0 bytes")
        broken = catalog.add_source("/r/broken.mp3", 9, 0, 60.0)
        catalog.add_segments(broken.id, [clip(0, 5)], [], 5.0)
        catalog.update_source(broken.id, state="failed", reason="damaged file", detail="frame 9")
        write_corpus(catalog)
        found = (tmp_path / "rejected.csv").read_text(encoding="utf-8").splitlines()[1:]
        assert found == [
            "/r/broken.mp3|0|5.000|60.000|damaged file|frame 9||",
            "/r/empty.wav|0|0.000|0.000|empty file|0 bytes||",
        ]


def test_the_table_counts_everything_once(tmp_path: Path) -> None:
    with filled(tmp_path) as catalog:
        before = table(catalog)
        assert before.seconds == pytest.approx(3 * SECONDS) and before.used.segments == 8
        tighter = table(catalog, Filters(min_seconds=2.6))
        assert [(taken.reason, taken.threshold, taken.segments) for taken in tighter.set_aside] == [
            ("too short", 2.6, 3)
        ]
        assert tighter.used.seconds == pytest.approx(before.used.seconds - 7.5)
        assert tighter.seconds == pytest.approx(3 * SECONDS)
        assert table(catalog) == before, "asking changes nothing"
        catalog.set_filters(Filters(min_seconds=2.6))
        assert table(catalog) == tighter
        catalog.undo()
        assert table(catalog) == before and catalog.filters == Filters()


EDITS = st.one_of(
    st.tuples(st.sampled_from(("set_text", "set_speaker")), st.integers(0, 7), st.text(max_size=8)),
    st.tuples(st.just("set_language"), st.integers(0, 7), st.sampled_from(("fa", "de"))),
    st.tuples(st.sampled_from(("keep", "reject", "clear_decision", "merge")), st.integers(0, 7), st.none()),
    st.tuples(st.just("split"), st.integers(0, 7), st.floats(0, 1)),
    st.tuples(st.just("move"), st.integers(0, 7), st.tuples(st.floats(-2, 2), st.floats(-2, 2))),
    st.tuples(st.just("rename_speaker"), st.integers(0, 7), st.sampled_from(("bob", "carl"))),
    st.tuples(st.sampled_from(("undo", "redo")), st.none(), st.none()),
)


def make(catalog: Catalog, action: str, which: int, value: Any) -> bool:
    """Make an edit of some clip; False if it is one that must be refused."""
    clips = catalog.segments()
    chosen = clips[which % len(clips)]
    share = value if isinstance(value, float) else 0.0
    arguments = {
        "merge": {"first": chosen.id, "second": clips[(which + 1) % len(clips)].id},
        "split": {
            "id": chosen.id,
            "at": chosen.start + share * chosen.seconds,
        },
        "rename_speaker": {"old": chosen.speaker, "new": value},
    }.get(action, {"id": chosen.id})
    if action == "move":
        arguments |= {"start": chosen.start + value[0], "end": chosen.end + value[1]}
    if action.startswith("set_"):
        arguments["value"] = value
    try:
        edit(catalog, action, arguments, cut, {chosen.id: chosen.version})
    except ConfigError:
        return False
    return True


@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(EDITS, max_size=10))
@example([("move", 1, (-0.0008512542243868104, 1.0))])
def test_edits_account_for_every_second_and_undo_takes_all_back(
    tmp_path_factory: pytest.TempPathFactory, steps: list[tuple[str, int, Any]]
) -> None:
    with filled(tmp_path_factory.mktemp("catalog")) as catalog:
        start = state(catalog)
        for action, which, value in steps:
            if action in ("undo", "redo"):
                getattr(catalog, action)()
            else:
                before = state(catalog)
                if not make(catalog, action, which, value):
                    assert state(catalog) == before, "a refused edit changes nothing"
        write_corpus(catalog)
        check_every_second(catalog.folder)
        while catalog.redo():
            pass
        end, made = state(catalog), len([item for item in catalog.journal() if item.state == "done"])
        for _ in range(made):
            assert catalog.undo()
        assert catalog.undo() is None and state(catalog) == start
        for _ in range(made):
            assert catalog.redo()
        assert catalog.redo() is None and state(catalog) == end


def test_merge_split_and_move_change_texts_times_and_audio(tmp_path: Path) -> None:
    with filled(tmp_path) as catalog:
        first, second, third = catalog.segments()[:3]
        catalog.update_segments({second.id: {"scores": {"heard_error": 0.4, "mos": 2.0, "gain_db": 2.0}}})
        catalog.update_segments({first.id: {"scores": {"gain_db": -5.0}}})
        edit(catalog, "merge", {"first": first.id, "second": second.id}, cut)
        merged = catalog.segment(first.id)
        assert (merged.start, merged.end, merged.text) == (1, 8, "some words more of it")
        assert merged.audio == "1-0-1.000-8.000.flac" and merged.scores["seconds"] == 7
        assert merged.scores["heard_error"] == 0.4 and merged.scores["mos"] == 2.0, "no better than its parts"
        assert merged.scores["gain_db"] == pytest.approx(-1.0)
        with pytest.raises(StaleEdit, match="gone"):
            catalog.segment(second.id)
        edit(catalog, "split", {"id": first.id, "at": 4.2}, cut)
        left, right = catalog.segments()[:2]
        assert (left.text, right.text, left.end, right.start) == ("some words", "more of it", 4.2, 4.2)
        edit(catalog, "move", {"id": left.id, "start": 0.5, "end": 4.5}, cut)
        left, right = catalog.segments()[:2]
        assert (left.start, left.end, right.start, right.audio) == (0.5, 4.5, 4.5, "1-0-4.500-8.000.flac")
        wrong = [
            ("merge", {"first": left.id, "second": third.id}, "follows"),
            ("split", {"id": left.id, "at": 4.4}, "less than"),
            ("move", {"id": left.id, "start": -1.0, "end": 3.0}, "not in it"),
            ("move", {"id": left.id, "start": 1.0, "end": 7.9}, "neighbouring"),
            ("move", {"id": left.id, "start": 3.0, "end": 3.1}, "expected 0.2 to 60 s"),
            ("move", {"id": left.id, "start": "x", "end": 3.1}, "number of seconds"),
            ("set_language", {"id": left.id, "value": "xx"}, "Unknown language"),
            ("set_text", {"id": left.id, "value": "x" * 3000}, "2000 characters"),
            ("set_text", {"id": left.id}, "arguments"),
            ("set_text", {"id": left.id, "value": "x", "name": "audio"}, "Unknown arguments"),
            ("explode", {"id": left.id}, "Unknown edit"),
        ]
        for action, arguments, message in wrong:
            with pytest.raises(ConfigError, match=message):
                edit(catalog, action, arguments, cut)


def test_a_stale_edit_is_refused_and_the_pipeline_leaves_edits_alone(tmp_path: Path) -> None:
    with filled(tmp_path) as catalog, Catalog(tmp_path, lock=False) as page:
        seen = page.segments()[0]
        made = edit(page, "set_text", {"id": seen.id, "value": "mine"}, cut, {seen.id: seen.version})
        with pytest.raises(StaleEdit, match="changed elsewhere"):
            edit(catalog, "set_text", {"id": seen.id, "value": "theirs"}, cut, {seen.id: seen.version})
        second = catalog.segments()[1]
        catalog.update_segments(
            {
                seen.id: {"text": "whisper's", "speaker": "s2", "scores": {"mos": 3.0, "snr_db": float("nan")}},
                second.id: {"scores": {"mos": 1.0}, "flags": ("repeated take",)},
                999: {"speaker": "s3"},
            }
        )
        held = page.segment(seen.id)
        assert (held.text, held.speaker, held.scores["mos"]) == ("mine", "s2", 3.0)
        assert "snr_db" not in held.scores and held.scores["music"] == 0.0
        assert edit(page, "keep", {"id": second.id}, cut, {second.id: second.version}), "scores make nothing stale"
        with pytest.raises(StaleEdit):
            page.undo(expected=made.id if made else None)
        assert catalog.undo() is not None and not page.segment(second.id).decision


def test_one_pipeline_at_a_time_and_only_in_its_own_folder(tmp_path: Path) -> None:
    with filled(tmp_path / "a"), pytest.raises(ConfigError, match="is in use by process"):
        Catalog(tmp_path / "a")
    Catalog(tmp_path / "a").close()
    with pytest.raises(DatasetError, match="no collected corpus"):
        Catalog(tmp_path)
    (tmp_path / "metadata.csv").write_text("a|b")
    with pytest.raises(DatasetError, match="not made by myxtts collect"):
        Catalog(tmp_path, create=True)
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "collect.db").write_bytes(b"something else" * 100)
    with pytest.raises(DatasetError, match="cannot be opened"):
        Catalog(tmp_path / "b")


def test_a_cut_is_moved_as_far_as_its_own_channel_is_heard(tmp_path: Path) -> None:
    with Catalog(tmp_path, create=True) as catalog:
        call = catalog.add_source("/r/call.wav", 1, 1, SECONDS, 48000, 2)
        first, last = catalog.add_segments(call.id, [clip(1, 4), clip(5, 8)], [], SECONDS)
        (second,) = catalog.add_segments(call.id, [clip(1, 4, channel=1)], [], 4.0, 1)
        assert catalog.source(call.id).done_until == (SECONDS, 4.0)
        assert edit(catalog, "move", {"id": last, "start": 4.5, "end": 9.0}, cut)
        assert edit(catalog, "merge", {"first": first, "second": last}, cut)
        with pytest.raises(ConfigError, match="still being collected"):
            edit(catalog, "move", {"id": second, "start": 1.0, "end": 4.5}, cut)
        catalog.update_source(call.id, state="done")
        assert edit(catalog, "move", {"id": second, "start": 1.0, "end": 4.5}, cut)


def test_what_changes_nothing_makes_no_version(tmp_path: Path) -> None:
    with filled(tmp_path) as catalog:
        first, version = catalog.segments()[0], catalog.version
        catalog.update_segments({})
        assert catalog.undo() is None and catalog.redo() is None
        assert edit(catalog, "set_text", {"id": first.id, "value": first.text}, cut) is None
        assert catalog.version == version
        assert edit(catalog, "keep", {"id": first.id}, cut) and catalog.version == version + 1


def test_a_catalog_of_the_first_format_keeps_its_positions(tmp_path: Path) -> None:
    filled(tmp_path).close()
    with contextlib.closing(sqlite3.connect(tmp_path / "collect.db")) as database, database:
        database.execute("UPDATE sources SET done_until = 8.0")
        database.execute("DELETE FROM segments WHERE channel = 1 AND start > 5")
        database.execute("DELETE FROM unused WHERE channel = 1 AND start > 5")
        database.execute("PRAGMA user_version = 1")
    for _ in range(2):
        with Catalog(tmp_path) as catalog:
            assert {source.done_until for source in catalog.sources()} == {(SECONDS, 8.0), (8.0,)}


def test_clips_of_one_channel_never_overlap(tmp_path: Path) -> None:
    with filled(tmp_path) as catalog:
        before, source = state(catalog), catalog.sources()[0].id
        with pytest.raises(ValueError, match="overlap"):
            catalog.add_segments(source, [clip(14, 16), clip(7.5, 9)], [], SECONDS)
        assert state(catalog) == before


def test_threads_edit_one_catalog(tmp_path: Path) -> None:
    with filled(tmp_path) as catalog:
        ids = [segment.id for segment in catalog.segments()]

        def work(number: int) -> None:
            for turn in range(20):
                edit(catalog, "set_text", {"id": ids[number], "value": f"{number} {turn}"}, cut)

        threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert [catalog.segment(ids[number]).text for number in range(4)] == [
            f"{number} 19" for number in range(4)
        ]
        assert len(catalog.journal()) == 80


KILLED = """
import sys
from pathlib import Path
sys.path[:0] = sys.argv[2:]
from test_catalog import Catalog, cut, edit
with Catalog(Path(sys.argv[1])) as catalog:
    first = catalog.segments()[0]
    for number in range(10_000):
        edit(catalog, "split" if number % 3 == 0 else "set_text" if number % 3 == 1 else "merge", [
            {"id": first.id, "at": first.start + 1.5}, {"id": first.id, "value": str(number)},
            {"first": first.id, "second": catalog.segments()[1].id}][number % 3], cut)
        print(number + 1, flush=True)
"""


@pytest.mark.parametrize("times", [3, pytest.param(50, marks=pytest.mark.soak)])
def test_kill_9_loses_no_edit(times: int, tmp_path: Path) -> None:
    filled(tmp_path).close()
    made = 0
    for turn in range(times):
        command = [sys.executable, "-c", KILLED, str(tmp_path), str(TESTS), str(TESTS.parent)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout
            said = 0
            for line in process.stdout:
                said = int(line)
                if said == 4 + 5 * turn % 17:
                    process.send_signal(signal.SIGKILL)
        with Catalog(tmp_path) as catalog:
            write_corpus(catalog)
            check_every_second(tmp_path)
            held = len([item for item in catalog.journal() if item.state == "done"])
            assert held >= made + said > made
            while catalog.undo():
                pass
            assert [(item.start, item.end) for item in catalog.segments()[:3]] == [(1, 4), (4, 8), (9.5, 12)]
            made = 0
