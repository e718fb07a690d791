"""The page's server: who may ask, what it answers, and that it reads run directories and nothing else."""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
import socket
import struct
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
import zlib
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
from asgi import Client
from shown_runs import (
    BEGAN_S,
    append_groups,
    ids_of,
    make_episodes,
    make_group,
    mark_trained,
    metrics_row,
    write_metrics,
    write_run,
    write_run_file,
)

from rollcall.base.atomic import write_atomic
from rollcall.base.errors import ConfigError
from rollcall.base.group_record import MAGIC, encode, stream_records
from rollcall.base.lease import hold
from rollcall.base.types import FinishReason
from rollcall.checkpoint.run_dir import is_run
from rollcall.observe.events import Events, Mark, MarkKind
from rollcall.observe.live import Live, ProcessState, write_live
from rollcall.observe.logs import keep_logs
from rollcall.observe.samples import TOKEN_SCORES, episode_columns, write_token_scores
from rollcall.observe.timeline import ATTEMPT_LOST, RUN_FAILED
from rollcall.view.api import ShownRuns
from rollcall.view.curves import GROUPS, describe, group_of, thinned
from rollcall.view.growing import MetricsTable
from rollcall.view.journal_index import JournalIndex
from rollcall.view.page_process import OPEN, Keys, PageRecord, parse_record, serving_page
from rollcall.view.server import PageServer, make_app

HOSTILE = "<script>window.harmed=1</script>\u202e\u0000\ud800<img src=x onerror=window.harmed=1>"


@pytest.fixture(scope="module")
def two_runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two small runs in one folder; to be left as they are."""
    folder = tmp_path_factory.mktemp("runs")
    write_run(folder, "alpha", steps=12)
    write_run(folder, "beta", steps=8, seed=3, actor={"lr": 3e-5})
    return folder


def open_page(*paths: Path) -> Client:
    keys = Keys()
    client = Client(make_app(ShownRuns(paths), keys=keys))
    assert client.get(OPEN + keys.new()).status == 200
    return client


def ids(client: Client) -> dict[str, str]:
    return {run["name"]: run["id"] for run in client.get("/api/runs").json["runs"]}


def only_run(client: Client) -> str:
    (id,) = ids(client).values()
    return id


def indexed(client: Client, run: str, **ask: Any) -> Any:
    """An answer about groups, once all of them are in the index."""
    while True:
        answer = client.get("/api/groups", run=run, **ask).json
        if answer["index"]["total"] and answer["index"]["files"] == answer["index"]["total"]:
            return answer


def test_without_its_key_every_address_answers_401(two_runs: Path) -> None:
    client = Client(make_app(ShownRuns([two_runs]), keys=Keys()))
    for path in ("/", "/api/runs", "/page/main.js", "/plotly.js", "/nothing", f"{OPEN}wrong.key", OPEN):
        answer = client.get(path)
        assert answer.status == 401, path
        assert b"alpha" not in answer.body and not client.cookies


def test_a_stranger_who_says_nothing_does_not_hold_the_page(two_runs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rollcall.nodes.http_server.MAX_CONNECTIONS", 16)
    server = PageServer(ShownRuns([two_runs]))
    serving = threading.Thread(target=server.run, daemon=True)
    serving.start()
    lines = [socket.create_connection(("127.0.0.1", server.port), timeout=60) for _ in range(30)]
    try:
        for line in lines:
            line.sendall(b"GET / HTTP/1.1\r\nHost: ")
        with urllib.request.urlopen(server.new_address(), timeout=60) as answer:
            assert answer.status == 200
        with suppress(ConnectionError):
            assert lines[0].recv(1) == b"", "the oldest makes way"
        lines[-1].sendall(b"127.0.0.1\r\n\r\n")
        answers = b"".join(iter(lambda: lines[-1].recv(1 << 16), b""))
        assert b" 401 " in answers, "and a connection without a key ends with its answer"
    finally:
        for line in lines:
            line.close()
        server.stop()
        serving.join()


def test_an_address_works_once_and_the_cookie_goes_on(two_runs: Path) -> None:
    keys = Keys()
    app = make_app(ShownRuns([two_runs]), keys=keys)
    key, first, second = keys.new(), Client(app), Client(app)
    opened = first.get(OPEN + key)
    assert "HttpOnly" in opened.headers["set-cookie"] and "strict" in opened.headers["set-cookie"].lower()
    assert first.get("/api/runs").status == 200
    assert second.get(OPEN + key).status == 401
    assert second.get("/api/runs").status == 401
    assert second.get(OPEN + keys.new()).status == 200


@pytest.mark.parametrize("host", ["evil.example", "evil.example:1234", "127.0.0.1.evil.example", "10.0.0.1:1234", ""])
def test_another_name_for_this_machine_is_refused(two_runs: Path, host: str) -> None:
    client = open_page(two_runs)
    assert client.get("/api/runs", headers={"host": host}).status == 421
    for fine in ("localhost:99", "127.0.0.1", "[::1]:8080", "LOCALHOST"):
        assert client.get("/api/runs", headers={"host": fine}).status == 200


def test_the_page_only_reads_and_runs_only_its_own_scripts(two_runs: Path) -> None:
    client = open_page(two_runs)
    assert client.get("/api/runs", method="POST").status == 405
    answer = client.get("/")
    policy = answer.headers["content-security-policy"]
    assert "default-src 'none'" in policy and "script-src 'self';" in policy and "frame-ancestors 'none'" in policy
    assert answer.headers["x-content-type-options"] == "nosniff" and answer.headers["referrer-policy"] == "no-referrer"
    assert b"http://" not in answer.body and b"https://" not in answer.body


@pytest.mark.parametrize("path", ["/page/../server.py", "/page/%2e%2e", "/page/__init__.py", "/page/", "/etc/passwd"])
def test_no_other_file_is_served(two_runs: Path, path: str) -> None:
    assert open_page(two_runs).get(path).status == 404


def test_the_pages_files_fetch_nothing_from_elsewhere_and_parse_no_html() -> None:
    folder = Path(__file__).parents[1] / "src/rollcall/view/page"
    files = [path for path in folder.iterdir() if path.suffix in (".js", ".css", ".html")]
    assert len(files) >= 12
    for path in files:
        text = path.read_text()
        assert not re.search(r"https?://(?!www\.w3\.org)", text), path
        assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval\(|new Function", text), path


def test_runs_are_listed_with_state_step_accuracy_and_speed(two_runs: Path) -> None:
    rows = {row["name"]: row for row in open_page(two_runs).get("/api/runs").json["runs"]}
    alpha = rows["alpha"]
    assert (alpha["step"], alpha["steps"], alpha["state"]) == (12, 12, "stopped")
    course = alpha["headline"]
    assert course["first"] == pytest.approx(0.1) and course["best"] == course["last"] > course["first"]
    assert alpha["step_s"] == pytest.approx(2.0, abs=0.2) and alpha["algorithm"] == "grpo"


def test_a_run_that_was_killed_failed_or_has_finished_says_so(tmp_path: Path) -> None:
    write_run(tmp_path, "killed", steps=2)
    write_run(tmp_path, "failed", steps=2)
    write_run(tmp_path, "finished", steps=2)
    begun = {"phase": "update", "step": 3, "start_s": BEGAN_S + 10}
    with (tmp_path / "killed" / "events.jsonl").open("a") as file:
        file.write(json.dumps(begun) + "\n")
    with (tmp_path / "failed" / "events.jsonl").open("a") as file:
        file.write(json.dumps(begun | {"end_s": BEGAN_S + 11, "result": "failed: ValueError"}) + "\n")
    (tmp_path / "finished" / "summary.json").write_text(
        '{"steps": 2, "headline": "eval/accuracy", "no_signal": {"steps": 2, "of": 2}}'
    )
    with (tmp_path / "finished" / "metrics.jsonl").open("a") as file:
        file.writelines(json.dumps({"step": step, "train/advantage_abs_mean": 0.0}) + "\n" for step in (1, 2))
    rows = {row["name"]: row for row in open_page(tmp_path).get("/api/runs").json["runs"]}
    assert {name: row["state"] for name, row in rows.items()} == {
        "killed": "killed", "failed": "failed", "finished": "finished"
    }  # fmt: skip
    assert rows["failed"]["text"] == "ValueError during update of step 3" and rows["failed"]["no_signal"] is None
    assert rows["finished"]["no_signal"] == "no step had a signal, so nothing was learned in 2 steps"


def test_a_run_says_why_it_failed_and_what_it_waits_for(tmp_path: Path) -> None:
    for name, mark in (("over", RUN_FAILED), ("held", ATTEMPT_LOST)):
        events = Events(write_run(tmp_path, name, steps=2, groups=1))
        events.mark(Mark(BEGAN_S + 9.0, mark, MarkKind.FAULT, None, "rollout rank 1 on node 2 is lost"))
        events.close()
    with hold(tmp_path / "held"):
        rows = {row["name"]: (row["state"], row["text"]) for row in open_page(tmp_path).get("/api/runs").json["runs"]}
    assert rows["over"] == ("failed", "rollout rank 1 on node 2 is lost")
    assert rows["held"] == ("waiting", "for the next attempt: rollout rank 1 on node 2 is lost")


def test_a_folder_shows_runs_that_appear_later_and_no_links(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rollcall.view.api.LOOK_EVERY_S", 0.0)
    outside = write_run(tmp_path / "elsewhere", steps=1)
    folder = tmp_path / "runs"
    folder.mkdir()
    (folder / "link").symlink_to(outside)
    places = ShownRuns([folder])
    assert places.all() == []
    write_run(folder / "deeper", "one", steps=1)
    assert [place.name for place in places.all()] == ["deeper/one"]
    with pytest.raises(ConfigError, match=r"none does not exist; pass a run directory"):
        ShownRuns([tmp_path / "none"])


def test_a_run_that_may_not_be_read_does_not_hide_the_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_run(tmp_path, "closed", steps=1, groups=1)
    write_run(tmp_path, "open", steps=1, groups=1)

    def look(path: Path) -> bool:
        if path.name == "closed":
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return is_run(path)

    monkeypatch.setattr("rollcall.view.api.is_run", look)
    client = open_page(tmp_path)
    assert [run["name"] for run in client.get("/api/runs").json["runs"]] == ["open"]
    refused = PermissionError(errno.EACCES, "Permission denied", "events.jsonl")
    monkeypatch.setattr("rollcall.view.processes.read_timeline", mock.Mock(side_effect=refused))
    answer = client.get("/api/timeline", run=only_run(client))
    assert (answer.status, answer.json) == (403, {"error": "events.jsonl cannot be read: Permission denied"})


def test_curves_follow_a_live_run_and_a_resumed_one(tmp_path: Path) -> None:
    run_dir = write_run(tmp_path, steps=4, groups=1)
    client = open_page(run_dir)
    run = only_run(client)

    def steps() -> list[float]:
        answer = client.get("/api/curves", run=run, name="train/reward_mean").json
        return answer["curves"]["train/reward_mean"][0]["x"]

    mark = client.get("/api/curves", run=run, name="train/loss").json["mark"]
    assert client.get("/api/curves", run=run, name="train/loss", seen=mark).json == {"mark": mark, "same": True}
    events = Events(run_dir)
    events.mark(Mark(BEGAN_S + 9.0, "run failed", MarkKind.FAULT, None, "out of memory"))
    events.close()
    answer = client.get("/api/curves", run=run, name="train/loss", seen=mark).json  # a fault without a step after it
    assert [one["name"] for one in answer["marks"][0]] == ["run failed"]
    write_metrics(run_dir, [5], num_steps=9)
    with (run_dir / "metrics.jsonl").open("a") as file:
        file.write('{"step": 6, "train/rew')  # being written
    assert steps() == [1, 2, 3, 4, 5]
    rows = [json.dumps(metrics_row(step, num_steps=4)) for step in (1, 2)]
    (run_dir / "new").write_text("\n".join(rows) + "\nnot a row\n")
    os.replace(run_dir / "new", run_dir / "metrics.jsonl")
    assert steps() == [1, 2]


def test_curves_of_a_long_run_are_thinned_and_keep_their_spikes(tmp_path: Path) -> None:
    values = np.zeros(10_000)
    values[4321], values[77] = 9.0, -9.0
    chosen = thinned(values, points=100)
    assert len(chosen) <= 102 and {0, 77, 4321, 9999} <= set(chosen.tolist())
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    write_metrics(run_dir, range(1, 900), num_steps=900)
    client = open_page(run_dir)
    ask = {"run": only_run(client), "name": "train/loss", "points": 50}
    whole = client.get("/api/curves", **ask).json["curves"]["train/loss"][0]
    assert whole["num"] == 899 and len(whole["x"]) <= 52
    part = client.get("/api/curves", **ask, low=100, high=120, smooth=0.9).json["curves"]["train/loss"][0]
    assert part["x"] == list(range(100, 121)) and np.ptp(part["even"]) < np.ptp(part["y"])
    assert client.get("/api/curves", **ask, low="x").status == 400


def test_every_metric_has_a_place_on_the_page() -> None:
    named = describe(["time/step_s", "eval/accuracy", "reward/my_own", "rollout/staleness_max", "train/kl", "mine"])
    assert [(row["name"], row["group"]) for row in named] == [
        ("eval/accuracy", "Accuracy"), ("reward/my_own", "Reward"), ("train/kl", "KL"), ("time/step_s", "Speed"),
        ("rollout/staleness_max", "Staleness"), ("mine", "Other"),
    ]  # fmt: skip
    assert named[0]["meaning"] and named[0]["unit"] == "share"
    assert GROUPS[group_of("train/tokens")[0]][0] == "Speed"


def test_faults_are_marks_on_both_axes_of_the_curves(tmp_path: Path) -> None:
    run_dir = write_run(tmp_path, steps=10, groups=1)
    events = Events(run_dir)
    events.mark(Mark(BEGAN_S + 9.0, "worker lost", MarkKind.FAULT, "rollout 1 @ node 0", "killed"))
    events.mark(Mark(BEGAN_S + 9.5, "attempt 1 begins", MarkKind.NOTE, None, ""))
    events.close()
    client = open_page(run_dir)
    run = only_run(client)
    (marks,) = client.get("/api/curves", run=run, name="train/loss").json["marks"]
    assert [(mark["name"], mark["kind"], mark["x"]) for mark in marks] == [("worker lost", "fault", 4.5)]
    (marks,) = client.get("/api/curves", run=run, name="train/loss", axis="time").json["marks"]
    assert marks[0]["x"] == BEGAN_S + 9.0
    shown = client.get("/api/timeline", run=run).json
    assert shown["lanes"][0] == "controller" and any(mark["name"] == "worker lost" for mark in shown["marks"])
    assert {span[4] for span in shown["spans"]} >= {"rollout", "update", "sync"}


def test_two_runs_are_compared_key_by_key(two_runs: Path) -> None:
    client = open_page(two_runs)
    names = ids(client)
    answer = client.get("/api/difference", run=[names["alpha"], names["beta"]]).json
    settings = {one["key"]: one["values"] for one in answer["settings"]}
    assert settings["actor.lr"][1] == "3e-05" and settings["trainer.steps"] == ["12", "8"]
    assert [row["step"] for row in answer["rows"]] == [12, 8]


def test_secrets_of_a_run_file_are_not_shown(tmp_path: Path) -> None:
    run_dir = write_run(tmp_path, "hidden", steps=1, groups=1)
    write_run(tmp_path, "plain", steps=1)
    hidden = {"HF_TOKEN": "hf_abcdefgh", "MY_SECRET": "hunter2hunter2"}
    write_run_file(
        run_dir,
        cluster={"num_nodes": 1, "component_placement": {"actor,rollout": "all"}, "env": hidden},
        data={"train": "s3://me:passw0rd@host/rows.jsonl"},
    )
    client = open_page(tmp_path)
    runs = ids(client)
    asked = [client.get("/api/difference", run=[*runs.values()]).body]
    assert b"<redacted>" in asked[0]
    asked.append(client.get("/api/cluster", run=runs["hidden"]).body)
    for body in (*asked, client.get("/api/runs").body):
        assert not re.search(rb"hf_abcdefgh|hunter2|passw0rd", body)


def test_groups_are_sorted_filtered_and_paged(tmp_path: Path) -> None:
    run_dir = write_run(tmp_path, steps=2, groups=2)
    append_groups(run_dir, [
        make_group(3, 10, rewards=(1.0, 1.0)),
        make_group(3, 11, rewards=(-2.0, 0.5), finish=FinishReason.LENGTH),
        make_group(3, 12, rewards=(0.0, 0.5), errors={"exact": "raised: ValueError"}),
    ])  # fmt: skip
    client = open_page(run_dir)
    run = only_run(client)

    def draws(**ask: Any) -> list[int]:
        return [row["draw"] for row in indexed(client, run, **ask)["rows"]]

    assert draws() == [12, 11, 10, 3, 2, 1, 0] and draws(sort="oldest", limit=2, offset=1) == [1, 2]
    assert draws(sort="best")[0] == 10 and draws(sort="worst")[0] == 11
    assert draws(only="truncated") == [11] and draws(only="failed") == [12] and draws(only="zero") == [10]
    assert draws(step=3) == [12, 11, 10] and draws(prompt="row-4") == [11]
    assert client.get("/api/groups", run=run, sort="; drop table groups").status == 400
    assert indexed(client, run)["steps"] == [1, 3]


def test_counts_of_groups_are_true_while_the_journal_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rollcall.view.api.INDEX_S", 0.0)  # a record for each question
    client = open_page(write_run(tmp_path, steps=3, groups=2))
    run = only_run(client)
    answers = [client.get("/api/groups", run=run).json for _ in range(12)]
    counts = [answer["total"] for answer in answers]
    assert counts == [answer["index"]["groups"] for answer in answers] == [len(answer["rows"]) for answer in answers]
    assert counts == sorted(counts) and counts[0] < 6 == counts[-1]
    assert answers[0]["index"]["files"] < 3 == answers[-1]["index"]["files"]


def test_an_episode_is_a_conversation_and_its_first_message_the_prompt(tmp_path: Path) -> None:
    run_dir = write_run(tmp_path, steps=1, groups=1)
    append_groups(run_dir, [make_episodes(2, 5)])
    client = open_page(run_dir)
    run = only_run(client)
    assert indexed(client, run)["rows"][0]["text"] == "add 1 and 2"
    group = client.get("/api/group", run=run, step=2, draw=5).json
    assert group["prompt"]["said"] == [["", "add 1 and 2"]] and group["prompt"]["tokens"] == len("add 1 and 2")
    one, other = group["completions"]
    assert one["said"] == [
        ["turn 1", "let me add"],
        ["call", "add(a=1) -> it is 3"],
        ["turn 2", "3"],
        ["reward", "0.5"],
    ]
    assert other["said"] == [["turn 1", ""], ["reward", "0"]]
    assert client.get("/api/text", run=run, step=2, draw=5, completion=0).json["said"] == one["said"]
    assert [row["draw"] for row in indexed(client, run, search="LET ME")["rows"]] == [5], "in every turn"
    rows = [{"prompt_id": "val:1", "prompt": "", **episode_columns(make_episodes(0, 0).completions[0])}, {"turns": 3}]
    (run_dir / "samples").mkdir()
    (run_dir / "samples" / "val-000001.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    played, foreign = client.get("/api/held_out", run=run).json["rows"]
    assert played["said"] == [["environment", "add 1 and 2"], *one["said"]] and foreign["said"] == [["", ""]]
    assert len(client.get("/api/held_out", run=run, search="let me").json["rows"]) == 1


def test_a_run_without_validation_data_says_so(tmp_path: Path) -> None:
    write_run_file(write_run(tmp_path, "sums", steps=2), data={"val": None})
    write_run(tmp_path, "checked", steps=2)
    rows = open_page(tmp_path).get("/api/runs").json["runs"]
    assert {row["name"]: row["evaluates"] for row in rows} == {"sums": False, "checked": True}


def test_a_group_shows_rewards_by_part_advantages_and_where_it_was_trained(tmp_path: Path) -> None:
    run_dir = write_run(tmp_path, steps=1, groups=1)
    append_groups(run_dir, [make_group(2, 5, rewards=(1.0, 0.0))])
    mark_trained(run_dir, 3, [5])
    client = open_page(run_dir)
    group = client.get("/api/group", run=only_run(client), step=2, draw=5).json
    one, other = group["completions"]
    assert one["parts"] == {"exact": 1.0} and (one["reward"], other["reward"]) == (1.0, 0.0)
    assert one["advantage"] == pytest.approx(0.7071, abs=1e-3) == -other["advantage"]
    assert group["trained_in"] == 3 and group["prompt"]["metadata"] == {"level": "2"} and one["versions"] == [0, 1]
    assert client.get("/api/group", run=only_run(client), step=2, draw=99).status == 404


def test_a_search_finds_text_in_prompts_and_completions_in_any_case(tmp_path: Path) -> None:
    run_dir = write_run(tmp_path, steps=3, groups=2)
    append_groups(run_dir, [
        make_group(4, 20, texts=('the Needle "quoted"\nhere', "x")),
        make_group(4, 21, prompt="ÄRGER in the prompt", texts=("a", "b")),
    ])  # fmt: skip
    client = open_page(run_dir)
    run = only_run(client)
    indexed(client, run)

    def found(text: str) -> list[int]:
        return [row["draw"] for row in client.get("/api/groups", run=run, search=text).json["rows"]]

    assert found("needle") == [20] and found('NEEDLE "quo') == [20] and found("ärger") == [21]
    assert found("finish") == [] and found("num_tokens") == []  # words of the file, not of the model
    assert client.get("/api/groups", run=run, search="needle").json["cursor"] is None


def test_a_search_goes_on_where_it_stopped(tmp_path: Path) -> None:
    client = open_page(write_run(tmp_path, steps=6, groups=2))
    run = only_run(client)
    indexed(client, run)
    seen, after = [], None
    while True:
        answer = client.get("/api/groups", run=run, search="=", limit=5, after=after or "").json
        seen += [row["draw"] for row in answer["rows"]]
        if answer["cursor"] is None:
            break
        after = ".".join(map(str, answer["cursor"]))
    assert seen == list(range(11, -1, -1))
    assert client.get("/api/groups", run=run, search="=", after="1; --").status == 400


def test_the_index_grows_with_the_journal_and_starts_over_with_another(tmp_path: Path) -> None:
    run_dir = write_run(tmp_path, steps=3, groups=2)
    first = JournalIndex(run_dir)
    assert first.refresh().groups == 6
    append_groups(run_dir, [make_group(3, 50), make_group(4, 51)])
    with (run_dir / "journal" / "000004.groups").open("ab") as file:
        file.write(b"torn")
    assert first.refresh().groups == 8
    append_groups(run_dir, [make_group(3, 50, rewards=(0.0, 0.0))], again=True)
    append_groups(run_dir, [make_group(3, 50, rewards=(5.0, 5.0))])  # a second record that is not a new score
    first.refresh()
    row = first.get(step=3, draw=50)
    assert row is not None and row.reward == 0.0
    shutil.rmtree(run_dir / "journal")
    append_groups(run_dir, [make_group(1, 0)])
    assert first.refresh().groups == 1


def test_the_index_reads_a_file_again_that_was_repaired_and_has_grown(tmp_path: Path) -> None:
    run_dir = write_run(tmp_path, steps=1, groups=3)
    path = run_dir / "journal" / "000001.groups"
    index = JournalIndex(run_dir)
    assert index.refresh().groups == 3
    with path.open("rb") as file:
        _, (second, _), _ = stream_records(file, end=path.stat().st_size)
    write_atomic(path, path.read_bytes()[:second])
    append_groups(run_dir, [make_group(1, draw) for draw in range(50, 58)])
    index.refresh()
    assert [row.draw for row in index.find(sort="oldest").rows] == [0, *range(50, 58)]


def test_two_threads_may_bring_the_index_up_to_date(tmp_path: Path) -> None:
    run_dir = write_run(tmp_path, steps=40, groups=1)
    index = JournalIndex(run_dir)
    index.refresh()
    shutil.rmtree(run_dir / "journal")
    append_groups(run_dir, [make_group(1, 0)])
    with ThreadPoolExecutor(4) as pool:
        found = [one.result() for one in [pool.submit(index.refresh) for _ in range(4)]]
    assert [one.groups for one in found] == [1] * 4


def test_a_run_that_began_again_under_the_numbers_of_its_old_files_is_read_again(tmp_path: Path) -> None:
    """A file that was removed leaves its number to the next. Here the new bytes are written into the old file."""
    run_dir = write_run(tmp_path, "old", steps=1, groups=1)
    other = write_run(tmp_path, "new", steps=3, groups=4)
    index, metrics = JournalIndex(run_dir), MetricsTable(run_dir)
    index.refresh()
    metrics.refresh()
    assert metrics.column("step")[0].tolist() == [0, 1]
    for name, new in (
        ("journal/000001.groups", encode(make_group(1, 0, rewards=(9.0, 9.0)))),
        ("metrics.jsonl", b'{"time": 1.0}\n'),
    ):
        (run_dir / name).write_bytes(new + (other / name).read_bytes())
    index.refresh()
    row = index.get(step=1, draw=0)
    assert row is not None and row.reward == 9.0
    metrics.refresh()
    assert metrics.column("step")[0].tolist() == [0, 1, 2, 3] and metrics.version


def test_damaged_and_foreign_records_are_passed_over(tmp_path: Path) -> None:
    run_dir = write_run(tmp_path, steps=1, groups=4)
    path = run_dir / "journal" / "000001.groups"
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 0xFF
    path.write_bytes(data)
    index = JournalIndex(run_dir)
    assert index.refresh().groups == 3


def test_a_token_has_its_numbers_and_special_tokens_are_known(tmp_path: Path) -> None:
    run_dir = write_run(tmp_path, steps=1, groups=1)
    group = make_group(2, 5, texts=("ab", "c"), rewards=(1.0, 0.0))
    append_groups(run_dir, [group])
    logprobs = [one.logprobs + 0.25 for one in group.completions]
    entropy = [np.full(len(one.token_ids), 0.5, dtype=np.float32) for one in group.completions]
    write_token_scores(run_dir / TOKEN_SCORES, step=2, groups=[group], logprobs=logprobs, entropy=entropy)
    client = open_page(run_dir)
    found = client.get("/api/tokens", run=only_run(client), step=2, draw=5).json
    columns = found["columns"]
    assert (
        found["texts"] == ["a", "b", "<eos>"] and found["special"] == [2] and found["prompt"]["texts"] == list("5+7=")
    )
    assert columns["id"] == [*ids_of("ab").tolist(), 0] and columns["mask"] == [1, 0, 1]
    assert columns["version"] == [0, 1, 1] and columns["entropy"] == [0.5] * 3
    assert columns["mismatch"] == pytest.approx([0.25, 0.0, 0.25]) and columns["ratio"][0] == pytest.approx(
        1.284, abs=1e-3
    )
    assert columns["advantage"][1] == 0.0 and columns["advantage"][0] > 0
    assert client.get("/api/tokens", run=only_run(client), step=2, draw=5, completion=7).status == 404


def test_tokens_without_a_tokenizer_or_learner_numbers_are_shown_by_id(tmp_path: Path) -> None:
    run_dir = write_run(tmp_path, steps=1, groups=1)
    (run_dir / "tokenizer.json").write_text("{}")
    client = open_page(run_dir)
    found = client.get("/api/tokens", run=only_run(client), step=1, draw=0).json
    assert found["texts"] is None and "mismatch" not in found["columns"] and len(found["columns"]["id"]) == 2


def test_hostile_text_is_only_text(tmp_path: Path) -> None:
    run_dir = write_run(tmp_path, steps=1, groups=1)
    long = "x" * (1 << 20)
    append_groups(run_dir, [make_group(2, 9, texts=(HOSTILE, long), prompt_id=HOSTILE, answer=HOSTILE)])
    client = open_page(run_dir)
    run = only_run(client)
    assert indexed(client, run, step=2)["rows"][0]["draw"] == 9
    answer = client.get("/api/group", run=run, step=2, draw=9)
    assert answer.headers["content-type"] == "application/json" and answer.body.isascii()
    one, other = answer.json["completions"]
    assert one["said"] == [["", HOSTILE]] and len(other["said"][0][1]) < other["length"] == 1 << 20
    assert client.get("/api/text", run=run, step=2, draw=9, completion=1).json["said"] == [["", long]]


def test_the_cluster_view_joins_the_placement_with_what_each_process_does(tmp_path: Path) -> None:
    run_dir = write_run(
        tmp_path, steps=2, groups=1,
        cluster={"num_nodes": 2, "num_gpus_per_node": 1, "component_placement": {"actor": "0", "rollout": "1"}},
    )  # fmt: skip
    lane = "rollout 0 @ node 1"
    states = (
        ProcessState(lane="controller", pid=1, doing="rollout of step 2"),
        ProcessState(lane=lane, roles={"rollout": 0}, node=1, address="10.0.0.2", slots=(0,), state="lost", why="killed", memory_bytes=5),
    )  # fmt: skip
    write_live(run_dir, Live(time_s=BEGAN_S, host="head", is_over=False, processes=states, missing_nodes=(1,)))
    keep_logs(run_dir, {lane: b"first\n<b>last</b>\n"})
    client = open_page(run_dir)
    answer = client.get("/api/cluster", run=only_run(client)).json
    assert [(node["node"], [slot["roles"] for slot in node["slots"]]) for node in answer["nodes"]] == [
        (0, [["actor"]]), (1, [["rollout"]])
    ]  # fmt: skip
    assert answer["nodes"][1]["slots"][0]["lane"] == lane and answer["live"]["missing_nodes"] == [1]
    assert answer["workers"][1]["lines"] == ["first", "<b>last</b>"] and answer["sizes"]["journal"] > 0


def test_a_page_changes_nothing_in_a_run_directory(tmp_path: Path) -> None:
    run_dir = write_run(tmp_path, steps=2, groups=1)
    before = {path: path.stat().st_mtime_ns for path in run_dir.rglob("*")}
    client = open_page(run_dir)
    run = only_run(client)
    indexed(client, run)
    for name in ("metrics", "timeline", "cluster", "held_out"):
        assert client.get(f"/api/{name}", run=run).status == 200
    assert {path: path.stat().st_mtime_ns for path in run_dir.rglob("*")} == before


def test_an_empty_directory_and_an_unknown_run_are_answered(tmp_path: Path) -> None:
    run_dir = tmp_path / "new"
    (run_dir / "journal").mkdir(parents=True)
    client = open_page(run_dir)
    run = only_run(client)
    (row,) = client.get("/api/runs").json["runs"]
    assert row["state"] == "new" and row["step"] == 0
    for name in ("metrics", "groups", "timeline", "cluster", "held_out"):
        assert client.get(f"/api/{name}", run=run).status == 200, name
    assert client.get("/api/groups", run="none").status == 404
    assert client.get("/api/groups").status == 400


def test_a_page_is_found_by_its_record() -> None:
    record = PageRecord(host="head", port=4000, secret="s" * 20)
    assert parse_record(json.dumps({"host": "head", "port": 4000, "secret": "s" * 20, "pid": 1})) == record
    key = record.address(5000).removeprefix(f"http://127.0.0.1:5000{OPEN}")
    assert Keys(record.secret).use(key) and not Keys("another").use(key)
    for text in ("", "[]", "{}", '{"host": "x", "port": 0}'):
        assert parse_record(text) is None


def test_the_page_needs_neither_torch_nor_ray() -> None:
    code = "import sys, rollcall.view.server; sys.exit(any(name in sys.modules for name in ('torch', 'ray', 'transformers')))"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def test_a_table_leaves_out_what_is_not_a_number(tmp_path: Path) -> None:
    rows = [
        '{"step": 1, "a": true, "b": "x", "c": null, "d": 1e999, "e": 5}',
        '{"step": -1, "e": 1}',
        "[]",
        '{"step": 2, "e": NaN}',
    ]
    (tmp_path / "metrics.jsonl").write_text("\n".join(rows) + "\n")
    table = MetricsTable(tmp_path)
    table.refresh()
    assert {name for name in table.names() if len(table.column(name)[2])} == {"e"}
    assert table.last("e") == 5.0


@pytest.mark.slow
def test_a_run_serves_its_page_while_it_trains(tmp_path: Path) -> None:
    run_dir, said = tmp_path / "run", []
    with serving_page(run_dir, tell=said.append):
        write_run(tmp_path, steps=1, groups=1)
        while not (said and (run_dir / "page.json").exists()):
            time.sleep(0.02)
        record = parse_record((run_dir / "page.json").read_text())
        assert record is not None and (run_dir / "page.json").stat().st_mode & 0o777 == 0o600
        (address,) = re.findall(r"http://127\.0\.0\.1:\d+/open/\S+", said[0])
        opened = urllib.request.build_opener(urllib.request.HTTPCookieProcessor())
        assert b"refresh" in opened.open(address, timeout=60).read()
        shown = json.loads(opened.open(f"http://127.0.0.1:{record.port}/api/runs", timeout=60).read())
        assert [run["name"] for run in shown["runs"]] == ["run"]
        with pytest.raises(urllib.error.HTTPError, match="401"):
            urllib.request.urlopen(address, timeout=60)
    assert not (run_dir / "page.json").exists()
    with pytest.raises(OSError):
        socket.create_connection(("127.0.0.1", record.port), timeout=5)


def test_the_process_of_the_page_has_no_secrets_in_its_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    page, said = tmp_path / "page.sh", []
    page.write_text("#!/bin/sh\nenv\nread line\n")
    page.chmod(0o755)
    monkeypatch.setattr("rollcall.view.page_process.sys.executable", str(page))
    monkeypatch.setenv("HF_TOKEN", "hf_secret123")
    monkeypatch.setenv("COLOUR", "blue")
    with serving_page(tmp_path, tell=said.append):
        while "COLOUR=blue" not in said:
            time.sleep(0.02)
    assert not any("hf_secret123" in line for line in said)


def test_a_page_that_ends_before_its_run_is_not_named_any_more(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run_dir = write_run(tmp_path, steps=1, groups=1)
    page = tmp_path / "page"
    page.write_text("#!/bin/sh\ntouch $3/page.json; while [ ! -e $3/end ]; do sleep 0.02; done; exit 3\n")
    page.chmod(0o700)
    monkeypatch.setattr("rollcall.view.page_process.sys.executable", str(page))
    with serving_page(run_dir, tell=lambda text: None):
        while not (run_dir / "page.json").exists():
            time.sleep(0.02)
        (run_dir / "end").touch()
        while (run_dir / "page.json").exists():
            time.sleep(0.02)


def test_a_lease_that_cannot_be_read_does_not_stop_the_page(tmp_path: Path) -> None:
    write_run(tmp_path / "runs", steps=2)
    (tmp_path / "runs" / ".run.lease-1").mkdir()
    assert len(open_page(tmp_path / "runs").get("/api/runs").json["runs"]) == 1


def test_files_of_any_size_are_read_in_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run_dir = write_run(tmp_path, steps=50)
    monkeypatch.setattr("rollcall.view.growing.PIECE", 5000)
    with (run_dir / "metrics.jsonl").open("ab") as file:
        file.write(b"\0" * 12_000 + b"\n")
    write_metrics(run_dir, range(51, 61), num_steps=60)
    table = MetricsTable(run_dir)
    table.refresh()
    assert table.column("train/loss")[0].tolist() == list(range(1, 61))


def test_a_metric_with_a_comma_in_its_name_has_a_curve(tmp_path: Path) -> None:
    run_dir = write_run(tmp_path / "runs", steps=2)
    with (run_dir / "metrics.jsonl").open("a") as file:
        file.write('{"step": 3, "reward/a,b": 1.0}\n')
    client = open_page(tmp_path / "runs")
    found = client.get("/api/curves", run=only_run(client), name=["reward/a,b", "train/loss"]).json["curves"]
    assert found["reward/a,b"][0]["y"] == [1.0] and found["train/loss"][0]["num"] == 2


def test_a_number_that_no_table_holds_does_not_end_the_index(tmp_path: Path) -> None:
    run_dir = write_run(tmp_path, steps=1, groups=1)
    path = run_dir / "journal" / "000001.groups"
    header = json.dumps({"step": 1, "draw": 9, "scores": [], "completions": [{"num_tokens": 10**25, "finish": "stop"}], "prompt": {"id": ""}, "worker": "", "finished_s": 1}).encode()  # fmt: skip
    payload = struct.pack("<I", len(header)) + header
    path.write_bytes(struct.pack("<8sQI", MAGIC, len(payload), zlib.crc32(payload)) + payload + path.read_bytes())
    index = JournalIndex(run_dir)
    assert index.refresh().groups == 1


def test_a_damaged_length_does_not_fill_the_memory(tmp_path: Path) -> None:
    run_dir = write_run(tmp_path / "runs", steps=1)
    path = run_dir / "journal" / "000001.groups"
    path.write_bytes(path.read_bytes() + struct.pack("<8sQI", MAGIC, 3 << 30, 0))
    with path.open("rb") as file:
        # As if the file went on: the record is passed over without a look at its bytes.
        assert len(list(stream_records(file, end=path.stat().st_size))) == 3
        file.seek(0)
        assert not list(stream_records(file, start=path.stat().st_size - 20, end=4 << 30))


def test_secrets_in_events_states_and_errors_are_not_shown(tmp_path: Path) -> None:
    run_dir = write_run(tmp_path / "runs", steps=2, model={"path": "https://me:hunter22@host/model"})
    note = "MY_TOKEN=hunter22 s3://me:hunter22@host/rows"
    events = Events(run_dir)
    events.mark(Mark(BEGAN_S + 1.0, note, MarkKind.FAULT, note, note))
    events.mark(Mark(BEGAN_S + 2.0, "run failed", MarkKind.FAULT, None, note))
    events.close()
    append_groups(run_dir, [make_group(1, 90, errors={"exact": note})])
    worker = ProcessState(lane="rollout 0", doing=note, why=note, log=note)
    write_live(run_dir, Live(time_s=time.time(), host="h", is_over=False, processes=(worker,)))
    client = open_page(tmp_path / "runs")
    run = only_run(client)
    for path in ("runs", "difference", "curves", "timeline", "cluster", "group"):
        answer = client.get(f"/api/{path}", run=run, name="train/loss", step=1, draw=90)
        assert answer.status == 200 and b"hunter22" not in answer.body, path
