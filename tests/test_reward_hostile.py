"""Hostile completions against every built-in reward: nothing runs, nothing is reached, the pool goes on.

The second half runs code inside the workers' confinement on purpose, to see what it could do if some text did get there.
"""

from __future__ import annotations

import asyncio
import importlib
import json
import os
import pickle
import re
import resource
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from scored import a_prompt, completions_of

from rollcall.config import (
    CountdownReward,
    ExactReward,
    FunctionReward,
    MathReward,
    NumberReward,
    ReasoningGymReward,
    RegexReward,
)
from rollcall.process.here import how_it_ended
from rollcall.reward import landlock, seccomp
from rollcall.reward.confine import BUILT_IN, available, confine, confinement_of
from rollcall.reward.eval_guard import guarded, is_plain
from rollcall.reward.functions import encode_entry
from rollcall.reward.math_answer import final_answer, last_tagged
from rollcall.reward.pool import RewardPool, read_results
from rollcall.reward.scorer import Scorer
from rollcall.reward.worker import Item, RewardResult

# Scorers of reasoning-gym that evaluate the answer, found by listening for compile events in all of its 105 tasks.
EVALUATING = (
    "binary_matrix", "countdown", "intermediate_integration", "n_queens", "polynomial_multiplication", "puzzle24",
    "simple_integration", "spiral_matrix", "string_insertion",
)  # fmt: skip


@pytest.fixture(autouse=True)
def nothing_is_unpickled_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """What these rewards say, this process reads as data."""

    def poisoned(*_: Any, **__: Any) -> Any:
        os.write(2, b"a byte of a reward's process was unpickled\n")
        os._exit(86)  # an exception might be caught

    for name in ("load", "loads", "Unpickler"):
        monkeypatch.setattr(pickle, name, poisoned)


needs_seccomp = pytest.mark.skipif(bool(seccomp.why_missing()), reason=seccomp.why_missing() or "it is there")
needs_landlock = pytest.mark.skipif(not landlock.version(), reason="the kernel has no landlock")


def code_texts(mark: Path) -> list[str]:
    """Answers that would leave a file at ``mark`` if anything ran them."""
    touch = f"open({str(mark)!r}, 'w')"
    return [
        f"__import__('os').system('touch {mark}')",
        f"[__import__('os').system('touch {mark}')]",
        touch,
        f"[{touch}]",
        f"(lambda: {touch})()",
        f'f"{{{touch}}}"',
        f"[x for x in [{touch}]]",
        f"eval({touch!r})",
        f"exec({touch!r})",
        f"sympify({touch!r})",
        f"parse_expr({touch!r})",
        f"Symbol('x').func.__globals__['__builtins__']['{touch}']",
        f"().__class__.__base__.__subclasses__()[0].__init__.__globals__[{touch!r}]",
        f"__import__('pickle').loads(b'cos\\nsystem\\n(S\"touch {mark}\"\\ntR.')",
        f"x if {touch} else y",
        f"\\text{{{touch}}}",
        f"\\input{{|touch {mark}}} \\write18{{touch {mark}}}",
    ]


HEAVY = [
    "10!!!!!!!!",
    "9**9**9**9",
    r"\boxed{9^{9^{9^{9}}}}",
    "'a'*10**10",
    "[0]*10**10",
    "(" * 50_000 + "1" + ")" * 50_000,
    "[" * 50_000,
    "{" * 50_000,
    "-" * 50_000 + "1",
    r"\boxed{" * 20_000,
    r"\frac{" * 2_000 + "1" + "}{2}" * 2_000,
    "<answer>" * 100_000,
    "#### " * 100_000,
    "9" * 1_000_000,
    "z" * 1_000_000,
    "1," * 300_000,
    "a" * 5_000 + "!",
    "1e999999999",
    "factorial(factorial(20))",
]
ODD = [
    "",
    " ",
    "\0",
    "4\0" + "6",
    "\ud800",
    "<answer>\ud800</answer>",
    "\udcff" * 100,
    "\u202e46",
    "٤٦",
    "\x1b[2J46",
    "%s%n{0}",
]


def every_builtin() -> list[Any]:
    return [
        ExactReward(), NumberReward(), MathReward(timeout_s=1), CountdownReward(),
        RegexReward(pattern="^(a|aa)+$", timeout_s=1),
    ]  # fmt: skip


def gym_rows() -> dict[str, dict[str, Any]]:
    reasoning_gym = pytest.importorskip("reasoning_gym")
    rows = {}
    for task in EVALUATING:
        entry = reasoning_gym.create_dataset(task, size=1, seed=4)[0]
        rows[task] = {"reasoning_gym": {"task": task, "entry": encode_entry(entry)}}
    return rows


@pytest.mark.parametrize("heavy", [HEAVY[-6:], pytest.param(HEAVY, marks=pytest.mark.slow)], ids=["some", "all"])
def test_no_text_runs_in_any_built_in_reward_and_the_pool_goes_on(tmp_path: Path, heavy: list[str]) -> None:
    mark = tmp_path / "mark"
    texts = [*code_texts(mark), *(f"<answer>{text}</answer>" for text in code_texts(mark)), *heavy, *ODD]
    prompt = a_prompt(metadata={"numbers": [12, 34], "target": 46})
    with Scorer(every_builtin(), num_workers=2, model_rewards={}) as scorer:
        scores = asyncio.run(scorer.score(prompt, completions_of(*texts)))
        after = asyncio.run(scorer.score(prompt, completions_of("12+34", r"\boxed{46}")))
    assert not mark.exists()
    wrong = {text[:40]: score.parts for text, score in zip(texts, scores, strict=True) if score.value > 0}
    assert set(wrong) <= {"\u202e46", "\x1b[2J46", "٤٦"}, wrong  # 46 behind marks that are not seen
    assert after[0].parts["countdown"] == 1 and after[1].parts["math"] == 1
    hung = sorted({failure.completion[:30] for failure in scorer.failures if failure.kind == "hung"})
    print("over the time limit:", hung, scorer.num_failed)
    assert not {kind for _, kind in scorer.num_failed} & {"died", "nan"}, scorer.failures
    assert not {name for name, _ in scorer.num_failed} & {"exact", "number", "countdown"}, scorer.failures


def test_no_answer_runs_in_the_scorers_that_evaluate_text(tmp_path: Path) -> None:
    pytest.importorskip("reasoning_gym")
    mark = tmp_path / "mark"
    texts = [f"<answer>{text}</answer>" for text in (*code_texts(mark), *HEAVY[:4])]
    with Scorer([ReasoningGymReward(timeout_s=10)], num_workers=1, model_rewards={}) as scorer:
        for task, row in gym_rows().items():
            scores = asyncio.run(scorer.score(a_prompt(metadata=row), completions_of(*texts)))
            assert max(score.value for score in scores) <= 0.05, task
            assert not mark.exists(), task
            reference = json.loads(row["reasoning_gym"]["entry"])["answer"]
            (right,) = asyncio.run(
                scorer.score(a_prompt(metadata=row), completions_of(f"<answer>{reference}</answer>"))
            )
            assert right.value == 1, task
        assert not scorer.num_failed, scorer.failures


@pytest.mark.slow
def test_every_task_of_reasoning_gym_keeps_its_scores_and_runs_nothing(tmp_path: Path) -> None:
    reasoning_gym = pytest.importorskip("reasoning_gym")
    from reasoning_gym.factory import DATASETS

    from rollcall.reward.functions import reasoning_gym_score

    mark = tmp_path / "mark"
    for task in sorted(set(DATASETS) - {"composite"}):
        entry = reasoning_gym.create_dataset(task, size=1, seed=3)[0]
        score: Any = reasoning_gym.get_score_answer_fn(task)
        row = {"reasoning_gym": {"task": task, "entry": encode_entry(entry)}}
        if entry["answer"] is not None:
            plain = min(max(float(score(answer=entry["answer"].strip(), entry=entry)), 0.0), 1.0)
            assert reasoning_gym_score("", f"<answer>{entry['answer']}</answer>", "", row) == plain, task
        for text in code_texts(mark):
            reasoning_gym_score("", f"<answer>{text}</answer>", "", row)
            assert not mark.exists(), (task, text)


def test_text_that_becomes_code_is_data_or_arithmetic() -> None:
    plain = [
        "[[1, 2], ['a', -3.5]]",
        "82 + 20 - 67",
        "2*(-10*x - 10)**(3/2)/3 + C",
        "Symbol ('x')**Integer (2 )",
        "exp(x)/2",
    ]
    other = ["x.y", "x[0]", "f(x)", "lambda: 1", "[x for x in y]", "f'{x}'", "__name__", "a if b else c", "x := 1", "1; 2", "*x",
             "9**9**9", "2**5000", "'a'*9", "[0]*9", "x == y", "await x", "Symbol('x', open('y'))", "(" * 9999, "1" * 200_000]  # fmt: skip
    assert [text for text in plain if not is_plain(text)] == []
    assert [text[:40] for text in other if is_plain(text)] == []
    for text in other[:9]:
        with guarded(), pytest.raises(ValueError, match="not evaluated"):
            eval(text)  # noqa: S307
    with guarded(trusted=frozenset({"len([1])"})):
        assert eval("len([1])") == 1  # noqa: S307
    assert eval("len([1])") == 1  # noqa: S307


def test_marks_are_found_in_one_pass_over_any_text() -> None:
    assert last_tagged("<answer>" * 3 + "5</answer> <answer>") == "5"
    assert last_tagged("</answer><answer>") is None
    for text in HEAVY + ODD:
        final_answer(text)


# What code in a worker could do

PROBE = """
import json, os, socket, subprocess, sys, tempfile

def tried(action):
    try:
        return repr(action())
    except BaseException as error:
        return f"{type(error).__name__}"

def look(prompt, completion, answer, metadata):
    here = metadata
    def write(path):
        with open(path, "w") as file:
            file.write("x")
    def connect(kind, address):
        with socket.socket(kind, socket.SOCK_STREAM) as one:
            one.connect(tuple(address) if isinstance(address, list) else address)
    seen = {
        "environ": dict(os.environ),
        "connect": tried(lambda: connect(socket.AF_INET, here["address"])),
        "unix": tried(lambda: connect(socket.AF_UNIX, here["unix"])),
        "system": tried(lambda: os.system("true") or "ran"),
        "run": tried(lambda: subprocess.run(["true"]).returncode),
        "fork": tried(os.fork) if completion == "no processes" else "",
        "kill": tried(lambda: os.kill(os.getppid(), 0)),
        "outside": tried(lambda: write(here["outside"])),
        "read": tried(lambda: open(here["secret"]).read()),
        "parent": tried(lambda: open(f"/proc/{os.getppid()}/environ", "rb").read()[:1]),
        "memory of parent": tried(lambda: open(f"/proc/{os.getppid()}/mem", "rb").fileno()),
        "others": tried(lambda: [pid for pid in filter(str.isdigit, os.listdir("/proc")) if here.get("hidden", "no such value") in tried(
            lambda: open(f"/proc/{pid}/environ").read())]),
        "by others": tried(lambda: here.get("hidden", "no such value") in subprocess.run(
            ["cat", f"/proc/{os.getppid()}/environ"], capture_output=True, text=True).stdout),
        "chmod": tried(lambda: os.chmod(here["secret"], 0o777)),
        "unlink": tried(lambda: os.unlink(here["secret"])),
        "memory": tried(lambda: len(bytearray(here["megabytes"] << 20))),
        "large": tried(lambda: os.truncate(tempfile.mkstemp()[0], here["megabytes"] << 20)),
        "own": tried(lambda: write("own")),
        "temporary": tempfile.gettempdir(),
    }
    raise RuntimeError(json.dumps(seen))
"""


async def score_by(pool: RewardPool, item: Item) -> list[RewardResult]:
    return (await pool.score([item], timeout_s=60))[0]


def what_it_sees(
    reward: Any, *, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, confined: bool, megabytes: int
) -> Any:
    """What a function of the user's sees in a reward's worker; ``confined``: as a built-in scorer would."""
    modules = tmp_path / "modules"
    modules.mkdir()
    (modules / "probe.py").write_text(PROBE)
    monkeypatch.chdir(tmp_path)  # a function of the user's may write there, and does
    secret = tmp_path / "secret"
    secret.write_text("hidden")
    monkeypatch.syspath_prepend(str(modules))
    monkeypatch.setenv("HF_TOKEN", "hf_hidden_value")
    monkeypatch.setenv("OPENAI_API_KEY", "sk-named-value")
    if confined:
        monkeypatch.setattr("rollcall.reward.pool.confinement_of", lambda spec: BUILT_IN)
    with socket.create_server(("127.0.0.1", 0)) as server, socket.socket(socket.AF_UNIX) as unix:
        unix.bind(str(tmp_path / "unix"))
        unix.listen()
        row = {
            "address": list(server.getsockname()), "unix": str(tmp_path / "unix"), "outside": str(tmp_path / "outside"),
            "secret": str(secret), "megabytes": megabytes,
        }  # fmt: skip
        with RewardPool({0: reward.model_dump()}, num_workers=1) as pool:
            item = Item(0, "", "no processes" if confined else "", "", row)
            (result,) = asyncio.run(score_by(pool, item))
            told = pool.in_force[0]
    assert result.kind == "raised", result
    seen = json.loads(result.why.partition("RuntimeError: ")[2])
    return seen, told


@needs_seccomp
@needs_landlock
def test_code_in_a_built_in_worker_reaches_no_secret_network_process_or_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reward = FunctionReward(path="probe:look")
    seen, told = what_it_sees(reward, tmp_path=tmp_path, monkeypatch=monkeypatch, confined=True, megabytes=8000)
    refused = ("connect", "unix", "run", "fork", "kill", "outside", "read", "parent", "chmod", "unlink")
    assert {name: seen[name] for name in refused} == dict.fromkeys(refused, "PermissionError")
    assert (seen["memory"], seen["large"], seen["own"]) == ("MemoryError", "OSError", "None")
    assert seen["system"] != "'ran'" and not {"HF_TOKEN", "OPENAI_API_KEY"} & set(seen["environ"])
    assert seen["environ"]["HOME"] == seen["temporary"] and not Path(seen["temporary"]).exists()
    assert (tmp_path / "secret").exists() and not (tmp_path / "outside").exists()
    assert told == {
        "memory": "4096 MB",
        "file size": "16 MB",
        "processes": "none (seccomp)",
        "files": "only its own folder and Python's files (landlock)",
        "network": "off (seccomp)",
    }


def test_a_function_gets_the_variables_its_section_names_and_no_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reward = FunctionReward(path="probe:look", env=["OPENAI_API_KEY"], memory_mb=1000, file_mb=100)
    seen, told = what_it_sees(reward, tmp_path=tmp_path, monkeypatch=monkeypatch, confined=False, megabytes=2000)
    assert seen["environ"]["OPENAI_API_KEY"] == "sk-named-value" and "HF_TOKEN" not in seen["environ"]
    assert (seen["connect"], seen["run"], seen["outside"]) == ("None", "0", "None")
    assert (seen["memory"], seen["large"]) == ("MemoryError", "OSError")
    assert (tmp_path / "own").exists() and not Path(seen["temporary"]).exists()
    assert (told["network"], told["memory"]) == ("on", "1000 MB")


SCAN = """
import asyncio, os, sys
from pathlib import Path
from rollcall.reward.pool import RewardPool
from rollcall.reward.worker import Item

hidden = os.environ["HF_TOKEN"]
with RewardPool({0: {"type": "function", "path": "probe:look", "env": ["SERVICE"]}}, num_workers=1) as pool:
    row = {"address": ["127.0.0.1", 9], "unix": "", "outside": "outside", "secret": "", "megabytes": 1, "hidden": hidden}
    async def score():
        return (await pool.score([Item(0, "", "", "", row)], timeout_s=60))[0]
    (result,) = asyncio.run(score())
    assert os.environ["HF_TOKEN"] == os.popen("echo $HF_TOKEN").read().strip() == hidden
    assert hidden not in Path("/proc/self/environ").read_text()
print(result.why.partition("RuntimeError: ")[2])
"""


@pytest.mark.skipif(sys.platform != "linux", reason="needs /proc")
def test_a_function_finds_no_secret_of_the_run_in_proc(tmp_path: Path) -> None:
    (tmp_path / "probe.py").write_text(PROBE)
    secrets = {"HF_TOKEN": f"hf_{os.urandom(8).hex()}", "SERVICE": "named"}
    done = subprocess.run(
        [sys.executable, "-c", SCAN],
        cwd=tmp_path,
        env={**os.environ, **secrets},
        text=True,
        capture_output=True,
        check=True,
    )
    seen = json.loads(done.stdout)
    assert (seen["others"], seen["by others"], seen["environ"]["SERVICE"]) == ("[]", "False", "named")


def test_a_function_of_root_reads_no_memory_of_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    status = Path("/proc/self/status")
    found = re.search(r"CapPrm:\s*(\w+)", status.read_text()) if status.exists() else None
    if found is None or not int(found[1], 16) & (1 << 19 | 1 << 27):
        pytest.skip("only root can give up a capability")
    reward = FunctionReward(path="probe:look")
    seen, _ = what_it_sees(reward, tmp_path=tmp_path, monkeypatch=monkeypatch, confined=False, megabytes=1)
    assert seen["memory of parent"] == "PermissionError"


@needs_seccomp
def test_a_function_without_network_reaches_this_machine_alone_and_may_start_processes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reward = FunctionReward(path="probe:look", network=False)
    seen, told = what_it_sees(reward, tmp_path=tmp_path, monkeypatch=monkeypatch, confined=False, megabytes=1)
    assert (seen["connect"], seen["unix"], seen["run"]) == ("PermissionError", "None", "0")
    assert told["network"] == "off (seccomp)" and "OPENAI_API_KEY" not in seen["environ"]


def test_a_named_variable_that_is_not_set_is_refused_at_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NOT_SET_HERE", raising=False)
    with pytest.raises(ValueError, match=r"reward\.1\.env names NOT_SET_HERE, which is not set"):
        Scorer([ExactReward(), FunctionReward(path="m:f", env=["NOT_SET_HERE"])], num_workers=1, model_rewards={})


def test_a_value_that_a_function_raises_is_not_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "my_rewards.py").write_text(
        "import os\ndef f(p, c, a, m):\n    raise KeyError(os.environ['SERVICE'])\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("SERVICE", "a-hidden-value")
    with Scorer([FunctionReward(path="my_rewards:f", env=["SERVICE"])], num_workers=1, model_rewards={}) as scorer:
        (score,) = asyncio.run(scorer.score(a_prompt(), completions_of("a")))
    assert "a-hidden-value" not in score.errors["f"] and "a-hidden-value" not in scorer.failures[0].why


def test_every_way_to_end_has_words() -> None:
    """A reward may end itself by a signal that Python has no name for."""
    assert [how_it_ended(status) for status in (3, -15, -35)] == ["exit status 3", "SIGTERM", "signal 35"]


def test_what_a_worker_says_is_read_as_data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for said in (
        b"cos\nsystem\n(S'true'\ntR.",
        b"[1]",
        b'[{"value": "x"}]',
        b'[{"value": NaN, "kind": "", "why": "", "elapsed_s": 1.0}]',
        b'[{"value": 1.0, "kind": "", "why": "", "elapsed_s": NaN}]',
        b'[{"value": 1.0, "kind": "", "why": "", "elapsed_s": 1.0, "more": 1}]',
        b'{"in_force": {}, "kinds": {}, "needs": {}, "trl": {}}',
        b"[" * 100_000,
    ):
        with pytest.raises(ValueError):
            read_results(said)
    module = (
        "import os, struct\n"
        "def f(p, c, a, m):\n"
        "    if c == 'flood':\n"
        "        for fd in range(3, 1000):\n"
        "            try:\n"
        "                os.write(fd, struct.pack('<Q', 1 << 40) + b'x' * 100)\n"
        "            except OSError:\n"
        "                pass\n"
        "    return 1\n"
    )
    (tmp_path / "my_rewards.py").write_text(module)
    monkeypatch.chdir(tmp_path)
    with Scorer([FunctionReward(path="my_rewards:f")], num_workers=1, model_rewards={}) as scorer:
        one, two = asyncio.run(scorer.score(a_prompt(), completions_of("flood", "a")))
    assert one.errors["f"].startswith("died") and two.value == 1


def test_this_machine_says_what_it_offers() -> None:
    assert set(available()) == {"network", "processes", "files"}
    assert all(state and not state.startswith("not restricted ()") for state in available().values())
    assert confinement_of({"type": "math"}) == BUILT_IN
    assert sys.platform != "linux" or os.path.exists("/proc/self")


def test_folders_of_killed_processes_are_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of another container, whose processes have other numbers here, may be in use."""
    from rollcall.reward.confine import make_folder, sweep_folders

    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    ours = make_folder()
    gone = subprocess.Popen(["true"])
    gone.wait()
    killed = Path(ours.replace(f"-{os.getpid()}-", f"-{gone.pid}-"))
    elsewhere = tmp_path / f"rollcall-reward-1-{gone.pid}-abc"
    killed.mkdir()
    elsewhere.mkdir()
    sweep_folders()
    assert set(tmp_path.iterdir()) == {Path(ours), elsewhere}


REACH = """
import ctypes, fcntl, json, os, signal

def tried(action):
    try:
        return repr(action())
    except BaseException as error:
        return type(error).__name__

def have_it_killed(pid):
    read, write = os.pipe()
    fcntl.fcntl(read, fcntl.F_SETOWN, pid)
    fcntl.fcntl(read, fcntl.F_SETSIG, signal.SIGKILL)
    fcntl.fcntl(read, fcntl.F_SETFL, os.O_ASYNC)
    os.write(write, b"x")

def look(prompt, completion, answer, metadata):
    libc = ctypes.CDLL(None)
    head, sets = (ctypes.c_uint32 * 2)(0x20080522, 0), (ctypes.c_uint32 * 6)()
    libc.capget(head, sets)
    raise RuntimeError(json.dumps({
        "signal by a file": tried(lambda: have_it_killed(metadata["victim"])),
        "processor of another": tried(lambda: os.sched_setaffinity(metadata["victim"], {0})),
        "own processor": tried(lambda: os.sched_setaffinity(0, os.sched_getaffinity(0))),
        "kernel's log": libc.klogctl(10, None, 0),
        "queue": libc.msgget(0, 0o1600),
        "powers": [value & ~6 for value in sets],
    }))
"""


@needs_seccomp
@needs_landlock
def test_code_in_a_built_in_worker_has_no_power_over_other_processes_or_the_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "reach.py").write_text(REACH)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr("rollcall.reward.pool.confinement_of", lambda spec: BUILT_IN)
    victim = subprocess.Popen(["sleep", "600"])
    try:
        with RewardPool({0: FunctionReward(path="reach:look").model_dump()}, num_workers=1) as pool:
            (result,) = asyncio.run(score_by(pool, Item(0, "", "", "", {"victim": victim.pid})))
        assert victim.poll() is None
    finally:
        victim.kill()
        victim.wait()
    assert json.loads(result.why.partition("RuntimeError: ")[2]) == {
        "signal by a file": "PermissionError",
        "processor of another": "PermissionError",
        "own processor": "None",
        "kernel's log": -1,
        "queue": -1,
        "powers": [0] * 6,
    }


FORGING = """
import json, os, struct, sys, tempfile

def say(message, call=2, kind=1):
    body = struct.pack("<IB", call, kind) + json.dumps(message).encode()
    os.write(int(sys.argv[2]), struct.pack("<Q", len(body)) + body)

def f(prompt, completion, answer, metadata):
    if completion == "fork":
        os.fork()
    if completion == "refused":
        say(["ValueError", "a forged refusal", "a forged refusal"], kind=3)
    if completion == "ready":
        say({"in_force": {"network": "forged"}, "kinds": {}, "needs": {}, "trl": {}}, call=1, kind=2)
    if completion == "no reason":
        say([{"value": 0.0, "kind": "nan", "why": "", "elapsed_s": 0.0}])
        os._exit(3)
    if completion == "deep":
        os.chdir(tempfile.gettempdir())
        for _ in range(1500):
            os.mkdir("d")
            os.chdir("d")
        os._exit(3)
    return float(len(completion))
"""


@pytest.mark.parametrize("hostile", ["fork", "refused", "ready", "no reason", "deep"])
def test_a_function_that_forges_its_worker_spoils_no_other_score_and_never_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, hostile: str
) -> None:
    (tmp_path / "forging.py").write_text(FORGING)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    others = ["a" * (index % 4) for index in range(30)]
    with Scorer([FunctionReward(path="forging:f")], num_workers=1, model_rewards={}) as scorer:
        before = scorer.in_force
        _, *scores = asyncio.run(scorer.score(a_prompt(), completions_of(hostile, *others)))
        after = asyncio.run(scorer.score(a_prompt(), completions_of(*others)))
        assert scorer.in_force == before
    if hostile != "no reason":  # the process's own answer; then it dies at the next item
        assert [score.value for score in scores] == [float(len(other)) for other in others]
    assert [score.value for score in after] == [float(len(other)) for other in others]
    subprocess.run(["rm", "-rf", *tmp_path.glob("rollcall-reward-*")], check=True)  # too deep for Python


def test_modules_that_are_loaded_while_text_is_guarded_are_let_through(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Libraries load modules when they are first needed; one without cached bytecode is compiled then."""
    code = "import collections\nPoint = collections.namedtuple('Point', 'x y')\nvalue = [n for n in range(3)]\n"
    (tmp_path / "loaded_late.py").write_text(code)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    with guarded():
        assert importlib.import_module("loaded_late").value == [0, 1, 2]
        with pytest.raises(ValueError, match="not evaluated"):
            eval("[n for n in range(3)]")


def test_a_limit_beyond_what_the_kernel_counts_to_is_no_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "my_rewards.py").write_text("def f(p, c, a, m):\n    return 1\n")
    monkeypatch.chdir(tmp_path)
    most = (1 << 53) - 1
    reward = FunctionReward(path="my_rewards:f", memory_mb=most, file_mb=most, processes=most)
    with Scorer([reward], num_workers=1, model_rewards={}) as scorer:
        (score,) = asyncio.run(scorer.score(a_prompt(), completions_of("a")))
    assert score.value == 1


def test_an_error_cannot_steer_the_terminal_that_shows_it() -> None:
    said = {"value": 0.0, "kind": "raised", "why": "no \x1b[2Jnumber\n\tin \x07it", "elapsed_s": 0.1}
    (answer,) = read_results(json.dumps([said]).encode()) or []
    assert isinstance(answer, RewardResult) and answer.why == "no �[2Jnumber\n\tin �it"


def test_where_few_files_may_be_open_a_reward_gets_no_more_of_them(tmp_path: Path) -> None:
    if (child := os.fork()) == 0:
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (128, 128))
            confine(BUILT_IN, folder=str(tmp_path), readable=sys.path)
            os._exit(resource.getrlimit(resource.RLIMIT_NOFILE) != (128, 128))
        finally:
            os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
