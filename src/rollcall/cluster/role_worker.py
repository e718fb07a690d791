"""One process of a run on the cluster: it holds the roles that its slots were given, and does what the controller asks.

Roles that share a process share the policy: engine and learner read the same parameters. A process with a rollout but no
actor has a policy of its own, which takes new weights after every update.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from rollcall.checkpoint.export import export_model
from rollcall.checkpoint.training import copy_into, read_critic, read_learner, write_critic, write_learner
from rollcall.cluster.actor import lease_port
from rollcall.cluster.local import build_critic, build_engine, build_learner, build_reference, load_reward_model
from rollcall.cluster.placement import Role
from rollcall.config import Config, ModelReward
from rollcall.decoder import Decoder
from rollcall.engine.protocol import Finished, Request
from rollcall.learner.gang import Gang
from rollcall.learner.learner import TokenScores, score_samples
from rollcall.learner.model import load_causal_lm, load_tokenizer, resolve_device, resolve_dtype, stop_token_ids
from rollcall.types import Completion, Floats, Prompt, Sample

LOOK_S = 0.2  # an engine with nothing finished answers after this long, so that new requests reach it
TRAINED = (Role.ACTOR, Role.CRITIC)


@dataclass(frozen=True, slots=True, kw_only=True)
class Seating:
    """A process's rank in each of its roles, and where the gangs it belongs to meet."""

    ranks: Mapping[Role, int]
    sizes: Mapping[Role, int]  # processes of each role
    meeting: Mapping[Role, tuple[str, int]]  # address and port of rank 0, for roles that train


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """What the controller must know of a model that only workers have loaded."""

    max_positions: int
    stop_token_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """What an engine did since it was last asked."""

    finished: list[Finished]
    num_preemptions: int


class RoleWorker:
    def __init__(self, config: Config, model_path: str) -> None:
        self.config = config
        self.model_path = model_path
        local_size = int(os.environ["LOCAL_WORLD_SIZE"])
        torch.set_num_threads(config.trainer.num_threads or max(1, (os.cpu_count() or 1) // local_size))
        self.device = resolve_device(config.model.device)
        self.dtype = resolve_dtype(config.model.dtype, self.device)
        self.tokenizer = load_tokenizer(model_path, chat_template=config.model.chat_template)
        self._lease: socket.socket | None = None
        self._preemptions_seen = 0

    def lease_port(self) -> int:
        """A port for the gang that this process is rank 0 of, held until the process ends."""
        self._lease = lease_port()
        return self._lease.getsockname()[1]

    def build(self, seating: Seating) -> Facts:
        """Load what this process's roles need."""
        roles = set(seating.ranks)
        load = partial(load_causal_lm, self.model_path, device=self.device, dtype=self.dtype)
        model = load()
        gang = self._join(seating)
        self.learner = build_learner(self.config, model, gang=gang) if Role.ACTOR in roles else None
        self.engine = build_engine(self.config.rollout, model, self.tokenizer) if Role.ROLLOUT in roles else None
        self.critic = build_critic(self.config, load(), gang=gang) if Role.CRITIC in roles else None
        self.reference = build_reference(self.config, load()) if Role.REFERENCE in roles else None
        self.reward_models = {
            index: load_reward_model(reward, device=self.device)
            for index, reward in enumerate(self.config.reward)
            if Role.REWARD in roles and isinstance(reward, ModelReward)
        }
        self.model = model
        self.decoder = self.learner.decoder if self.learner else Decoder.of(model)
        return Facts(
            max_positions=model.config.max_position_embeddings,
            stop_token_ids=stop_token_ids(self.tokenizer, model.config, model.generation_config),
        )

    def _join(self, seating: Seating) -> Gang:
        trained = [role for role in TRAINED if role in seating.ranks]
        if not trained:
            return Gang.alone()
        role = trained[0]  # collocated actor and critic sit in the same processes, and make one gang
        address, port = seating.meeting[role]
        return Gang.join(
            address=address, port=port, rank=seating.ranks[role], size=seating.sizes[role], device=self.device
        )

    # The engine

    def advance(self, requests: Sequence[Request], aborted: Sequence[str]) -> Progress:
        """Take requests in, and decode until one is finished or a moment has passed."""
        assert self.engine is not None
        for request in requests:
            self.engine.submit(request)
        for request_id in aborted:
            self.engine.abort(request_id)
        until = time.monotonic() + LOOK_S
        finished: list[Finished] = []
        while self.engine.num_unfinished and not finished and time.monotonic() < until:
            finished = self.engine.poll()
        new = self.engine.num_preemptions - self._preemptions_seen
        self._preemptions_seen += new
        return Progress(finished=finished, num_preemptions=new)

    def use_weights(self, version: int, weights: Mapping[str, Tensor] | None) -> None:
        """Sample from this version on; ``weights`` is None where the actor's own parameters are read."""
        if weights is not None:
            copy_into(self._parameters(), weights)
        if self.engine is not None:
            self.engine.update_weights(version)

    # The policy

    def weights(self) -> dict[str, Tensor]:
        return {name: parameter.detach().cpu().contiguous() for name, parameter in self._parameters().items()}

    def update(self, samples: Sequence[Sample]) -> tuple[dict[str, float], int]:
        """One step of the gang; its metrics and the tokens trained so far."""
        assert self.learner is not None
        return self.learner.update(samples), self.learner.num_tokens_trained

    def score(self, samples: Sequence[Sample]) -> list[TokenScores]:
        return score_samples(
            self.decoder,
            samples,
            temperature=self.config.rollout.temperature,
            tokens_per_microbatch=self.config.actor.tokens_per_microbatch,
        )

    def export(self, directory: Path) -> None:
        export_model(self.model, self.tokenizer, directory, dtype=None)

    # The others

    def score_reference(self, samples: Sequence[Sample]) -> list[TokenScores]:
        assert self.reference is not None
        return self.reference(samples)

    def values(self, samples: Sequence[Sample]) -> list[Floats]:
        assert self.critic is not None
        return self.critic.values(samples)

    def update_critic(self, samples: Sequence[Sample]) -> dict[str, float]:
        assert self.critic is not None
        return self.critic.update(samples)

    def reward(self, index: int, prompt: Prompt, completions: tuple[Completion, ...]) -> list[float]:
        return list(self.reward_models[index](prompt, completions))

    # Checkpoints: rank 0 of a role writes, everyone reads

    def write_checkpoint(self, role: Role, directory: Path) -> None:
        if role is Role.ACTOR:
            assert self.learner is not None
            write_learner(self.learner, self.tokenizer, directory)
        else:
            assert self.critic is not None
            write_critic(self.critic, directory)

    def read_checkpoint(self, directory: Path) -> None:
        if self.learner is not None:
            read_learner(self.learner, directory)
        if self.critic is not None:
            read_critic(self.critic, directory)

    def _parameters(self) -> dict[str, Tensor]:
        return dict(self.model.named_parameters())
