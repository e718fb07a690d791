"""`rollcall serve`: finds the model, builds its engine, and serves it over HTTP until it is stopped.

The main thread steps the engine; the HTTP server runs in its own thread (``environments/endpoint.py``).
"""

from __future__ import annotations

import asyncio
import copy
import itertools
import os
import secrets
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

from rollcall.base.errors import ConfigError
from rollcall.base.types import Completion, Ints
from rollcall.base.wait import say
from rollcall.checkpoint.run_dir import RUN_FILE, run_file_of
from rollcall.config import load_config
from rollcall.engine.protocol import Engine, Refused, Request, Sampling
from rollcall.engine.ticker import Ticker
from rollcall.environments.conversation import Conversations
from rollcall.environments.endpoint import Caller, Endpoint, EndpointServer, Open, in_loop
from rollcall.environments.histories import Histories
from rollcall.loop.group_maker import sampling_of
from rollcall.nodes.http_server import listen
from rollcall.run.build import load_sampler, open_model
from rollcall.run.evaluation import GIVEN, ModelPlan, plan_model, sets_model

KEY = "ROLLCALL_SERVE_KEY"
SHORTEST_KEY = 16


def plan_serving(target: str, *, overrides: list[str], engine: str | None = None) -> ModelPlan:
    """Find the model to serve: the newest model of a run (directory or file), or a model's path or name. Its API name is ``run.name``."""
    changes = {"rollout.engine": engine} if engine else {}
    path = Path(target)
    if (path / RUN_FILE).is_file() or (path.is_file() and path.suffix in (".yaml", ".yml")):
        file, defaults = run_file_of(path)
        config = load_config(file, overrides, defaults=defaults, changes=changes)
        return plan_model(config, origin=GIVEN if sets_model(overrides, {}) else None)
    name = path.name if path.exists() else target
    config = load_config(None, overrides, defaults={"run.name": name, "model.path": target}, changes=changes)
    return plan_model(config, origin="given")


def read_key(file: Path | None) -> str | None:
    """Read the API key from the file or, if there is no file, from the environment variable. Returns None if neither is set."""
    key = file.read_text(errors="replace").strip() if file is not None else os.environ.get(KEY, "").strip()
    if not key and file is None:
        return None
    if len(key) < SHORTEST_KEY or not key.isascii() or not key.isprintable() or " " in key:
        where = str(file) if file is not None else KEY
        raise ConfigError(
            f"the key in {where} must have at least {SHORTEST_KEY} printable ASCII characters and no spaces; generate one: "
            "python -c 'import secrets; print(secrets.token_urlsafe(32))'"
        )
    return key


def serve(plan: ModelPlan, *, host: str, port: int, key: str | None, show: Callable[[str], None]) -> None:
    """Serve until Ctrl-C. Calls ``show`` with the address, and with the key if it had to be generated."""
    config = plan.config
    listener = listen(host, port)  # fail on a port that is in use before loading the model
    path, tokenizer = open_model(config, plan.model_path, origin=plan.origin)
    sampler = load_sampler(config.model, config.rollout, path, tokenizer, lora=plan.lora)
    with closing(sampler.engine) as engine:
        name, num_positions = config.run.name, engine.max_positions
        rules = Open(model=name, default=sampling_of(config.rollout, sampler.stop_token_ids))

        async def work() -> None:
            failed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            ticker = Ticker(engine, max_running=config.rollout.max_running)
            caller = open_caller(ticker, rules, tokenizer=tokenizer, failed=failed)
            used = key or secrets.token_urlsafe(32)
            vocabulary = sampler.model.config.vocab_size
            app = Endpoint(
                {used: caller}, name=name, max_model_len=num_positions, vocabulary=vocabulary, tokenizer=tokenizer
            )
            server = EndpointServer(app, host=host, listener=listener)
            say(
                f"serving {name!r} with {num_positions:,} positions; stop with Ctrl-C. The address{'' if key else ' and the key'}:"
            )
            show(f"{server.address}/v1")
            if not key:
                show(used)
            try:
                await failed
            finally:
                rules.is_stopping = True
                server.close()

        asyncio.run(work())


def open_caller(engine: Engine, rules: Open, *, tokenizer: Any, failed: asyncio.Future[None]) -> Caller:
    """Build the function with which a server in this event loop calls the engine. It uses a copy of the tokenizer, because the engine
    uses the original in another thread. If the engine stops with an error, the error is set on ``failed``."""
    histories = Histories(Conversations(copy.deepcopy(tokenizer)), name="serve", max_kept=4_000_000)
    numbers = itertools.count()

    async def sample(prompt_ids: Ints, *, seed: int, sampling: Sampling, session: str) -> Completion:
        # A conversation's next turn goes before newer conversations, because the conversation's KV is still in the cache.
        order = (0, 0, int(session.partition("/")[2] or 1))
        request = Request(
            id=str(next(numbers)), prompt_ids=prompt_ids, seed=seed, sampling=sampling, order=order, session=session
        )
        try:
            return (await engine.generate(request)).completion
        except Refused:
            raise
        except Exception as error:
            if not failed.done():
                failed.set_exception(error)
            raise

    return Caller(rules=rules, histories=histories, sample=in_loop(sample, asyncio.get_running_loop()))
