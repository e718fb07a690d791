"""What has ended of requests that go on. When their worker is lost, they go out again with the missing seeds alone."""

from __future__ import annotations

from dataclasses import replace

from rollcall.engine.protocol import Ended, Finished, Request
from rollcall.types import Completion


class Unfinished:
    """Places are those in the request as it was first submitted."""

    def __init__(self) -> None:
        self._made: dict[str, dict[int, Completion]] = {}  # request -> place -> completion
        self._left: dict[str, list[int]] = {}  # request that went out again -> the places of its seeds

    def note(self, ended: Ended) -> Ended:
        """A worker says so; returns it with the place in the whole request."""
        left = self._left.get(ended.request_id)
        place = ended.place if left is None else left[ended.place]
        self._made.setdefault(ended.request_id, {})[place] = ended.completion
        return replace(ended, place=place)

    def missing(self, request: Request) -> Request:
        """What is left to make of a request whose worker is lost."""
        made = self._made.get(request.id)
        if not made:
            return request
        places = self._left.get(request.id, range(len(request.seeds)))
        left = {place: seed for place, seed in zip(places, request.seeds, strict=True) if place not in made}
        self._left[request.id] = list(left)
        return replace(request, seeds=tuple(left.values()))

    def whole(self, finished: Finished) -> Finished:
        """With what lost workers had made."""
        made, left = self._made.pop(finished.request_id, {}), self._left.pop(finished.request_id, None)
        if left is None:
            return finished
        made |= dict(zip(left, finished.completions, strict=True))
        return replace(finished, completions=tuple(made[place] for place in sorted(made)))
