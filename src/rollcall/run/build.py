"""Builds the parts of a run from its run file: prompts, learner, critic, reference, engine and rewards. Evaluation and serving use it
too."""

from __future__ import annotations

import asyncio
import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from rollcall.base.errors import ConfigError, short_of_memory
from rollcall.base.types import Completion, Floats, Prompt, Sample, rows_of
from rollcall.base.wait import say, warn
from rollcall.base.words import are, counted, size
from rollcall.config import Config, EnvironmentSection, ExactReward, RolloutSection
from rollcall.config.lora import LoraSection
from rollcall.config.rewards import Reward
from rollcall.config.sections import ModelSection
from rollcall.engine.native.engine import NativeEngine
from rollcall.engine.vllm.child import Child
from rollcall.engine.vllm.engine import VllmEngine
from rollcall.engine.vllm.setup import find_python
from rollcall.environments.conversation import Conversations, unknown_characters
from rollcall.environments.protocol import KIND, Environments
from rollcall.learner.gang import Gang
from rollcall.learner.learner import Learner
from rollcall.loop.data.load import PromptSet, load_prompts
from rollcall.loop.samples import ScoreSamples
from rollcall.model.adapter import Adapter, add_to_weights
from rollcall.model.decoder import Decoder
from rollcall.model.files import resolve_model
from rollcall.model.load import (
    WholeOnly,
    check_architecture,
    each_tensor,
    load_causal_lm,
    load_tokenizer,
    open_unread,
    outline_causal_lm,
    resolve_device,
    resolve_dtype,
)
from rollcall.model.stored.find import is_model_dir
from rollcall.model.stored.tensors import Stored
from rollcall.model.tokenizers import check_stop_strings, stop_token_ids
from rollcall.plan.activations import COMPILE_FROM
from rollcall.plan.choose import kv_fraction
from rollcall.reward.scorer import ModelRewardFunction, Scorer, columns_needed
from rollcall.reward.trl import MESSAGES
from rollcall.run.host_memory import keep_freed_memory
from rollcall.run.origin import refuse_changed_rows

POLICY = "policy"  # the name of the run's adapter in its engine
NUM_REWARD_WORKERS = 2
LocalEngine = NativeEngine | VllmEngine


@dataclass(frozen=True, slots=True, kw_only=True)
class Inputs:
    """What the controller reads before any weights are loaded."""

    model_path: str
    tokenizer: Any
    train: PromptSet
    val: PromptSet | None


def load_inputs(config: Config) -> Inputs:
    path = resolve_model(config.model.path)
    if path != config.model.path and not config.model.path.startswith("builtin:"):
        say(f"reading model.path={config.model.path} from its checkpoint {path}")
    needs = columns_needed(config.reward)
    say(f"reading the tokenizer and the prompts of {config.data.train}")
    tokenizer = tokenizer_of(config, path)
    load = partial(load_prompts, data=config.data, tokenizer=tokenizer)
    train = load(config.data.train, split="train", needs=needs)
    refuse_changed_rows(config.run.dir, "train", train)
    val = None
    if config.data.val is not None:
        needs = columns_needed(judges_of(config.reward))
        val = load(config.data.val, split="val", limit=config.eval.max_prompts, needs=needs)
        refuse_changed_rows(config.run.dir, "val", val, limit=config.eval.max_prompts)
    # An environment may distinguish rows with the same text by their other columns.
    _warn_of_rows(train, val, tokenizer, may_repeat=config.environment is not None)
    for prompts in (train, val):
        if prompts is not None and prompts.num_overlong:
            say(
                f"{prompts.source}: left out {counted(prompts.num_overlong, 'prompt')} longer than "
                f"{config.data.max_prompt_tokens} tokens{prompts.with_template}"
            )
    return Inputs(model_path=path, tokenizer=tokenizer, train=train, val=val)


def _warn_of_rows(train: PromptSet, val: PromptSet | None, tokenizer: Any, *, may_repeat: bool) -> None:
    """Warn if the tokenizer cannot encode part of the first prompt or the difference between two prompts, or if rows repeat."""
    first = train.prompts[0]
    if lost := unknown_characters(first.text, first.token_ids, tokenizer):
        warn(
            f"{first.id}: the tokenizer has no tokens for {', '.join(map(repr, lost[:8]))} in the prompt {first.text[:40]!r}, so the "
            "model does not see them; use another model, or prompts that its tokenizer can encode"
        )
    texts = {prompt.text for prompt in train.prompts}
    if num_alike := len(texts) - len({prompt.token_ids.tobytes() for prompt in train.prompts}):
        warn(
            f"data.train={train.source}: {counted(num_alike, 'prompt')} {'has' if num_alike == 1 else 'have'} the same tokens as another "
            "prompt, although the texts differ: the tokenizer has no tokens for the difference; use another model, or prompts that its "
            "tokenizer can encode"
        )
    if may_repeat:
        return
    if num_repeats := len(train.prompts) - len(texts):
        warn(
            f"data.train={train.source}: {num_repeats:,} of its {counted(len(train.prompts), 'prompt')} {are(num_repeats)} the same as "
            "an earlier one; remove the duplicates unless you want them"
        )
    if val is not None and (num_shared := sum(prompt.text in texts for prompt in val.prompts)):
        warn(
            f"data.val={val.source}: {num_shared:,} of its {counted(len(val.prompts), 'prompt')} {are(num_shared)} in data.train too, so "
            "the evaluation scores prompts that the run trains on; remove them from one of the two"
        )


def tokenizer_of(config: Config, path: str) -> Any:
    """Load the tokenizer for the model at ``path``, with the run's chat template. Refuses an unsupported model before anything is loaded,
    and refuses stop strings that the tokenizer can never produce."""
    model = config.model
    check_architecture(path, trust_remote_code=model.trust_remote_code)
    tokenizer = load_tokenizer(path, chat_template=model.chat_template, trust_remote_code=model.trust_remote_code)
    check_stop_strings(tokenizer, config.rollout.stop)
    return tokenizer


def set_threads(num_threads: int | None, *, processes_here: int = 1) -> None:
    """Set torch's threads to ``trainer.num_threads``, or to a fair share of this host's cores."""
    torch.set_num_threads(num_threads or max(1, (os.cpu_count() or 1) // processes_here))


def build_learner(
    config: Config,
    model: Any,
    *,
    gang: Gang,
    device: torch.device | None = None,
    mirror: bool = False,
    unread: Stored | None = None,
    adapter: Adapter | None,
) -> Learner:
    num_parameters = sum(parameter.numel() for parameter in model.parameters())
    learner = Learner(
        model,
        config.actor,
        algorithm=config.algorithm,
        temperature=config.rollout.temperature,
        max_response_tokens=config.rollout.max_response_tokens,
        total_updates=config.trainer.steps * config.actor.minibatches * config.actor.epochs,
        gang=gang,
        device=device,
        mirror=mirror,
        unread=unread,
        adapter=adapter,
    )
    if adapter is not None:
        adapter.refuse_other_model(model, learner.body.base_tensors())
    on_cpu = learner.body.device.type == "cpu"
    if on_cpu:
        keep_freed_memory()
    pays = not on_cpu and num_parameters >= COMPILE_FROM
    if config.actor.compile if config.actor.compile is not None else pays:
        if on_cpu:
            check_compiler("actor.compile")
        if gang.rank == 0:
            say("the first update will wait for compilation (actor.compile; this takes about a minute)")
        learner.body.compile()
    return learner


def build_adapter(config: Config, model: Any, *, device: torch.device) -> Adapter | None:
    """Build the run's adapter, identical in every process. Returns None if the run trains the full model."""
    if config.model.lora is None:
        return None
    path = resolve_model(config.model.path)
    local = Path(path).expanduser()
    if not is_model_dir(local) and is_model_dir(local / "model"):
        local /= "model"  # the part of a checkpoint that peft can open
    base = str(local.resolve()) if local.is_dir() else path
    return Adapter.make(Decoder.of(model), config.model.lora, seed=config.run.seed, device=device, base=base)


def check_compiler(key: str) -> None:
    """Raise an error if torch cannot compile for this CPU, rather than fail at the first call."""
    if shutil.which(os.environ.get("CXX", "g++")) is None:
        raise ConfigError(
            f"on a CPU, {key}: true needs a C++ compiler, but {os.environ.get('CXX', 'g++')!r} was not found; install g++, set CXX to "
            f"another compiler, or leave the key out"
        )


def check_engine(rollout: RolloutSection) -> None:
    """Raise an error if the engine is not installed, before anything is loaded for it."""
    if rollout.engine == "vllm":
        find_python(rollout.vllm.python)


def build_engine(
    rollout: RolloutSection,
    model: Any,
    tokenizer: Any,
    *,
    graphs: bool = True,
    device: torch.device | None = None,
    adapter: Adapter | None = None,
    kv_tokens: int | None = None,
) -> LocalEngine:
    """Build this process's engine, with the weights of ``model`` and the ``adapter``. On CUDA, the native engine captures CUDA graphs if
    ``graphs`` is set. For vLLM, ``model`` may be an outline, and the engine runs on ``device``. ``kv_tokens`` is the size of the KV cache
    if the run file does not set it (``card.settle``)."""
    kv_tokens = rollout.kv_tokens if rollout.kv_tokens is not None else kv_tokens
    if rollout.engine == "native":
        if rollout.compile and next(model.parameters()).device.type == "cpu":
            check_compiler("rollout.compile")
            say("the first completions will wait for compilation (rollout.compile; this takes about half a minute)")
        with short_of_memory(partial(_engine_sentence, model)):
            return NativeEngine(
                model,
                tokenizer,
                max_running=rollout.max_running,
                kv_tokens=kv_tokens,
                kv_fraction=kv_fraction(rollout),
                compile=rollout.compile,
                graphs=graphs,
                adapters=None if adapter is None else {POLICY: adapter},
            )
    say("starting vLLM in its own process (this takes about a minute)")
    child = Child(find_python(rollout.vllm.python), num_threads=torch.get_num_threads())
    try:
        child.wait_until_ready()
        return VllmEngine(
            model,
            tokenizer,
            child,
            section=rollout.vllm,
            max_running=rollout.max_running,
            kv_tokens=kv_tokens,
            kv_fraction=kv_fraction(rollout),
            device=device,
            adapter=adapter,
        )
    except BaseException:  # also on an interrupt, because vLLM would continue to load
        child.close()
        raise


def _engine_sentence(model: Any, why: str) -> str:
    weights = sum(tensor.numel() * tensor.element_size() for tensor in model.parameters())
    return (
        f"the KV cache of the native engine does not fit ({why}); the model's weights take {size(weights)}, and the learner's state may "
        "be in memory too. Lower rollout.kv_memory_fraction or rollout.kv_tokens, or place rollout on slots without an actor"
    )


def open_model(config: Config, given: str, *, origin: str) -> tuple[str, Any]:
    """Return the path and tokenizer of a model that this process will sample from. Loads no weights."""
    set_threads(config.trainer.num_threads)
    check_engine(config.rollout)
    path = resolve_model(given)
    say(f"loading {given} ({origin})")
    return path, tokenizer_of(config, path)


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampler:
    """A model that only samples."""

    model: Any
    engine: LocalEngine
    stop_token_ids: tuple[int, ...]


def load_sampler(
    section: ModelSection, rollout: RolloutSection, path: str, tokenizer: Any, *, lora: LoraSection | None
) -> Sampler:
    """Load the model at ``path``, and add the adapter that ``lora`` names to its weights. With vLLM, the weights go to vLLM tensor by
    tensor, and the returned model is only an outline."""
    device = resolve_device(section.device)
    dtype, trust = resolve_dtype(section.dtype, device), section.trust_remote_code

    def load(device: torch.device) -> Any:
        model = load_causal_lm(path, device=device, dtype=dtype, trust_remote_code=trust)
        if lora is not None:
            decoder = Decoder.of(model)
            adapter = Adapter.make(decoder, lora, seed=0, device=device, base=path)
            adapter.refuse_other_model(model, decoder.named_tensors().items())
            add_to_weights(model, adapter.named_tensors(), gain=lora.gain)
        return model

    unread: Stored | None = None
    if rollout.engine == "native":
        model = load(device)
    else:
        model = outline_causal_lm(path, dtype=dtype, trust_remote_code=trust)
        try:
            if lora is not None:
                raise WholeOnly("an adapter is added to the weights")
            unread = open_unread(path, model)
        except WholeOnly:  # the whole model is in this process until vLLM has it
            model = load(torch.device("cpu"))
    engine = build_engine(rollout, model, tokenizer, device=device)
    if unread is not None:
        assert isinstance(engine, VllmEngine)
        try:
            engine.load_weights(0, each_tensor(model, unread, path=path))
        except BaseException:
            engine.close()
            raise
    elif rollout.engine == "vllm":
        model.to("meta")
    stops = stop_token_ids(tokenizer, model.config, model.generation_config, rollout=rollout)
    return Sampler(model=model, engine=engine, stop_token_ids=stops)


def judges_of(rewards: Sequence[Reward]) -> Sequence[Reward]:
    """Return the rewards that an evaluation uses to judge answers. If all of them are reward models, use an exact match with the
    answer."""
    judges = [reward for reward in rewards if reward.type != "self_certainty"]
    return [ExactReward()] if all(reward.type == "model" for reward in judges) else judges


def build_scorers(
    rewards: Sequence[Reward],
    *,
    score: ScoreSamples,
    models: Mapping[int, ModelRewardFunction],
    owned: ExitStack,
    num_workers: int = NUM_REWARD_WORKERS,
) -> tuple[Scorer, Scorer]:
    """Build the scorers for training and for evaluation. They are the same unless all rewards come from models (``judges_of``). ``score``
    is the policy's scoring function; ``models`` maps a reward model's position in the run file to its function. The scorers are closed
    together with ``owned``."""
    own = {index: partial(_self_certainty, score) for index, one in enumerate(rewards) if one.type == "self_certainty"}
    functions: dict[int, ModelRewardFunction] = {**models, **own}
    scorer = owned.enter_context(Scorer(rewards, num_workers=num_workers, model_rewards=functions))
    if len(functions) < len(rewards):
        return scorer, scorer
    return scorer, owned.enter_context(Scorer(judges_of(rewards), num_workers=num_workers, model_rewards={}))


def build_environments(
    section: EnvironmentSection | None,
    tokenizer: Any,
    *sets: PromptSet | None,
    make: Callable[[str | None], Environments] | None = None,
) -> Environments | None:
    """Start the environment in child processes, or call ``make`` with the chat template to start it. Refuses a template that cannot be
    extended turn by turn."""
    if section is None:
        return None
    from rollcall.environments.host import make_environments  # imported here, because few runs have an environment

    say("starting the environment")
    rows = [prompt.metadata for prompts in sets if prompts is not None for prompt in prompts.prompts]
    chats = {str(row.get(KIND) or "") for row in rows if MESSAGES in row}
    # A tokenizer may have a template that plain prompts do not use.
    template = tokenizer.chat_template if chats else None
    environments = make_environments(section, chat_template=template) if make is None else make(template)
    try:
        for kind in {str(row.get(KIND) or "") for row in rows}:
            tools = environments.tools_of(kind)  # raises if environment.path lacks this name
            if kind in chats:
                Conversations(tokenizer).check_extension(tools=tools, role="tool" if tools else "user")
    except BaseException:
        asyncio.run(environments.aclose())
        raise
    return environments


def _self_certainty(score: ScoreSamples, prompt: Prompt, completions: tuple[Completion, ...]) -> list[float]:
    """Return each attempt's mean certainty, over the sampled tokens of all its rows."""
    samples = [
        Sample.of(row, draw=0, attempt=attempt, prompt_ids=prompt.token_ids)
        for attempt, completion in enumerate(completions)
        for row in rows_of(completion)
    ]
    sampled: list[list[Floats]] = [[] for _ in completions]
    for sample, row in zip(samples, score(samples), strict=True):
        sampled[sample.attempt].append(row.certainty[sample.mask])
    return [float(np.concatenate(parts).mean()) for parts in sampled]
