"""Finds the run directories that a page shows, and answers the page's requests in JSON. Each method of ``Api`` is one endpoint."""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field, ValidationError
from starlette.datastructures import QueryParams
from starlette.requests import Request
from starlette.responses import Response

from rollcall.base.errors import ConfigError
from rollcall.base.redact import redact
from rollcall.base.types import Group
from rollcall.checkpoint.run_dir import is_run
from rollcall.checkpoint.store import store_of
from rollcall.config import public_dump
from rollcall.view import curves, samples
from rollcall.view.compare import differing_settings
from rollcall.view.growing import TrainedDraws
from rollcall.view.journal_index import FILTERS, SORTS, JournalIndex
from rollcall.view.processes import show_cluster, show_marks, show_timeline
from rollcall.view.reader import RunReader
from rollcall.view.summary import no_signal

LOOK_EVERY_S = 3.0  # time between two searches for new runs in a folder
READ_S = 2.0  # longest time to read a growing file before answering
INDEX_S = 1.0  # longest time to index the journal before answering


@dataclass(frozen=True, slots=True, kw_only=True)
class ShownRun:
    id: str  # used in addresses; stays the same when the server restarts
    name: str  # relative to the folder that the user named
    dir: Path  # the resolved path


class UnknownRunError(LookupError):
    """The page does not show a run with this id."""


class ShownRuns:
    def __init__(self, given: Sequence[Path], *, is_one: bool = False) -> None:
        """With ``is_one``, ``given`` contains one run directory, which may still be empty."""
        self._given = [Path(path) for path in given] or [Path("runs")]
        self._is_one = is_one
        for path in self._given if not is_one else []:
            if not path.is_dir():
                problem = "is a file" if path.exists() else "does not exist"
                raise ConfigError(f"{path} {problem}; pass a run directory (run.dir), or a folder of runs")
        self._lock = threading.Lock()
        self._found: dict[str, ShownRun] = {}
        self._looked = float("-inf")

    def all(self) -> list[ShownRun]:
        """Return all runs to show. New runs in a folder appear within seconds, and removed runs disappear."""
        with self._lock:
            if time.monotonic() - self._looked > LOOK_EVERY_S:
                self._found = {place.id: place for path in self._given for place in self._look(path)}
                self._looked = time.monotonic()
            return list(self._found.values())

    def find(self, id: str) -> ShownRun:
        self.all()
        if place := self._found.get(id):
            return place
        raise UnknownRunError(f"run {id!r} is not on this page; it may have been moved or removed")

    def _look(self, path: Path) -> Iterator[ShownRun]:
        real = Path(os.path.realpath(path))
        for found in [real] if self._is_one else islice(_runs_below(real, depth=3), 1000):
            name = real.name if found == real else found.relative_to(real).as_posix()
            name = name.encode("utf-8", errors="replace").decode()
            mark = hashlib.blake2b(os.fsencode(found), digest_size=3).hexdigest()
            plain = re.sub(r"[^A-Za-z0-9._-]", "-", found.name)
            yield ShownRun(id=f"{plain}~{mark}", name=name, dir=found)


def _runs_below(folder: Path, *, depth: int) -> Iterator[Path]:
    """Yield the run directories in a folder, without following links."""
    with suppress(OSError):  # skip directories that cannot be read
        if is_run(folder):
            yield folder
        elif depth:
            with os.scandir(folder) as found:
                below = sorted(entry.name for entry in found if entry.is_dir(follow_symlinks=False))
            for name in below:
                if not name.startswith("."):
                    yield from _runs_below(folder / name, depth=depth - 1)


Whole = Annotated[int, Field(ge=0, le=1 << 40)]
Number = Annotated[float, Field(allow_inf_nan=False)]


class Ask(BaseModel):
    """A request from the page. It has the parameters of all endpoints."""

    run: Annotated[list[str], Field(min_length=1)]
    name: list[str] = []
    seen: str = ""
    axis: Literal["step", "time"] = "step"
    points: Annotated[int, Field(ge=2, le=4000)] = 600
    smooth: Annotated[Number, Field(ge=0, le=0.999)] = 0.0
    low: Number | None = None
    high: Number | None = None
    only: Literal[*FILTERS] | None = None  # type: ignore[valid-type]
    sort: Literal[*SORTS] = "newest"  # type: ignore[valid-type]
    search: str = ""
    after: Annotated[str, Field(pattern=r"^\d{1,15}\.\d{1,15}$")] | None = None  # a step and a draw
    prompt: str | None = None
    limit: Annotated[int, Field(ge=1, le=200)] = 50
    offset: Whole = 0
    step: Whole | None = None
    draw: Whole | None = None
    completion: Whole | None = None
    first: Whole | None = None
    last: Whole | None = None

    @classmethod
    def of(cls, query: QueryParams) -> Ask:
        given = {key: value for key, value in query.items() if value}
        lists = {"run": query.getlist("run")[:12], "name": query.getlist("name")[:100]}  # the most per request
        return cls.model_validate(given | lists)


class WatchedRun(RunReader):
    """A run directory that the page shows, with methods that only the page needs."""

    def __init__(self, run_dir: Path) -> None:
        super().__init__(run_dir, read_s=READ_S)
        self.trained = TrainedDraws(run_dir, read_s=READ_S)
        self._making = threading.Lock()
        self._index: JournalIndex | None = None
        self._sizes: tuple[float, dict[str, int]] = (float("-inf"), {})

    @property
    def index(self) -> JournalIndex:
        """The journal's index, created when it is first used. With the lock, because requests run in several threads."""
        with self._making:
            self._index = self._index or JournalIndex(self.dir)
            return self._index

    def sizes(self) -> dict[str, int]:
        """Return the sizes of journal, checkpoints and model, cached for 30 s, because adding up a large folder takes a while."""
        with self._making:
            if time.monotonic() - self._sizes[0] > 30.0:
                found = {name: _folder_bytes(self.dir / name) for name in ("journal", "checkpoints", "model")}
                self._sizes = (time.monotonic(), found)
            return self._sizes[1]

    def row(self) -> dict[str, Any]:
        """Return the run's row for the list of runs."""
        config, state = self.config, self.state()
        found = self.standing(state)
        times = self.metrics.column("step")[1]
        return {
            **found,
            "no_signal": no_signal(found["no_signal"]),
            "state": state.word,
            "text": redact(state.text),
            "evaluates": config is None or config.data.val is not None,
            "tokens_per_s": self.metrics.last("rollout/tokens_per_s"),
            "began_s": float(times[0]) if len(times) else None,
            "moved_s": self.moved_s(),
            "model": redact(str(config.model.path)) if config else None,
            "algorithm": config.algorithm.name if config else None,
            "version": self.metrics.version,
        }


class Api:
    def __init__(self, places: ShownRuns) -> None:
        self._places = places
        self._lock = threading.Lock()
        self._shown: dict[Path, WatchedRun] = {}

    def run(self, id: str) -> WatchedRun:
        root = self._places.find(id).dir
        with self._lock:
            if root not in self._shown:
                self._shown[root] = WatchedRun(root)
            return self._shown[root]

    def runs(self, ask: Ask | None) -> Any:
        rows = []
        for place in self._places.all():
            rows.append({"id": place.id, "name": place.name, "dir": str(place.dir), **self.run(place.id).row()})
        return {"runs": rows, "now_s": time.time()}

    def metrics(self, ask: Ask) -> Any:
        """Return the metrics that occur in at least one of these runs."""
        names: set[str] = set()
        for id in ask.run:
            table = self.run(id).metrics
            table.refresh()
            names.update(table.names())
        return {"metrics": curves.describe(sorted(names)[:5000])}

    def curves(self, ask: Ask) -> Any:
        """Return these runs' curves for each ``name``, with faults and recoveries. ``seen`` is the ``mark`` of an earlier answer; if
        nothing has changed since then, the answer contains no curves."""
        runs = [self.run(id) for id in ask.run]
        for run in runs:
            run.metrics.refresh()
        # Count the marks too, because no row follows a fault that ended the run.
        mark = "-".join(f"{run.metrics.version}.{len(run.events.marks())}" for run in runs)
        if mark == ask.seen:
            return {"mark": mark, "same": True}
        how = ask.model_dump(include={"axis", "points", "smooth", "low", "high"})
        return {
            "mark": mark,
            "curves": {name: [curves.curve(run.metrics, name, **how) for run in runs] for name in ask.name},
            "marks": [show_marks(run.events.marks(), run.metrics, axis=ask.axis) for run in runs],
        }

    def difference(self, ask: Ask) -> Any:
        """Return the run file keys whose values differ between these runs, and each run's row in the list of runs."""
        runs = [self.run(id) for id in ask.run]
        saved = [one.saved_config() for one in runs]
        dumps = [None if config is None else public_dump(config) for config, _ in saved]
        settings = [
            {"key": key, "values": [_shown(value, dump) for value, dump in zip(values, dumps, strict=True)]}
            for key, values in differing_settings(dumps).items()
        ]
        return {"settings": settings, "problems": [why for _, why in saved], "rows": [one.row() for one in runs]}

    def groups(self, ask: Ask) -> Any:
        """Return a page of groups."""
        run = self.run(ask.run[0])
        index = run.index.refresh(seconds=INDEX_S)._asdict()
        answer = {"index": index, "steps": run.index.steps()}
        if ask.search:
            step, draw = map(int, ask.after.split(".")) if ask.after else (1 << 60, 0)
            found = samples.search(run.dir, run.index, ask.search, only=ask.only, after=(step, draw), limit=ask.limit)
            return {**answer, **found._asdict()}
        found = run.index.find(**ask.model_dump(include={"step", "prompt", "only", "sort", "limit", "offset"}))
        index["groups"] = found.groups
        rows = [{**row._asdict(), "text": samples.preview(run.dir, row)} for row in found.rows]
        return {**answer, "rows": rows, "total": found.total}

    def group(self, ask: Ask) -> Any:
        run, group = self._group(ask)
        return samples.show_group(group, config=run.config, trained_in=run.trained.step_of(group.draw))

    def text(self, ask: Ask) -> Any:
        """Return the full text of a completion that ``group`` returned shortened."""
        _, group = self._group(ask)
        return {"said": samples.said_of(group, completion=ask.completion)}

    def tokens(self, ask: Ask) -> Any:
        run, group = self._group(ask)
        completion = ask.completion or 0
        return samples.show_tokens(
            group,
            completion=completion,
            config=run.config,
            vocabulary=samples.vocabulary_of(run.dir),
            learner=samples.read_scores(run.dir, group, completion=completion, trained=run.trained),
        )

    def _group(self, ask: Ask) -> tuple[WatchedRun, Group]:
        run = self.run(ask.run[0])
        return run, samples.read_group(run.dir, run.index, step=ask.step or 0, draw=ask.draw or 0)

    def held_out(self, ask: Ask) -> Any:
        run = self.run(ask.run[0])
        steps = samples.held_out_steps(run.dir)
        step = ask.step if ask.step is not None else next(reversed(steps), None)
        rows = [] if step is None else samples.show_held_out(run.dir, step=step, needle=ask.search)
        return {"steps": steps, "step": step, "rows": rows}

    def timeline(self, ask: Ask) -> Any:
        run = self.run(ask.run[0])
        return show_timeline(run.dir, run.metrics, first_step=ask.first, last_step=ask.last)

    def cluster(self, ask: Ask) -> Any:
        run = self.run(ask.run[0])
        checkpoints = [
            {
                "step": one.step,
                "score": one.score,
                "bytes": _folder_bytes(one.path),
                "saved_s": one.path.stat().st_mtime,
                "whole": not one.reason,
            }
            for one in store_of(run.dir).inspect(checksums=False)
        ]
        shown = show_cluster(run.dir, run.config, marks=run.events.marks())
        about = {"state": run.state().word, "sizes": run.sizes(), "checkpoints": checkpoints, "now_s": time.time()}
        return {**shown, **about}


ADDRESSES = (
    "runs", "metrics", "curves", "difference", "groups", "group", "text", "tokens", "held_out", "timeline", "cluster",
)  # fmt: skip


def answering(name: str, answer_to: Callable[[Any], Any]) -> Callable[[Request], Response]:
    """Build the handler for an endpoint. The handler is synchronous, so that it runs in a thread, because it reads files."""

    def answer(request: Request) -> Response:
        try:
            return as_json(answer_to(None if name == "runs" else Ask.of(request.query_params)))
        except (UnknownRunError, samples.NoGroupError, FileNotFoundError) as error:
            return as_json({"error": str(error)}, status=404)
        except ValidationError as error:
            wrong = "; ".join(f"{one['loc'][0]}: {one['msg']}" for one in error.errors(include_input=False))
            return as_json({"error": wrong}, status=400)
        except OSError as error:
            return as_json({"error": f"{error.filename} cannot be read: {error.strerror}"}, status=403)

    return answer


def as_json(value: Any, *, status: int = 200) -> Response:
    """Build a JSON response. It is ASCII, because UTF-8 cannot encode a lone surrogate. NaN becomes null."""
    try:
        text = json.dumps(value, allow_nan=False, separators=(",", ":"))
    except ValueError:
        text = json.dumps(_finite(value), allow_nan=False, separators=(",", ":"))
    return Response(text, status_code=status, media_type="application/json")


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: _finite(each) for key, each in value.items()}
    return [_finite(each) for each in value] if isinstance(value, list | tuple) else value


def _shown(value: Any, dump: dict[str, Any] | None) -> str | None:
    return None if dump is None else value if isinstance(value, str) else json.dumps(value)


def _folder_bytes(folder: Path) -> int:
    """Return the total size of all files in a folder. Ignores files that are removed meanwhile."""
    total = 0
    for path in folder.rglob("*"):
        with suppress(OSError):
            total += path.lstat().st_size if path.is_file() else 0
    return total
