"""The studio: what its server answers, and that training outlives it."""

from __future__ import annotations

import io
import json
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import soundfile

pytest.importorskip("starlette")
pytest.importorskip("uvicorn")
from conftest import write_corpus
from review_fixtures import HOSTILE
from starlette.testclient import TestClient
from studio_fixtures import PROCESS, TEXTS, application, make_studio, write_places, write_run

from myxtts.cli import main
from myxtts.data.prepare import prepare
from myxtts.files import held_by, lock
from myxtts.settings import load
from myxtts.synthesis.synthesizer import Synthesizer
from myxtts.synthesis.voices import Voice
from myxtts.web import studio as studio_module
from myxtts.web.studio import Folders, corpus_flags, is_corpus, speaker_of_run

pytest_plugins = ["synthesis_fixtures"]
ADDRESS = "http://127.0.0.1:4321"


@pytest.fixture(scope="module")
def places(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("studio")
    write_places(folder)
    return folder


@pytest.fixture
def client(places: Path, synthesizer: Synthesizer, anna: Voice) -> Iterator[TestClient]:
    studio, models = make_studio(places, synthesizer, anna)
    with TestClient(application(studio, models), ADDRESS, raise_server_exceptions=False) as client:
        assert client.get(studio.address.removeprefix(ADDRESS)).status_code == 200
        yield client
    studio.close()
    models.close()


def started(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """The arguments of the commands that would have been started."""
    found: list[list[str]] = []

    class Done:
        pid, returncode = 0, 0

        def __init__(self, command: list[str], **_: Any) -> None:
            found.append(command)

        def poll(self) -> int:
            return 0

    monkeypatch.setattr(studio_module.subprocess, "Popen", Done)
    return found


def test_strangers_see_nothing_and_the_api_is_that_of_serve(places: Path, synthesizer: Any, anna: Any) -> None:
    studio, models = make_studio(places, synthesizer, anna)
    stranger = TestClient(application(studio, models), ADDRESS)
    for path in (
        "/",
        "/studio.js",
        "/studio/runs",
        "/studio/sound/x",
        "/review/collected/",
        "/studio/report?name=first",
    ):
        assert stranger.get(path).status_code == 403
    assert stranger.post("/studio/train", json={}).status_code == 403
    assert stranger.get("/v1/models").json()["data"][0]["id"] == "tiny", "on loopback, as without the page"
    for path in ("/", "/v1/models"):
        assert stranger.get(path, headers={"host": "evil.example"}).status_code in (403, 421)
    keyed = TestClient(application(studio, models, "secret"), ADDRESS)
    assert keyed.get("/v1/models").status_code == 401
    assert keyed.get("/v1/models", headers={"authorization": "Bearer secret"}).status_code == 200
    keyed.get(studio.address)
    assert keyed.get("/v1/models").status_code == 200, "the page of the owner needs no key"
    assert keyed.post("/v1/audio/speech", json={}, headers={"origin": "http://evil.example"}).status_code == 403
    studio.close()
    models.close()


def test_every_file_of_the_page_is_sent_and_loads_nothing_from_elsewhere(client: TestClient) -> None:
    for path in ("/", "/studio.js", "/studio.css", "/studio.json", "/page.js", "/style.css"):
        answer = client.get(path)
        assert answer.status_code == 200 and "default-src 'none'" in answer.headers["content-security-policy"]
        assert "https:" not in answer.text and "//cdn" not in answer.text
    words = client.get("/studio.json").json()
    page, script = client.get("/").text, client.get("/studio.js").text
    named = {
        part.split('"')[0]
        for mark in ('data-t="', 'data-t-label="', 'data-t-hint="')
        for part in page.split(mark)[1:]
    }
    named |= {part.split('"')[0] for part in script.split(' t("')[1:] + script.split('(t("')[1:]}
    assert named <= words.keys(), "every word has a translation"
    assert all(len(both) == 2 and all(both) for both in words.values())
    assert "style=" not in page and "<script>" not in page


def test_the_page_speaks_and_makes_voices_through_the_api(client: TestClient) -> None:
    spoken = client.post(
        "/v1/audio/speech", json={"input": "Hello.", "voice": "anna", "response_format": "pcm", "seed": 3}
    )
    assert spoken.status_code == 200 and len(spoken.content) > 1000 and spoken.headers["x-myxtts-seed"] == "3"
    mixed = client.post("/v1/audio/voices", json={"name": "duo", "mix": {"anna": 0.7, "ben": 0.3}})
    assert mixed.status_code == 200
    assert client.delete("/v1/audio/voices/duo").status_code == 200


def test_a_run_is_heard_after_it_was_loaded(client: TestClient) -> None:
    assert client.post("/studio/hear", json={"name": "first"}).status_code == 200
    assert {model["id"] for model in client.get("/v1/models").json()["data"]} == {"tiny", "first"}
    assert client.post("/studio/hear", json={"name": "first"}).status_code == 200, "again, if it was trained"
    assert client.post("/studio/hear", json={"name": "../first"}).status_code == 404
    voices = client.get("/v1/audio/voices", params={"model": "first"}).json()["data"]
    assert [voice["name"] for voice in voices] == ["speaker"], "a run without voices speaks as its corpus does"
    body = {"input": "Hi there.", "language": "en", "model": "first", "voice": "speaker", "response_format": "pcm"}
    assert client.post("/v1/audio/speech", json=body).status_code == 200


def test_the_voice_of_a_run_is_that_of_the_speaker_with_the_most_clips(tmp_path: Path) -> None:
    corpus = write_corpus(tmp_path / "corpus", ["x", "y", "z"], seconds=2.0)
    (corpus / "metadata.csv").write_text(
        "id|text|speaker_name\nclip000|x|ann\nclip001|y|Bob/2\nclip002|z|Bob/2\ngone|w|Bob/2\n"
    )
    run = tmp_path / "run"
    run.mkdir()
    (run / "settings.yaml").write_text(f"data:\n  train_data: {corpus}\n")
    found = speaker_of_run(run)
    assert found is not None and found[0] == "Bob 2"
    assert soundfile.info(io.BytesIO(found[1])).duration == pytest.approx(4.0, abs=0.1)
    shutil.rmtree(corpus)
    assert speaker_of_run(run) is None


def test_names_of_folders_are_chosen_never_paths(client: TestClient, places: Path) -> None:
    assert [corpus["name"] for corpus in client.get("/studio/corpora").json()] == [
        "collected",
        "tales",
        "embedded",
    ]
    assert sorted(run["name"] for run in client.get("/studio/runs").json()) == ["first", "second"]
    for name in ("", "../corpora/tales", str(places / "corpora" / "tales"), "nothing", "\0"):
        assert client.get("/studio/corpus", params={"name": name}).status_code == 404
        assert client.get("/studio/live", params={"name": name}).status_code == 404
        assert client.get("/studio/report", params={"name": name}).status_code == 404
        assert client.post("/studio/stop", json={"name": name}).status_code == 404
    assert client.post("/studio/stop", json={"name": ["first"]}).status_code == 404


def test_folders_two_levels_below_a_root_have_names_without_slashes(tmp_path: Path) -> None:
    for place in ("one", "one/inner", "other/one", ".hidden", "a/b/too-deep"):
        write_corpus(tmp_path / place, ["x"])
    (tmp_path / "pairs").mkdir()
    for name in ("a.txt", "a.wav"):
        (tmp_path / "pairs" / name).write_text("x")
    folders = Folders([tmp_path, tmp_path / "other"], is_corpus, "corpus")
    assert list(folders.all()) == ["one", "one › inner", "other › one", "pairs"]
    write_corpus(tmp_path / "new", ["x"])
    assert folders.named("new") == tmp_path / "new", "what is not known is looked for again"


def test_the_table_of_a_prepared_corpus_says_what_is_used_and_why_not_the_rest(
    client: TestClient, places: Path
) -> None:
    before = client.get("/studio/corpus", params={"name": "tales"}).json()
    assert before["table"] is None and before["state"] == "ended"
    settings = load(None, corpus_flags(places / "corpora" / "tales")).settings
    for _ in range(2):  # the first one makes the cache inside the folder, which is a change of it
        prepare(settings)
    table = client.get("/studio/corpus", params={"name": "tales"}).json()["table"]
    assert table["train"]["clips"] + table["val"]["clips"] == 6 and table["train"]["seconds"] > 1
    assert table["num_set_aside"] == 1 and table["reasons"][0]["clips"] == 1
    assert table["set_aside"][0]["id"] == "missing" and "metadata.csv" in table["set_aside"][0]["where"]
    assert [share["name"] for share in table["languages"]] == ["en"] and sum(table["lengths"]) == 6
    assert table["is_unnamed"]


def test_preparing_is_a_process_whose_failure_is_shown(
    client: TestClient, places: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent.parent))
    (places / "corpora" / "broken").mkdir()
    (places / "corpora" / "broken" / "metadata.csv").write_text("a|b\n")
    try:
        assert client.post("/studio/prepare", json={"name": "broken"}).json()["state"] == "starting"
        ends_at = time.monotonic() + 60
        while (found := client.get("/studio/corpus", params={"name": "broken"}).json())["state"] == "starting":
            assert time.monotonic() < ends_at
            time.sleep(0.1)
        assert found["state"] == "failed" and any("error:" in line for line in found["log"])
    finally:
        (places / "corpora" / "broken" / "metadata.csv").unlink()


def test_the_review_page_is_inside(client: TestClient) -> None:
    page = client.get("/review/collected/")
    assert page.status_code == 200 and 'src="review.js"' in page.text
    assert client.get("/review/collected/api/state").json()["clips"] == 6
    changed = client.post("/review/collected/api/edit", json={"action": "reject", "arguments": {"id": 1}})
    assert changed.status_code == 200 and changed.json()["state"]["decided"] == 1
    assert client.get("/review/collected/audio/1").status_code == 200
    assert client.get("/review/tales/").status_code == 400, "it was not collected"
    assert client.get("/review/nothing/").status_code == 404


def test_live_numbers_and_samples_of_a_run(client: TestClient) -> None:
    found = client.get("/studio/live", params={"name": "first"}).json()
    assert found["state"] == "ended" and found["last"]["step"] == 100 and found["last"]["clips_per_s"] == 512.3
    (stage,) = found["stages"]
    assert stage["losses"][-1][0] == 100 and stage["validations"] == [[50, 3.5], [100, 3.0]]
    assert [row["step"] for row in found["samples"]] == [50] * 3 + [100] * 3, "none from outside the folder"
    assert {row["text"] for row in found["samples"]} == set(TEXTS)
    answer = client.get(found["samples"][0]["file"])
    assert answer.status_code == 200 and answer.headers["content-type"] == "audio/wav"
    assert client.get("/studio/sound/wrong").status_code == 404


def test_training_starts_with_what_was_chosen_and_nothing_else(
    client: TestClient, places: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    commands = started(monkeypatch)
    form = {"name": "new run", "corpus": "tales", "start": "none", "preset": "12gb", "language": "en", "steps": 50}
    for wrong in (
        {"name": "../x"}, {"name": "first"}, {"name": 3}, {"name": "a/b"}, {"corpus": "x"}, {"start": "/etc"},
        {"preset": "--help"}, {"language": "xx"}, {"steps": "5"}, {"steps": 0}, {"steps": True},
    ):  # fmt: skip
        assert client.post("/studio/train", json=form | wrong).status_code in (400, 404), wrong
    assert not commands and not (places / "runs" / "new run").exists()
    assert client.post("/studio/train", json=form | {"single_speaker": True, "spoken": True}).status_code == 200
    tales, run = places / "corpora" / "tales", places / "runs" / "new run"
    assert commands[0][1:] == [
        "-m", "myxtts", "train", "--train-data", f"{tales}/", "--checkpoint-dir", str(run), "--init-from", "none",
        "--preset", "12gb", "--language", "en", "--max-steps", "50", "--spoken-sentences", "4", "--single-speaker",
    ]  # fmt: skip
    assert "new run" in [run["name"] for run in client.get("/studio/runs").json()], "at once"
    assert client.get("/studio/live", params={"name": "new run"}).json()["last"] is None
    again = client.post("/studio/resume", json={"name": "new run"})
    assert again.status_code == 400 and "before it began" in again.json()["error"]
    assert client.post("/studio/resume", json={"name": "first", "steps": 200}).status_code == 200
    first = places / "runs" / "first"
    assert commands[1][3:] == [
        "train", "--config", str(first / "settings.yaml"), "--checkpoint-dir", str(first), "--max-steps", "200",
    ]  # fmt: skip
    (run / "studio.log").unlink()
    run.rmdir()


def test_a_run_survives_the_server_and_is_stopped_by_the_next_one(places: Path, client: TestClient) -> None:
    folder = places / "runs" / "second"
    command = [sys.executable, "-c", PROCESS, str(Path(__file__).parent.parent), str(folder)]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        assert process.stdout and process.stdout.readline() == b"held\n"
        assert held_by(folder) == process.pid
        assert client.get("/studio/live", params={"name": "second"}).json()["state"] == "training"
        refused = client.post("/studio/resume", json={"name": "first"})
        assert refused.status_code == 400 and "'second' is training" in refused.json()["error"]
        client.post("/studio/stop", json={"name": "second"})
        client.post("/studio/stop", json={"name": "second"})  # a second signal would end it at once
        state = client.get("/studio/live", params={"name": "second"}).json()["state"]
        assert state in ("stopping", "ended")
        assert process.wait(20) == 0 and (folder / "saved").read_text() == "yes"
    assert client.get("/studio/live", params={"name": "second"}).json()["state"] == "ended"


def test_the_holder_of_a_lock_is_known_only_while_it_holds_it(tmp_path: Path) -> None:
    assert held_by(tmp_path) is None
    with lock(tmp_path):
        assert held_by(tmp_path) is not None
    assert held_by(tmp_path) is None, "this process lives on, but holds nothing"


def test_two_runs_are_compared_and_listeners_do_not_see_whose_sound_it_is(
    client: TestClient, places: Path
) -> None:
    asked = {"a": "first", "b": "second"}
    found = client.get("/studio/compare", params=asked).json()
    assert ["data.batch_size", "16", "7"] in found["settings"]
    assert [row["text"] for row in found["samples"]] == TEXTS and found["listening"]["p"] == 1
    shown = {sound for row in found["samples"] for sound in row["sounds"]}
    trials = client.post("/studio/trials", json=asked).json()
    assert {trial["text"] for trial in trials} == set(TEXTS)
    assert not shown & {sound for trial in trials for sound in trial["sounds"]}
    assert "first" not in json.dumps(trials) and "second" not in json.dumps(trials)
    for trial, chosen in zip(trials, (0, 1, None), strict=True):
        assert client.post("/studio/answer", json={"id": trial["id"], "chosen": chosen}).status_code == 200
    assert client.post("/studio/answer", json={"id": trials[0]["id"], "chosen": 0}).status_code == 400, "once"
    kept = [json.loads(line) for line in (places / "runs" / "listening.jsonl").read_text().splitlines()]
    assert [line["runs"] for line in kept] == [["first", "second"]] * 3 and kept[2]["preferred"] == ""
    tally = client.get("/studio/compare", params={"a": "second", "b": "first"}).json()["listening"]
    assert sum(tally["preferred"]) == 2 and tally["neither"] == 1 and 0 < tally["p"] <= 1


def test_a_blind_comparison_credits_the_run_whose_sound_was_chosen(
    places: Path, synthesizer: Synthesizer, anna: Voice
) -> None:
    studio, models = make_studio(places, synthesizer, anna)
    runs, before = studio.runs, studio.runs.compare(("second", "first"))["listening"]["preferred"]
    for trial in runs.trials({"a": "first", "b": "second"}):
        paths = [runs.sounds.path(sound.rpartition("/")[2]) for sound in trial["sounds"]]
        runs.answer({"id": trial["id"], "chosen": int("second" in paths[1].parts)})
    after = runs.compare(("second", "first"))["listening"]["preferred"]
    assert [now - then for now, then in zip(after, before, strict=True)] == [3, 0]
    studio.close()
    models.close()


def test_a_report_is_shown_in_a_sandbox(client: TestClient, places: Path) -> None:
    answer = client.get("/studio/report", params={"name": "first"})
    assert answer.status_code == 200 and "first" in answer.text and HOSTILE not in answer.text
    assert "sandbox allow-scripts" in answer.headers["content-security-policy"]
    assert not (places / "runs" / "first" / "report.html").exists()


def test_a_damaged_run_is_listed_with_its_problem(client: TestClient, places: Path) -> None:
    folder = write_run(places / "runs" / "damaged")
    (folder / "model.json").write_text("{")
    found = {run["name"]: run for run in client.get("/studio/runs").json()}
    assert "model.json" in found["damaged"]["problem"] and not found["first"]["problem"]
    stage = next(stage for stage in found["first"]["stages"] if stage["stage"] == "gpt")
    assert (stage["state"], stage["step"], stage["target"], stage["best_loss"]) == ("unfinished", 100, 200, 3.0)
    shutil.rmtree(folder)


def test_folders_that_are_not_there_are_reported_before_a_model_is_loaded(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert main(["studio", "--runs", str(tmp_path / "nothing"), "--model", str(tmp_path), "--port", "0"]) == 2
    assert "no such folder" in capsys.readouterr().err
