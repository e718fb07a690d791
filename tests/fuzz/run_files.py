"""Hostile run files, overrides and command lines; and what a run file must be to be accepted."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any, get_args

import yaml
from pydantic import BaseModel

from rollcall.base.errors import ConfigError
from rollcall.config import Config, dump_config, load_config

# Written into YAML as they are.
VALUES = (
    ".nan", "nan", ".inf", "-.inf", "1e999", "1e300", "-1e20", "-1", "0", "-0.0", "1", "2", "1.5", "3000000000", "1e308", "1e-320",
    "''", "' '", "true", "no", "null", "[]", "{}", "[[[]]]", "[1, 2]", "[0.5, 5]", "[5, 0.5]", "[2, 3]",
    "['']", "[null]", "{a: 1}", "{0: 1}", "{null: x}", "text", "all", "0-7", "0-99999999999", "'0-7:0-3'", "7-0", "2024-01-01",
    "2024-13-41", "1:2:3", "!!bool maybe", "!!int ''", "!!float x", "!!timestamp x", "!!binary '=='", "!!binary aGk=", "!!set {a, b}",
    "!!omap [a: 1]", "!!python/object:os.system x", "!unknown x", '"\\x1b[31m"', "&a [*a]", "*nobody", "<<",
    "{<<: {lr: 1}}", "{<<: [1]}", "{a: 1, a: 2}", "? x", "|\n      text", "/", ".", "..", "~", "/dev/null", "../..", "x" * 5000,
    "'{prompt}'", "native", "vllm", "ppo", "dapo", "regex", "99999999", "[true, false]", "{1.5: 2}", "!!str 5", "'\ud7ff'",
)  # fmt: skip


def keys(section: type[BaseModel], prefix: str = "") -> list[str]:
    """Every dotted key of the run file; of lists and variants the first few."""
    found: list[str] = []
    for name, info in section.model_fields.items():
        inner = _classes(info.annotation)
        found.append(f"{prefix}{name}")
        listed = "list" in str(info.annotation) and inner
        for kind in inner[:1] if listed else inner:
            found += keys(kind, f"{prefix}{name}.0." if listed else f"{prefix}{name}.")
    return sorted(set(found))


def _classes(annotation: Any) -> list[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [found for arg in get_args(annotation) for found in _classes(arg)]


KEYS = keys(Config)


def run_file(random: Random) -> bytes:
    """The text of a run file with something wrong in it, or with a value that may be."""
    kind = random.randrange(10)
    if kind < 6:
        return _with_values(random).encode("utf-8", "surrogatepass")
    if kind < 8:
        return _damaged(_with_values(random).encode("utf-8", "surrogatepass"), random)
    return random.choice(_BOMBS)(random).encode("utf-8", "surrogatepass")


def override(random: Random) -> str:
    key = random.choice(KEYS)
    if random.random() < 0.1:
        key = random.choice(
            (
                key + ".x",
                key.upper(),
                "",
                ".",
                "..",
                "reward.9.weight",
                "reward.-1",
                "a.b.c",
                "\u0660",
                key + ".",
                ".".join("a" * 500),
                f"{key}{'.a' * 500}",
            )
        )
    value = random.choice(VALUES)
    if random.random() < 0.1:
        value = random.choice(
            ("[" * 5000, "{a: " * 3000, "&a [" + "*a," * 50 + "]", "@", "%", "`", "\t", "a: b: c", "- - -")
        )
    # An argument of a process holds no NUL.
    return (f"{key}={value}" if random.random() < 0.95 else key + value).replace("\0", "")


def unsound(config: Config) -> str | None:
    """What a config says that no run can do; None: nothing."""
    for key, value in _leaves(config.model_dump(mode="python"), ""):
        if isinstance(value, float) and not math.isfinite(value):
            return f"{key}={value}"
    rollout, algorithm, section = config.rollout, config.algorithm, config.eval
    wrong = {
        "betas": any(not 0 <= beta < 1 for beta in (*config.actor.betas, *config.critic.betas)),
        "stop": "" in rollout.stop,
        "kv_tokens": rollout.kv_tokens is not None and rollout.kv_tokens < 1,
        "mismatch_mask": bool(algorithm.mismatch_mask)
        and not algorithm.mismatch_mask[0] < 1 < algorithm.mismatch_mask[1],
        "dynamic_sampling": algorithm.dynamic_sampling and rollout.samples_per_prompt < 2,
        "eval": section.samples_per_prompt > 1 and section.temperature == 0,
        "temperature": rollout.temperature < 1e-3 or 0 < section.temperature < 1e-3,
        "timeout": any(reward.timeout_s > 1e9 or reward.timeout_s < 1e-3 for reward in config.reward),
        "weights": all(reward.weight == 0 for reward in config.reward),
        "run.dir": not config.run.dir.name or str(config.run.dir).startswith("~"),
    }
    return next((f"{key} is accepted" for key, is_wrong in wrong.items() if is_wrong), None)


def accepted(text: str, *, folder: Path) -> str | None:
    """Whether what `rollcall config` printed is a run file that gives the same again."""
    path = folder / "printed.yaml"
    path.write_text(text)
    try:
        config = load_config(path)
    except ConfigError as error:
        return f"printed, and refused when it is read: {error}"
    if dump_config(config) != text:
        return "printed, and another when it is read"
    return unsound(config)


def _leaves(value: Any, where: str) -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict):
        for key, each in value.items():
            yield where, key
            yield from _leaves(each, f"{where}.{key}")
    elif isinstance(value, list | tuple):
        for each in value:
            yield from _leaves(each, where)
    else:
        yield where, value


def _with_values(random: Random) -> str:
    sections: dict[str, Any] = {}
    marks: dict[str, str] = {}
    if random.random() < 0.8:
        sections["algorithm"] = {"name": random.choice(("grpo", "dapo", "ppo", "reinforce_pp", "rloo"))}
        sections["reward"] = [{"type": random.choice(("exact", "number", "countdown", "regex"))}]
    for number in range(random.randint(1, 4)):
        mark = f"MARK{number}MARK"
        marks[mark] = random.choice(VALUES)
        if number and random.random() < 0.5:
            marks[mark] = random.choice(("1", "2", "0.5", "8"))
        _put(sections, random.choice(KEYS).split("."), mark)
    if random.random() < 0.2:
        _put(sections, [random.choice(("extra", "env", "actor", "lr", "x" * 3000, "\u202e"))], "1")
    text = yaml.safe_dump(sections, sort_keys=False)
    for mark, value in marks.items():
        text = text.replace(mark, value)
    return text


def _put(node: Any, path: list[str], value: str) -> None:
    for part, after in zip(path, [*path[1:], ""], strict=True):
        if isinstance(node, list):
            node = node[0] if part == "0" and node else {}
            continue
        if not after:
            node[part] = value
            return
        if not isinstance(node.get(part), dict | list):
            node[part] = [{}] if after == "0" else {}
        node = node[part]


def _damaged(data: bytes, random: Random) -> bytes:
    kind = random.randrange(5)
    if kind == 0:
        return data[: random.randrange(len(data) + 1)]
    if kind == 1:
        places = {random.randrange(len(data)): random.randrange(256) for _ in range(random.randint(1, 8))}
        return bytes(places.get(index, byte) for index, byte in enumerate(data))
    if kind == 2:
        place = random.randrange(len(data))
        piece = random.choice(
            (
                b"\x00",
                b"\xff\xfe",
                b"\xed\xa0\x80",
                b"\t",
                b"- ",
                b": ",
                b"&a ",
                b"*a",
                b"!!int ",
                b"{",
                b"[",
                b"'",
                b"%YAML 9.9\n",
            )
        )
        return data[:place] + piece + data[place:]
    return data + data if kind == 3 else b"---\n" + data + b"---\n" + data


_BOMBS = (
    lambda random: "a0: &a0 [x, x, x, x]\n" + "".join(f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * random.randint(2, 9))}]\n" for i in range(1, random.randint(5, 40))),
    lambda random: "a: &a {x: 1}\n" + "".join(f"b{i}: {{<<: *a, y: *a}}\n" for i in range(random.randint(1, 50))),
    lambda random: "run: " + random.choice(("[", "{a: ", "- ", "? ")) * random.choice((50, 500, 5000)),
    lambda random: "".join(f"key_{i}: {i}\n" for i in range(random.choice((10, 3000)))),
    lambda random: "actor: {" + ", ".join(f"lr_{i}: {i}" for i in range(random.choice((10, 3000)))) + "}",
    lambda random: "cluster: {nodes: [" + "{gpus: 1}, " * random.choice((1, 2000)) + "]}",
    lambda random: "run: {name: " + "x" * random.choice((10_000, 1_500_000)) + "}",
    lambda random: "run: &r {name: x}\nmodel: *r\ndata: *r\nactor: *r\ntrainer: *r",
    lambda random: "rollout: {stop: [" + "'a', " * random.choice((10, 20_000)) + "]}",
    lambda random: "cluster: {component_placement: {" + ", ".join(f"'role{i}': {i}" for i in range(500)) + "}}",
)  # fmt: skip
