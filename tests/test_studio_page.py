"""The studio's page in a real browser: heard, seen, translated, and used without a mouse."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("starlette")
pytest.importorskip("uvicorn")
import uvicorn
from browser_fixtures import UNNAMED, BrowserTab
from review_fixtures import HOSTILE
from studio_fixtures import PROCESS, TEXTS, application, make_studio, write_places

from myxtts.data.prepare import prepare
from myxtts.settings import load
from myxtts.synthesis.synthesizer import Synthesizer
from myxtts.synthesis.voices import Voice
from myxtts.web.pages import LOOPBACK, listen
from myxtts.web.studio import corpus_flags

pytest_plugins = ["browser_fixtures", "synthesis_fixtures"]
pytestmark = pytest.mark.browser
VIEWS = ("hear", "voices", "corpora", "train", "runs")


@pytest.fixture(scope="module")
def places(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("studio")
    write_places(folder)
    for _ in range(2):
        prepare(load(None, corpus_flags(folder / "corpora" / "tales")).settings)
    return folder


@pytest.fixture(scope="module")
def address(browser: Any, places: Path, synthesizer: Synthesizer, anna: Voice) -> Iterator[str]:  # noqa: ARG001
    with listen(LOOPBACK, 0) as listener:
        studio, models = make_studio(places, synthesizer, anna, listener.getsockname()[1])
        app = application(studio, models)
        server = uvicorn.Server(
            uvicorn.Config(app, log_level="warning", timeout_graceful_shutdown=1, lifespan="off")
        )
        thread = threading.Thread(target=server.run, args=([listener],))
        thread.start()
        yield studio.address
        server.should_exit = True
        thread.join()
        studio.close()
        models.close()


@pytest.fixture
def tab(browser: Any, address: str) -> Iterator[BrowserTab]:
    opened = BrowserTab(browser, address)
    yield opened
    opened.context.close()
    assert not opened.errors


def go(tab: BrowserTab, view: str) -> Any:
    tab.page.click(f"nav a[href='#{view}']")
    tab.page.wait_for_selector(f"#{view}:not([hidden])")
    tab.page.wait_for_load_state("networkidle")
    return tab.page


def test_a_text_is_spoken_can_be_kept_and_said_again_with_its_seed(tab: BrowserTab) -> None:
    page = tab.page
    page.fill("textarea", "The harbour was quiet today.")
    page.fill("#speak [name=seed]", "7")
    page.select_option("#speak [name=voice]", "ben")
    page.click("#speak button[type=submit]")
    take = page.locator("#takes li").first
    take.locator("audio").wait_for(timeout=30_000)
    assert "first sound after" in take.inner_text() and "ben" in take.inner_text()
    with page.expect_download() as download:
        take.get_by_text("Download").click()
    assert download.value.suggested_filename == "ben-7.wav"
    content = Path(download.value.path()).read_bytes()
    assert content[:4] == b"RIFF" and len(content) > 10_000
    page.fill("#speak [name=seed]", "")
    take.get_by_label("Use seed 7 again").click()
    assert page.input_value("#speak [name=seed]") == "7"


def test_a_voice_is_recorded_mixed_and_deleted(tab: BrowserTab) -> None:
    page = go(tab, "voices")
    page.click("#record")
    page.wait_for_timeout(3000)
    page.click("#record")
    page.wait_for_selector("#preview:not([hidden])")
    page.fill("#add-voice [name=name]", "me")
    page.click("#add-voice [type=submit]")
    tab.saved("The voice me was saved.")
    page.select_option("#mix [name=second]", "me")
    page.fill("#mix [name=share]", "20")
    assert page.inner_text("#mix-now") == "anna 80% · me 20%"
    page.fill("#mix [name=name]", "duo")
    page.click("#mix [type=submit]")
    tab.saved("The voice duo was saved.")
    page.on("dialog", lambda dialog: dialog.accept())
    for name in ("me", "duo"):
        page.get_by_label(f"Delete {name}").click()
        tab.saved(f"{name} was deleted.")
    assert page.locator("#voice-list li").count() == 2


def test_a_corpus_shows_what_is_used_and_leads_to_its_review(tab: BrowserTab) -> None:
    page = go(tab, "corpora")
    page.select_option("#corpus", "tales")
    page.wait_for_selector("#corpus-table table")
    assert HOSTILE not in page.content() and "missing" in page.inner_text("#corpus-table table")
    page.select_option("#corpus", "collected")
    page.click("#review")
    page.wait_for_selector("body[data-ready=yes] li.clip")
    page.click("#home")
    page.wait_for_selector("#corpora:not([hidden])")


def test_a_run_is_watched_and_stopped(tab: BrowserTab, places: Path) -> None:
    folder = places / "runs" / "second"
    command = [sys.executable, "-c", PROCESS, str(Path(__file__).parent.parent), str(folder)]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        assert process.stdout and process.stdout.readline() == b"held\n"
        page = go(tab, "train")
        page.select_option("#run", "second")
        tab.shows("run-state", "Training")
        assert "512.3" in page.inner_text("#numbers") and page.locator("#curves svg path").count() == 3
        page.click("#stop-run")
        tab.shows("run-state", "Not training")
        assert process.wait(20) == 0
    assert page.locator("#samples .card").count() == len(TEXTS) and page.is_visible("#resume")


def test_two_runs_are_compared_without_seeing_which_is_which(tab: BrowserTab) -> None:
    page = go(tab, "runs")
    for name in ("first", "second"):
        page.get_by_label(f"Compare {name}").check()
        page.wait_for_load_state("networkidle")
    page.click("#begin-blind")
    for number in range(len(TEXTS)):
        tab.shows("listening", f"Sentence {number + 1} of {len(TEXTS)}")
        assert "first" not in page.inner_html("#listening") and "second" not in page.inner_html("#listening")
        assert page.locator("#listening audio").count() == 2
        page.get_by_role("button", name="No difference").click()
    tab.shows("verdict", f"no difference: {len(TEXTS)}")


def test_texts_of_corpora_and_runs_are_never_html(tab: BrowserTab) -> None:
    for view in VIEWS:
        page = go(tab, view)
    page.get_by_label("Compare first").check()
    page.wait_for_load_state("networkidle")
    assert page.title() == "Runs – MyXTTS" and page.locator("main img, main script, main b b").count() == 0


def test_the_keyboard_reaches_everything_and_the_focus_follows_the_view(tab: BrowserTab) -> None:
    page = tab.page
    tab.keys("Tab")
    assert page.evaluate("() => document.activeElement.className") == "skip"
    tab.keys("Tab", "Tab", "Enter")
    page.wait_for_selector("#voices:not([hidden])")
    assert page.evaluate("() => document.activeElement.id") == "voices-title"
    assert page.get_attribute("nav a[href='#voices']", "aria-current") == "page"


@pytest.mark.parametrize("width", [360, 768, 1280])
@pytest.mark.parametrize("language", ["en", "fa"])
def test_it_fits_every_width_in_both_languages(width: int, language: str, browser: Any, address: str) -> None:
    options = {"viewport": {"width": width, "height": 800}, "color_scheme": "dark", "locale": language}
    tab = BrowserTab(browser, address, **options)
    page = tab.page
    for view in VIEWS:
        go(tab, view)
        assert page.evaluate("() => document.documentElement.scrollWidth") <= width, view
        unnamed = page.locator("button, input, select, textarea, audio").evaluate_all(UNNAMED)
        assert unnamed == [], "every control has a name for screen readers"
    assert page.evaluate("() => getComputedStyle(document.body).backgroundColor") == "rgb(15, 18, 22)"
    assert page.get_attribute("html", "dir") == ("rtl" if language == "fa" else "ltr")
    assert page.inner_text("#runs-title") == ("اجراها" if language == "fa" else "Runs")
    page.click("#language")
    assert page.get_attribute("html", "lang") == ("en" if language == "fa" else "fa")
    page.reload()
    page.wait_for_selector("body[data-ready=yes]")
    assert page.get_attribute("html", "lang") == ("en" if language == "fa" else "fa"), "the choice is kept"
    tab.context.close()
    assert not tab.errors
