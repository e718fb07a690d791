"""Requests for tests of what hands them out."""

from __future__ import annotations

import numpy as np

from rollcall.engine.protocol import Request, Sampling
from rollcall.run.router import Router

SAMPLING = Sampling(temperature=1.0, top_p=1.0, top_k=0, max_tokens=4, stop_token_ids=(0,), stop_strings=())


def make_group(name: object, *, size: int = 2, order: tuple[int, int, int] = (0, 0, 0)) -> list[Request]:
    prompt = np.array([1], dtype=np.int32)
    return [
        Request(id=f"{name}/{place}", prompt_ids=prompt, seed=place, sampling=SAMPLING, order=order, group=str(name))
        for place in range(size)
    ]


def add(router: Router, requests: list[Request]) -> None:
    for request in requests:
        router.add(request)
