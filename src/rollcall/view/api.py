"""Answers the page's requests in JSON, which it reads from run directories on demand. Each method of ``Api`` is one endpoint."""

from __future__ import annotations

import json
import math
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field, ValidationError
from starlette.datastructures import QueryParams
from starlette.requests import Request
from starlette.responses import Response

from rollcall.base.redact import redact
from rollcall.base.types import Group
from rollcall.config import public_dump
from rollcall.view import curves, samples
from rollcall.view.compare import differing_settings
from rollcall.view.growing import TrainedDraws
from rollcall.view.journal_index import FILTERS, SORTS, JournalIndex
from rollcall.view.processes import show_cluster, show_marks, show_timeline
from rollcall.view.reader import RunReader
from rollcall.view.shown_runs import ShownRuns, UnknownRunError
from rollcall.view.summary import no_signal

MOST_CURVES = 100
MOST_RUNS = 12  # shown together
READ_S = 2.0  # at most, to read a growing file before answering
INDEX_S = 1.0  # at most, to index the journal before answering


Whole = Annotated[int, Field(ge=0, le=1 << 40)]
Number = Annotated[float, Field(allow_inf_nan=False)]


class Ask(BaseModel):
    """A request from the page, with the parameters of all endpoints."""

    run: Annotated[list[str], Field(min_length=1)]
    name: list[str] = []
    seen: str = ""
    axis: Literal["step", "time"] = "step"
    points: Annotated[int, Field(ge=2, le=curves.MOST_POINTS)] = 600
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
        return cls.model_validate(
            {**given, "run": query.getlist("run")[:MOST_RUNS], "name": query.getlist("name")[:MOST_CURVES]}
        )


class WatchedRun(RunReader):
    """A run directory that somebody is viewing, with methods that only the page needs."""

    def __init__(self, run_dir: Path) -> None:
        super().__init__(run_dir, read_s=READ_S)
        self.trained = TrainedDraws(run_dir, read_s=READ_S)
        self._making = threading.Lock()
        self._index: JournalIndex | None = None
        self._sizes: tuple[float, dict[str, int]] = (float("-inf"), {})

    @property
    def index(self) -> JournalIndex:
        """The journal's index, created when somebody first looks at samples."""
        with self._making:
            self._index = self._index or JournalIndex(self.dir)
            return self._index

    def public_config(self) -> dict[str, Any] | None:
        """Return the run file without its secrets, or None if it cannot be read."""
        return None if (config := self.config) is None else public_dump(config)

    def sizes(self) -> dict[str, int]:
        """Return the sizes of journal, checkpoints and model, cached for 30 s because counting a large folder takes a while."""
        with self._making:
            if time.monotonic() - self._sizes[0] > 30.0:
                found = {name: _folder_bytes(self.dir / name) for name in ("journal", "checkpoints", "model")}
                self._sizes = (time.monotonic(), found)
            return self._sizes[1]

    def row(self) -> dict[str, Any]:
        """Return the run as one row in the list of runs."""
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

    def kept_checkpoints(self) -> list[dict[str, Any]]:
        """Return the kept checkpoints, judged by their manifests and file sizes."""
        return [
            {
                "step": one.step,
                "score": one.score,
                "bytes": _folder_bytes(one.path),
                "saved_s": one.path.stat().st_mtime,
                "whole": not one.reason,
            }
            for one in self.checkpoints(checksums=False)
        ]


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
            row = self.run(place.id).row()
            rows.append({"id": place.id, "name": place.name, "dir": str(place.dir), **row})
        return {"runs": rows, "now_s": time.time()}

    def metrics(self, ask: Ask) -> Any:
        """Return the metrics that at least one of these runs has."""
        names: set[str] = set()
        for id in ask.run:
            table = self.run(id).metrics
            table.refresh()
            names.update(table.names())
        return {"metrics": curves.describe(sorted(names)[:5000])}

    def curves(self, ask: Ask) -> Any:
        """Return these runs' curves for each ``name``, with faults and recoveries. ``seen`` is the ``mark`` from an earlier
        answer: if nothing is new, the answer is short."""
        runs = [self.run(id) for id in ask.run]
        for run in runs:
            run.metrics.refresh()
        # A fault that ended the run has no new row after it.
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
        """Return the run-file keys in which several runs differ, and a few numbers for each run."""
        runs = [self.run(id) for id in ask.run]
        dumps = [one.public_config() for one in runs]
        settings = [
            {"key": key, "values": [_shown(value, dump) for value, dump in zip(values, dumps, strict=True)]}
            for key, values in differing_settings(dumps).items()
        ]
        return {
            "settings": settings,
            "problems": [one.config_problem for one in runs],
            "rows": [one.row() for one in runs],
        }

    def groups(self, ask: Ask) -> Any:
        """Return a page of groups."""
        run = self.run(ask.run[0])
        index = run.index.refresh(seconds=INDEX_S)._asdict()
        answer = {"index": index, "steps": run.index.steps()}
        if ask.search:
            step, draw = map(int, ask.after.split(".")) if ask.after else (1 << 60, 0)
            found = samples.search(run.dir, run.index, ask.search, only=ask.only, after=(step, draw), limit=ask.limit)
            return {**answer, **found._asdict()}
        found = run.index.find(
            **ask.model_dump(include={"step", "prompt", "only", "sort", "limit", "offset"}),
        )
        index["groups"] = found.groups
        rows = [{**row._asdict(), "text": samples.preview(run.dir, row)} for row in found.rows]
        return {**answer, "rows": rows, "total": found.total}

    def group(self, ask: Ask) -> Any:
        run, group = self._group(ask)
        return samples.show_group(group, config=run.config, trained_in=run.trained.step_of(group.draw))

    def text(self, ask: Ask) -> Any:
        """Return the full version of a text that ``group`` cut."""
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
        about = {
            "state": run.state().word,
            "sizes": run.sizes(),
            "checkpoints": run.kept_checkpoints(),
            "now_s": time.time(),
        }
        return {**show_cluster(run.dir, run.config, marks=run.events.marks()), **about}


ADDRESSES = (
    "runs", "metrics", "curves", "difference", "groups", "group", "text", "tokens", "held_out", "timeline", "cluster",
)  # fmt: skip


def answering(name: str, answer_to: Callable[[Any], Any]) -> Callable[[Request], Response]:
    """Build the handler for an endpoint. It is synchronous, so it runs in a thread, because it reads files."""

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
    """Build a JSON response. It is ASCII, since UTF-8 cannot encode half a surrogate pair. NaN becomes null."""
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
    """Return the total size of all files in a folder, without files that are removed in the meantime."""
    total = 0
    for path in folder.rglob("*"):
        with suppress(OSError):
            total += path.lstat().st_size if path.is_file() else 0
    return total
