"""The review page: what its server answers, and the page itself in a real browser."""

from __future__ import annotations

import json
import re
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import soundfile as sf
from browser_fixtures import UNNAMED, BrowserTab
from review_fixtures import HOSTILE, RATE, TEXTS, collected, cutter

pytest.importorskip("starlette")
pytest.importorskip("uvicorn")
pytest.importorskip("httpx")
import uvicorn
from starlette.testclient import TestClient

from myxtts.collect.catalog import Catalog, Filters, Segment
from myxtts.web import review as review_module
from myxtts.web.pages import LOOPBACK, Guard, listen
from myxtts.web.review import Review, review_app

pytest_plugins = ["browser_fixtures"]
PORT = 4321


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return collected(tmp_path / "corpus")


@pytest.fixture
def client(folder: Path) -> Iterator[TestClient]:
    with Catalog(folder, lock=False) as catalog:
        guard = Guard(review_app(Review(catalog, cutter(folder))), "token", PORT)
        with TestClient(guard, f"http://127.0.0.1:{PORT}") as client:
            assert client.get("/?token=token").status_code == 200
            yield client


def ids(client: TestClient, **wanted: str) -> list[int]:
    found: list[int] = client.get("/api/ids", params=wanted).json()["ids"]
    return found


def row(client: TestClient, number: int) -> dict[str, Any]:
    found: dict[str, Any] = client.get("/api/rows", params={"ids": str(number)}).json()[0]
    return found


def edit(client: TestClient, action: str, version: int | None = None, **arguments: Any) -> Any:
    versions = {} if version is None else {str(arguments["id"]): version}
    return client.post("/api/edit", json={"action": action, "arguments": arguments, "versions": versions})


def test_clips_are_listed_worst_first_and_filtered(client: TestClient) -> None:
    everything = ids(client)
    assert len(everything) == 12 and row(client, everything[0])["reasons"] == [["repeated take", "as at 0:34"]]
    assert ids(client, sort="mos") == ids(client, sort="mos", down="1")[::-1]
    assert ids(client, sort="time") == sorted(everything)
    assert len(ids(client, reason="heard differently")) == 2
    assert len(ids(client, speaker="مریم", language="fa")) == 4
    assert len(ids(client, use="used")) + len(ids(client, use="aside")) == 12
    assert ids(client, text="KÖLN") == ids(client, language="de", sort="worst")
    assert ids(client, source="99") == [] and ids(client, speaker="nobody") == []
    state = client.get("/api/state").json()
    assert state["clips"] == 12 and state["used"]["clips"] == 8
    assert dict(state["reasons"]) == {"heard differently": 2, "repeated take": 1, "narrow bandwidth": 1}
    edit(client, "keep", id=everything[0])
    assert ids(client)[-1] == everything[0], "what a person has decided comes last"


def test_edits_are_saved_at_once_and_the_files_at_the_end(folder: Path, client: TestClient) -> None:
    first, second = ids(client, sort="time")[:2]
    answer = edit(client, "set_text", id=first, value="new\n words", version=row(client, first)["version"]).json()
    assert answer["edit"]["action"] == "set_text" and answer["rows"][0]["text"] == "new words"
    with Catalog(folder, lock=False) as other:
        assert other.segment(first).text == "new words"
    merged = edit(client, "merge", first=first, second=second).json()
    assert merged["gone"] == [second] and merged["state"]["clips"] == 11
    back = client.post("/api/undo", json={"expected": merged["edit"]["id"]}).json()
    assert back["made"] == [second] and back["state"]["redo"]["action"] == "merge"
    split = edit(client, "split", id=second, at=row(client, second)["start"] + 1).json()
    assert len(split["made"]) == 1 and row(client, second)["following"] == split["made"][0]
    assert client.get(f"/audio/{split['made'][0]}").status_code == 200
    assert "new words" not in (folder / "metadata.csv").read_text(encoding="utf-8")
    client.__exit__()
    assert "new words" in (folder / "metadata.csv").read_text(encoding="utf-8")


def test_a_stale_edit_is_refused(folder: Path, client: TestClient) -> None:
    first = ids(client)[0]
    version = row(client, first)["version"]
    assert edit(client, "set_text", id=first, value="one", version=version).status_code == 200
    refused = edit(client, "set_text", id=first, value="two", version=version)
    assert refused.status_code == 409 and "changed elsewhere" in refused.json()["error"]
    assert row(client, first)["text"] == "one"
    with Catalog(folder, lock=False) as other:
        other.apply("set_text", {"id": first}, updated={first: {"text": "three"}})
    time.sleep(0.3)  # the catalog is not read all the time
    assert row(client, first)["text"] == "three", "another process's edit is seen"
    assert client.post("/api/undo", json={"expected": 1}).status_code == 409
    assert edit(client, "keep", id=10**30).status_code == 409 and edit(client, "keep", id=999).status_code == 409


def test_thresholds_are_shown_before_they_are_applied(client: TestClient) -> None:
    state = client.get("/api/state").json()
    strict = {**state["filters"], "max_heard_error": 0.0}
    seen = client.post("/api/preview", json=strict).json()
    assert seen["used"]["segments"] < 8 and client.get("/api/state").json()["used"]["clips"] == 8
    applied = client.post("/api/filters", json=strict).json()
    assert applied["all"] and applied["state"]["used"]["clips"] == seen["used"]["segments"]
    client.post("/api/undo", json={})
    assert client.get("/api/state").json()["filters"] == state["filters"]
    assert client.post("/api/preview", json={"min_mos": "high"}).status_code == 400
    summary = client.get("/api/summary").json()
    assert summary["seconds"] == pytest.approx(12 * 4 + 1) and summary["unused"][-1]["reason"] == "silence"


def test_sound_is_sent_in_ranges_and_waveforms_on_demand(client: TestClient) -> None:
    first = ids(client, sort="time")[0]
    part = client.get(f"/audio/{first}", headers={"range": "bytes=0-3"})
    assert (part.status_code, part.content) == (206, b"fLaC")
    small, wide = (client.get(f"/api/peaks/{first}{end}").json() for end in ("", "?wide=1"))
    held = row(client, first)
    assert (small["start"], small["end"]) == (held["start"], held["end"]) and 50 < max(small["peaks"]) < 255
    assert wide["start"] == 0 and wide["end"] == held["end"] + 2 and wide["peaks"][0] == 0
    assert client.get("/audio/999").status_code == 409 and client.get("/audio/..%2fcollect.db").status_code == 404


def test_a_recording_that_is_gone_still_shows_its_clips(folder: Path, client: TestClient) -> None:
    first, second = ids(client)[:2]
    for path in (folder.parent / "recordings").iterdir():
        path.unlink()
    held = row(client, first)
    assert client.get(f"/api/peaks/{first}?wide=1").json()["start"] == held["start"]
    refused = edit(client, "split", id=first, at=held["start"] + 1)
    assert refused.status_code == 400 and "cannot be cut again" in refused.json()["error"]
    for path in (folder / "wavs").iterdir():
        path.unlink()
    assert client.get(f"/audio/{first}").status_code == 404
    assert "cannot be read" in client.get(f"/api/peaks/{second}?wide=1").json()["error"]


def test_wrong_requests_are_explained(client: TestClient) -> None:
    for body in (
        {"action": "drop", "arguments": {}}, {"action": "keep"}, {"action": "keep", "arguments": {"id": "1 OR 1"}},
        {"action": "keep", "arguments": {"id": 1, "decision": "x"}}, {"action": "keep", "arguments": {}},
        {"action": "keep", "arguments": {"id": 1}, "versions": [1]}, {"action": ["keep"], "arguments": {"id": 1}},
        {"action": "move", "arguments": {"id": 1, "start": "0", "end": 3}},
    ):  # fmt: skip
        answer = client.post("/api/edit", json=body)
        assert answer.status_code == 400 and answer.json()["error"], body
    assert client.get("/api/rows?ids=1,x,-3,99999999999999999999").json()[0]["id"] == 1


def test_ten_thousand_clips_stay_quick(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    count, asked, read = 10_000, [0], Catalog.segments

    def segments(self: Catalog, source: int | None = None, ids: Sequence[int] | None = None) -> list[Segment]:
        asked.append(len(ids or ()))
        return read(self, source, ids)

    monkeypatch.setattr(Catalog, "segments", segments)
    scores, notes = {"mos": 3.0, "snr_db": 30.0, "heard_error": 0.01}, {"voice": "VOICE" * 50}
    clips = [
        Segment(source=1, start=4.0 * at, end=4.0 * at + 3, text="x", audio="x", scores=scores, notes=notes)
        for at in range(count)
    ]
    with Catalog(tmp_path, create=True) as catalog:
        source = catalog.add_source("/r/long.wav", 1, 1, 4.0 * count, 44100, 1)
        catalog.add_segments(source.id, clips, [], 4.0 * count)
        review = Review(catalog, cutter(tmp_path))
        review.state()
        started = time.perf_counter()
        page = review.rows(review.ids({"sort": "worst"})["ids"][:50])
        edited = review.edit({"action": "reject", "arguments": {"id": page[0]["id"]}})
        seen = review.preview({"min_mos": 3.5})
        took = time.perf_counter() - started
        assert len(page) == 50 and edited["state"]["used"]["clips"] == count - 1 and seen["used"]["segments"] == 0
        assert "VOICE" not in json.dumps(page), "voices are large, and the page does not show them"
        assert took < 5, f"list, edit and preview took {took:.2f} s"
        renamed = review.edit({"action": "rename_speaker", "arguments": {"old": "", "new": "ann"}})
        assert renamed["all"] and renamed["state"]["speakers"] == [("ann", count)]
        assert max(asked) <= 1000, "SQLite takes few values in one query"
        review.close()


def test_the_files_are_written_by_one_thread_at_a_time_and_once(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    running, most, calls = 0, 0, 0

    def slowly(_: Catalog) -> None:
        nonlocal running, most, calls
        running, calls = running + 1, calls + 1
        most = max(most, running)
        time.sleep(0.05)
        running -= 1

    monkeypatch.setattr(review_module, "write_corpus", slowly)
    with Catalog(folder, lock=False) as catalog:
        review = Review(catalog, cutter(folder))
        for number in (1, 2):
            review.edit({"action": "keep", "arguments": {"id": number}})
            threads = [threading.Thread(target=review.write) for _ in range(4)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        review.close()
    assert (most, calls) == (1, 2), "one write for each version of the catalog"


def test_a_wide_waveform_shows_what_a_clip_was_cut_from(tmp_path: Path) -> None:
    silent, loud = np.zeros(4 * RATE), np.full(4 * RATE, 0.8)
    sf.write(tmp_path / "stereo.wav", np.stack([silent, loud], 1), RATE)
    with Catalog(tmp_path / "corpus", create=True) as catalog:
        review = Review(catalog, cutter(tmp_path))
        for size, channels, expected in ((1, 1, [102]), (2, 2, [0, 204])):  # mixed down, or cut apart
            source = catalog.add_source(str(tmp_path / "stereo.wav"), size, 0, 4.0, RATE, channels)
            clips = [Segment(source=source.id, channel=side, start=1, end=3) for side in range(channels)]
            added = catalog.add_segments(source.id, clips, [], 4.0)
            assert [max(review.peaks(number, wide=True)["peaks"]) for number in added] == expected


# ---- in a browser


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, Review, str]]:
    folder = collected(tmp_path_factory.mktemp("served") / "corpus")
    with Catalog(folder, lock=False) as catalog, listen(LOOPBACK, 0) as listener:
        review = Review(catalog, cutter(folder))
        guard = Guard(review_app(review), "token", listener.getsockname()[1])
        server = uvicorn.Server(uvicorn.Config(guard, log_level="warning", timeout_graceful_shutdown=1))
        thread = threading.Thread(target=server.run, args=([listener],))
        thread.start()
        yield folder, review, guard.address
        server.should_exit = True
        thread.join()


@pytest.fixture
def address(served: tuple[Path, Review, str]) -> Iterator[str]:
    """The server of this module; the edits of a test are undone after it."""
    yield served[2]
    while served[1].step("undo", None)["edit"]:
        pass


@pytest.fixture
def corpus(served: tuple[Path, Review, str]) -> Path:
    return served[0]


class Tab(BrowserTab):
    """The review page."""

    @property
    def selected(self) -> int:
        return int(self.page.get_attribute("li[aria-current=true]", "data-id"))

    def order(self, value: str) -> None:
        self.page.select_option("select[name=sort]", value)
        self.page.wait_for_function("() => document.querySelector('li').dataset.id === '1'")
        self.page.focus("li.clip")


@pytest.fixture
def tab(browser: Any, address: str) -> Iterator[Tab]:
    opened = Tab(browser, address)
    yield opened
    opened.context.close()
    assert not opened.errors


def clip_of(folder: Path, number: int) -> Segment:
    with Catalog(folder, lock=False) as catalog:
        return catalog.segment(number)


@pytest.mark.browser
def test_everything_works_by_keyboard(corpus: Path, tab: Tab) -> None:
    page = tab.page
    tab.order("time|0")
    tab.keys("e", "Control+a")
    page.keyboard.type("Typed by hand.")
    tab.keys("Enter")
    tab.saved("Typed by hand")
    assert clip_of(corpus, 1).text == "Typed by hand." and tab.selected == 1
    tab.keys("y")
    tab.saved("keep")
    assert tab.selected == 2, "a decision goes on to the next clip"
    tab.keys("x")
    tab.saved("reject of clip 2")
    assert (clip_of(corpus, 1).decision, clip_of(corpus, 2).decision) == ("keep", "reject")
    tab.keys("u")
    tab.saved("Undone: reject")
    assert tab.selected == 2 and clip_of(corpus, 2).decision == ""
    tab.keys("Shift+U")
    tab.saved("Redone")
    assert clip_of(corpus, 2).decision == "reject"
    tab.keys("k", "m")
    tab.saved("merge")
    assert page.locator("li.clip").count() == 11 and clip_of(corpus, 1).end == pytest.approx(7.0)
    tab.keys(*["ArrowRight"] * 20, "s")
    tab.saved("split")
    assert page.locator("li.clip").count() == 12 and clip_of(corpus, 1).end == pytest.approx(2.5)
    tab.keys("q", "q")
    tab.saved("moved cut")
    assert clip_of(corpus, 1).start == pytest.approx(0.4)
    tab.keys("n")
    tab.keys("Control+a")
    page.keyboard.type("Zoë")
    tab.keys("Tab")
    tab.saved("Zoë")
    assert clip_of(corpus, 1).speaker == "Zoë"
    tab.keys("Escape", "?")
    assert page.locator("#help").is_visible() and "split at the cursor" in page.inner_text("#keys")
    tab.keys("Escape")
    assert not page.locator("#help").is_visible()


@pytest.mark.browser
def test_a_move_belongs_to_its_clip(corpus: Path, tab: Tab) -> None:
    first, second = clip_of(corpus, 1), clip_of(corpus, 2)
    tab.order("time|0")
    tab.keys("q", "j", "q")
    tab.saved("moved cut of clip 2")
    moved = clip_of(corpus, 1), clip_of(corpus, 2)
    assert [clip.start for clip in moved] == pytest.approx([first.start - 0.05, second.start - 0.05])
    assert [clip.end for clip in moved] == [first.end, second.end]


@pytest.mark.browser
def test_keys_work_with_any_keyboard_layout(corpus: Path, tab: Tab) -> None:
    session = tab.context.new_cdp_session(tab.page)

    def press(key: str, code: str, modifiers: int = 0) -> None:
        for kind in ("keyDown", "keyUp"):
            pressed = {"type": kind, "key": key, "code": code, "modifiers": modifiers}
            session.send("Input.dispatchKeyEvent", pressed)

    control, shift = 2, 8
    tab.order("time|0")
    press("ت", "KeyJ")
    assert tab.selected == 2, "Persian"
    press("й", "KeyQ")
    tab.saved("moved cut of clip 2")
    assert clip_of(corpus, 2).start == pytest.approx(3.45), "Russian"
    press("я", "KeyZ", control)
    tab.saved("Undone: moved cut")
    press("a", "KeyQ")
    tab.page.wait_for_timeout(600)
    assert clip_of(corpus, 2).start == 3.5, "a Latin letter of another layout is itself"
    press("؟", "Slash", shift)
    assert tab.page.locator("#help").is_visible()


@pytest.mark.browser
def test_texts_from_a_corpus_are_never_html(corpus: Path, tab: Tab) -> None:
    page = tab.page
    assert page.locator("li.clip textarea").evaluate_all("all => all.map(one => one.value)").count(HOSTILE) == 2
    tab.order("time|0")
    tab.keys("j", "j")
    assert page.title() == "corpus – MyXTTS review"
    assert page.locator("main img, main script, main b, main i:not(.small i)").count() == 0
    assert "<i>chapter 1 & 2.wav" in page.inner_text(".detail")
    page.click("#open-rename")
    assert page.input_value("#new-name") == TEXTS[2][2]
    page.fill("#new-name", "Robert")
    page.click("#rename-now")
    tab.saved("renamed to Robert")
    assert [clip_of(corpus, number).speaker for number in (3, 9)] == ["Robert", "Robert"]


@pytest.mark.browser
def test_a_clip_plays_and_its_cut_is_dragged(corpus: Path, tab: Tab) -> None:
    page = tab.page
    tab.order("time|0")
    tab.keys("j")
    tab.keys(" ")
    page.wait_for_function("() => parseFloat(document.querySelector('[aria-current] .small i').style.left) > 5")
    assert page.get_attribute("[aria-current] .play", "aria-pressed") == "true"
    tab.keys(" ")
    page.wait_for_selector("[aria-current] .play[aria-pressed=false]")
    before = clip_of(corpus, 2)
    page.wait_for_function("() => document.querySelector('.edge').style.left")
    box = page.locator(".wide").bounding_box()
    per_second = box["width"] / (before.seconds + 4)
    at = box["x"] + 2 * per_second, box["y"] + 10
    page.mouse.move(*at)
    page.mouse.down()
    page.mouse.move(at[0] + 0.75 * per_second, at[1], steps=5)
    page.mouse.up()
    tab.saved("moved cut")
    after = clip_of(corpus, 2)
    assert after.start == pytest.approx(before.start + 0.75, abs=0.03) and after.end == before.end
    assert after.audio != before.audio and (corpus / "wavs" / after.audio).stat().st_size > RATE / 100
    page.focus(".edge[aria-label='End of the clip']")
    tab.keys("ArrowRight", "ArrowRight")
    page.wait_for_timeout(700)
    assert clip_of(corpus, 2).end == pytest.approx(before.end + 0.1)


@pytest.mark.browser
def test_two_tabs_never_lose_what_was_typed(corpus: Path, browser: Any, tab: Tab, address: str) -> None:
    other = Tab(browser, address)
    for one in (tab, other):
        one.order("time|0")
        one.keys("e", "Control+a")
    tab.page.keyboard.type("first tab")
    other.page.keyboard.type("second tab")
    tab.keys("Enter")
    tab.saved("first tab")
    other.keys("Enter")
    other.saved("changed elsewhere")
    assert clip_of(corpus, 1).text == "first tab"
    text = other.page.locator("li.clip textarea").first
    assert text.input_value() == "second tab" and "first tab" in other.page.inner_text(".conflict")
    text.focus()
    text.blur()
    other.page.click("#again")
    other.page.wait_for_timeout(300)
    assert text.input_value() == "second tab", "what was typed survives a new list"
    assert clip_of(corpus, 1).text == "first tab", "only Enter overwrites another's text"
    text.focus()
    other.keys("Enter")
    other.saved("Saved: text “second tab”")
    assert clip_of(corpus, 1).text == "second tab" and other.page.locator(".conflict").count() == 0
    tab.page.wait_for_function("() => document.querySelector('textarea').value === 'second tab'")
    other.context.close()
    assert [line for line in other.errors if "409" not in line] == []


@pytest.mark.browser
def test_a_slider_shows_its_effect_before_it_is_applied(corpus: Path, tab: Tab) -> None:
    page = tab.page
    page.keyboard.press("t")
    page.wait_for_function("() => document.getElementById('effect').textContent.includes('no change')")
    page.get_by_label("heard error, at most", exact=True).fill("0.01")
    page.wait_for_function("() => /\\(−.*clip/.test(document.getElementById('effect').textContent)")
    promised = re.search(r"−(\d+) clips", page.inner_text("#effect"))
    with Catalog(corpus, lock=False) as catalog:
        assert catalog.filters == Filters()
    page.click("#apply")
    tab.saved("applied")
    with Catalog(corpus, lock=False) as catalog:
        assert catalog.filters.max_heard_error == 0.01
    assert promised and f"{8 - int(promised[1])} of 12 clips" in page.inner_text("#totals")


@pytest.mark.browser
@pytest.mark.parametrize("width", [360, 768, 1280])
def test_it_fits_and_persian_runs_from_right_to_left(width: int, browser: Any, address: str) -> None:
    narrow = Tab(browser, address, viewport={"width": width, "height": 800}, color_scheme="dark")
    page = narrow.page
    assert page.evaluate("() => document.documentElement.scrollWidth") <= width
    directions = page.locator("li.clip textarea").evaluate_all(
        "all => all.map(one => [one.lang, getComputedStyle(one).direction])"
    )
    assert sorted(map(tuple, directions)) == sorted(
        [("fa", "rtl")] * 4 + [("en", "ltr")] * 6 + [("de", "ltr")] * 2
    )
    assert page.evaluate("() => getComputedStyle(document.body).backgroundColor") == "rgb(15, 18, 22)"
    unnamed = page.locator("button, input, select, textarea, [role=slider]").evaluate_all(UNNAMED)
    assert json.dumps(unnamed) == "[]", "every control has a name for screen readers"
    narrow.context.close()
    assert not narrow.errors
