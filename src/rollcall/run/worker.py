"""A process of a run. On a cluster, it has the roles of its slots and does what the controller asks. A run in one process has one such
worker, with all roles, in the controller's process.

Roles in one process share the policy: the engine and the learner read the same parameters. A process with a rollout role but no actor has
its own copy of the policy, which gets new weights after every update. If vLLM samples in it, only vLLM has the policy, and this process
passes each arriving tensor on.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers.utils import logging as transformers_logging

from rollcall.base.errors import short_of_memory
from rollcall.base.types import Completion, Floats, Prompt, Sample
from rollcall.base.wait import say
from rollcall.checkpoint.saving import Trained
from rollcall.checkpoint.training import in_modules, num_parts
from rollcall.config import Config, Ppo
from rollcall.engine.protocol import Request
from rollcall.engine.ticker import Exchanged, exchange
from rollcall.engine.vllm.engine import VllmEngine
from rollcall.engine.weights.layout import Parts, SentBlock
from rollcall.engine.weights.parts import PartsReceiver
from rollcall.engine.weights.protocol import Invitation
from rollcall.engine.weights.transports import open_receiver
from rollcall.learner.gang import Gang
from rollcall.learner.layout import Block, module_shapes
from rollcall.learner.learner import Body, Critic, Reference, TokenScores, make_body, score_samples, whole_body
from rollcall.model.files import resolve_model
from rollcall.model.load import WholeOnly, load_causal_lm, open_unread, outline_causal_lm, resolve_device, resolve_dtype
from rollcall.model.stored.tensors import Stored
from rollcall.model.tokenizers import stop_token_ids, tokenizer_mark
from rollcall.nodes.address import own_address
from rollcall.nodes.door import listen_at
from rollcall.nodes.interfaces import interface_of
from rollcall.nodes.meeting import Place
from rollcall.plan.placement import Role
from rollcall.process.groups.reachable import About, be_reachable
from rollcall.reward.model import load_reward_models
from rollcall.run.build import LocalEngine, build_adapter, build_engine, build_learner, set_threads, tokenizer_of
from rollcall.run.card import settle
from rollcall.run.origin import base_of
from rollcall.run.weight_sync import WorkerWeights

POLICY = (Role.ACTOR, Role.INFERENCE)  # roles that need the policy's weights; an engine may have its own copy
# What the controller waits for when it calls a method; {0} is the call's first argument.
PURPOSES = {
    "build": "to load its model",
    "listen": "to listen for the other processes",
    "exchange": "to sample completions",
    "invite": "to invite the processes that get new weights",
    "send_weights": "to send version {0} of the weights",
    "use_weights": "to receive version {0} of the weights",
    "update": "to update the policy",
    "update_critic": "to update the critic",
    "score": "to score samples",
    "score_reference": "to score samples with the reference",
    "values": "to compute the values of samples",
    "reward": "to score completions",
    "export": "to write the model",
    "base": "to read the identity of its model",
    "copy_parts": "to copy its part of a checkpoint",
    "write_parts": "to start writing its part of a checkpoint",
    "parts_written": "to write its part of a checkpoint",
    "parts_here": "to look for its parts of a checkpoint",
    "bring_parts": "to verify its parts of a checkpoint",
    "tidy_parts": "to remove its parts of old checkpoints",
    "read_checkpoint": "to read a checkpoint",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """What the controller needs to know about the model, which only the workers load."""

    max_positions: int
    stop_token_ids: tuple[int, ...]
    tokenizer: str  # its fingerprint


def _syncing(why: str) -> str:
    return (
        f"there is no memory left to send new weights to the engines ({why}); sending copies one tensor at a time. Lower "
        "actor.tokens_per_microbatch or rollout.kv_memory_fraction; with rollout.weights=shared_memory, the node's /dev/shm needs room for a "
        "full copy"
    )


class RoleWorker(Trained):
    """A process with some of a run's roles. For roles ``in_parts``, each process has a part of the model, and all run every forward
    pass together."""

    def __init__(
        self, config: Config, model_path: str, *, in_parts: frozenset[Role] = frozenset(), tokenizer: Any = None
    ) -> None:
        if model_path.startswith("builtin:"):
            model_path = resolve_model(model_path)
        tokenizer = tokenizer_of(config, model_path) if tokenizer is None else tokenizer
        super().__init__(tokenizer=tokenizer, learner=None, critic=None)
        self.config = config
        self.model_path = model_path
        self._in_parts = in_parts
        self.device = resolve_device(config.model.device)
        self.dtype = resolve_dtype(config.model.dtype, self.device)
        self.trust = config.model.trust_remote_code
        self.reference: Reference | None = None
        self._listener: socket.socket | None = None
        self.engine: LocalEngine | None = None
        self._served: int | None = None  # the engine's version, once it is complete
        self._sent_blocks: list[tuple[str, Block]] | None = None
        # If only vLLM has the weights, each actor sends its own parts, and the tensors are assembled in host memory on their way. An
        # adapter is small and is sent whole.
        self._by_parts = not config.rollout.keeps_policy and config.model.lora is None
        self._weights = WorkerWeights(
            config.rollout.weights,
            folder=config.run.dir.resolve() / "weights",
            on_gpu=self.device.type == "cuda" and not self._by_parts,
        )

    def listen(self, address: str) -> int:
        """Open the port where the gang's other ranks connect to this process, which is rank 0. Returns the port."""
        self._listener = listen_at(address)
        return self._listener.getsockname()[1]

    def build(self, ranks: Mapping[Role, int], meeting: Mapping[Role, tuple[Place, int]]) -> Facts:
        """Load what this process needs for its roles on a cluster. ``ranks`` contains its rank in each role. For each role whose
        processes work together, ``meeting`` contains the address of rank 0 and the number of processes."""
        transformers_logging.disable_progress_bar()  # otherwise every process would show a progress bar
        set_threads(self.config.trainer.num_threads, processes_here=int(os.environ["LOCAL_WORLD_SIZE"]))
        title = " + ".join(f"{role} {rank}" for role, rank in ranks.items())
        be_reachable(About(title=title, roles=tuple(map(str, ranks)), run=str(self.config.run.dir.resolve())))
        self.load(set(ranks), gang=self._join(ranks, meeting))
        return Facts(
            max_positions=self.model.config.max_position_embeddings,
            stop_token_ids=self.stop_token_ids,
            tokenizer=tokenizer_mark(self.tokenizer),
        )

    def load(self, roles: AbstractSet[Role], *, gang: Gang, is_alone: bool = False, graphs: bool = True) -> None:
        """Load what these roles need. With ``is_alone`` nobody calls ``send_weights``, so the learner updates the engine's model. Without
        ``graphs``, the native engine captures no CUDA graphs."""
        samples = Role.ROLLOUT in roles and self.config.rollout.keeps_policy
        unread = None
        if samples or not roles.isdisjoint(POLICY):
            # If the model is in parts, only this process's parts go to the device, unless its engine reads the full model.
            in_parts = Role.ACTOR in roles and Role.ACTOR in self._in_parts
            model, unread = self._load(gang, Role.ACTOR, in_parts=in_parts, whole=samples)
        else:
            model = self._outline()
        self.stop_token_ids = stop_token_ids(  # before anything else is loaded, because the run file's ids may be wrong
            self.tokenizer, model.config, model.generation_config, rollout=self.config.rollout
        )
        # The adapter is small, so every process that has the policy has all of it.
        has_policy = Role.ROLLOUT in roles or not roles.isdisjoint(POLICY)
        self.adapter = build_adapter(self.config, model, device=self.device) if has_policy else None
        if Role.ACTOR in roles:
            self.learner = build_learner(
                self.config, model, gang=gang, device=self.device, mirror=is_alone, unread=unread, adapter=self.adapter
            )
            if self.learner.body.in_parts and not (samples or is_alone):
                model.to("meta")
        if Role.CRITIC in roles:
            critic, unread = self._load(gang, Role.CRITIC, in_parts=Role.CRITIC in self._in_parts)
            section, algorithm = self.config.critic, self.config.algorithm
            assert isinstance(algorithm, Ppo)
            self.critic = Critic(
                critic,
                section,
                algorithm=algorithm,
                total_updates=self.config.trainer.steps * section.minibatches * section.epochs,
                gang=gang,
                device=self.device,
                unread=unread,
            )
        if Role.REFERENCE in roles:
            self.reference = self._build_reference(gang)
        rewards = self.config.reward if Role.REWARD in roles else ()
        self.reward_models = load_reward_models(rewards, device=self.device, trust_remote_code=self.trust)
        # By now everything that stays for the whole run is loaded; the engine gets the remaining memory.
        learners = [each for each in (self.learner, self.critic) if each is not None]
        kv_tokens = settle(self.config, model, learners=learners, samples=Role.ROLLOUT in roles)
        if Role.ROLLOUT in roles:
            self.engine = build_engine(
                self.config.rollout,
                model,
                self.tokenizer,
                graphs=graphs,
                device=self.device,
                adapter=self.adapter,
                kv_tokens=kv_tokens,
            )
        # True if a process in the gang has an engine but only a part of the model: its engine then needs the gathered model.
        self._gathers = (
            self.learner is not None and self.learner.body.in_parts and any(gang.gather(self.engine is not None))
        )
        self.model = model
        context = self.config.actor.context_parallel_size if Role.INFERENCE in roles else 1
        self.body = (
            self.learner.body if self.learner else whole_body(model, gang=gang, context=context, adapter=self.adapter)
        )

    def _build_reference(self, gang: Gang) -> Reference:
        """Build the frozen model, sharded like the actor. If the learner trains an adapter, it already contains the frozen model, which
        is then not loaded again."""
        learner, section, in_parts = self.learner, self.config.actor, Role.REFERENCE in self._in_parts
        plain = learner is not None and learner.adapter is not None
        plain = plain and (gang.size == 1 or learner.body.in_parts == in_parts)
        if plain:
            body = learner.body
        else:
            frozen, unread = self._load(gang, Role.REFERENCE, in_parts=in_parts)
            if in_parts:
                body = make_body(frozen, section, gang=gang, device=self.device, frozen=True, unread=unread)
            else:
                body = whole_body(frozen, gang=gang, context=section.context_parallel_size)
        return Reference(body=body, section=section, temperature=self.config.rollout.temperature, plain=plain)

    def _load(self, gang: Gang, role: Role, *, in_parts: bool, whole: bool = False) -> tuple[Any, Stored | None]:
        """Load the model for ``role``. If the model is split over the gang (``in_parts``), load only its outline and the location of its
        weights, because each process later reads its own part. If the files do not allow that, the first process of the gang loads the
        model and sends the others their parts. ``whole`` means that something in this process needs the full model."""
        outline = self._outline() if in_parts and not whole else None
        unread, why = None, None
        if outline is not None:
            try:
                unread = open_unread(self.model_path, outline, fetch=True, compares_head=gang.rank == 0)
            except WholeOnly as error:
                why = str(error)
        # All members of the gang reach this line, because a role's model is split for all of them or for none.
        reasons = [reason for reason in gang.gather(why) if reason is not None] if in_parts else []
        if reasons and gang.rank == 0:
            say(
                f"the first {role} process loads the full model, because its weights cannot be read in parts: {reasons[0]}"
            )
        if outline is not None and (not reasons or gang.rank != 0):
            return outline, None if reasons else unread
        device = torch.device("cpu") if outline is not None else self.device
        return load_causal_lm(self.model_path, device=device, dtype=self.dtype, trust_remote_code=self.trust), None

    def _outline(self) -> Any:
        return outline_causal_lm(self.model_path, dtype=self.dtype, trust_remote_code=self.trust)

    def _join(self, ranks: Mapping[Role, int], meeting: Mapping[Role, tuple[Place, int]]) -> Gang:
        # Roles in the same processes form one gang.
        role = next((role for role in meeting if role in ranks), None)
        if role is None:
            return Gang.alone()
        place, size = meeting[role]
        return Gang.join(
            place,
            rank=ranks[role],
            size=size,
            device=self.device,
            listener=self._listener,
            interface=interface_of(own_address(toward=place.address, node_ip=None, interface=None)),
        )

    # The engine

    def exchange(
        self, new: Sequence[Request], cancelled: Sequence[str], ended_sessions: Sequence[str], look_s: float
    ) -> Exchanged:
        """Accept requests, decode for up to ``look_s`` seconds, and return what has finished."""
        assert self.engine is not None
        return exchange(self.engine, new, cancelled, ended_sessions, look_s=look_s)

    @short_of_memory(_syncing)
    def use_weights(self, version: int, name: str, invitations: Sequence[Invitation]) -> None:
        """Receive this version from the actor's processes, which invited this process as ``name``, and sample from it."""
        if version != self._served:
            self._note_change()
        if self._by_parts:  # assembled in host memory, one tensor at a time
            wanted = module_shapes(self.body.layout(weight) for weight in self.body.named)
            make = partial(PartsReceiver, invitations, name=name, wanted=wanted, device=torch.device("cpu"))
            self._weights.receiver(invitations, make).receive(partial(self._take, version), version=version)
        else:
            make = partial(open_receiver, invitations[0], name=name, tensors=self.body.named)
            self._weights.receiver(invitations, make).receive(version=version)
        self._serve(version)

    def _note_change(self) -> None:
        """Tell the engine that its parameters are about to change. The controller sends the engine no requests until the new version is
        complete."""
        self._served = None
        if self.engine is not None:
            self.engine.settle()

    @torch.no_grad()
    def _take(self, version: int, tensors: Iterator[tuple[str, Tensor]]) -> None:
        """Load new weights one by one, into this process's policy or into the engine if it has the only copy."""
        if self._hands_on:
            assert isinstance(self.engine, VllmEngine), "only vLLM keeps its own weights"
            if version != self._served:
                self.engine.load_weights(version, tensors)
            return
        parameters = dict(self.model.named_parameters())
        for name, tensor in tensors:
            parameters[name].copy_(tensor)

    def _serve(self, version: int) -> None:
        """Let the engine use this version, whose parameters are now complete. An engine that already uses this version keeps its
        cache."""
        if self.engine is not None and version != self._served:
            if not self._hands_on:
                self.engine.update_weights(version)
            self._served = version

    @property
    def _hands_on(self) -> bool:
        """Whether the only copy of the policy in this process is the engine's."""
        return self.engine is not None and self.adapter is None and next(self.model.parameters()).is_meta

    # The policy

    def base(self) -> dict[str, Any]:
        return {} if self.learner is None else base_of(self.learner, self.tokenizer)

    def invite(self, receivers: Mapping[str, bool], host: str) -> Mapping[str, Invitation]:
        """Open a sender if this process sends weights. Each value in ``receivers`` says whether the receiver is on this node."""
        assert self.learner is not None
        rank, body = self.learner.gang.rank, self.learner.body
        sends = rank == 0 or (self._by_parts and body.in_parts and rank < num_parts(body))
        return self._weights.invite(receivers if sends else {}, host, name=f"actor rank {rank}")

    @short_of_memory(_syncing)
    def send_weights(self, version: int) -> None:
        """Send the learner's weights, as this version, to the invited receivers and to the engine in this process."""
        if self._by_parts:
            # Gather first, because the whole gang takes part in it. If a receiver is lost, only the sending below fails.
            if self._gathers:
                self._pass_on(version)
            if self._weights.sender is not None:
                self._weights.send(self._own_parts(), version=version)
        else:
            self._weights.send(self._whole_policy(), version=version)
        self._serve(version)

    def _pass_on(self, version: int) -> None:
        """Gather full weights, one at a time, for the engines in the learner's processes."""
        assert self.learner is not None
        weights = iter(in_modules(self.learner.body).values)
        try:
            if self.engine is not None:
                self._take(version, weights)
        finally:
            for _ in weights:  # other processes need this one's parts of the remaining weights
                continue

    def _own_parts(self) -> Parts:
        """Return the part of the policy that this process sends."""
        assert self.learner is not None
        body, named = self.learner.body, self.learner.body.named
        if self._sent_blocks is None:
            self._sent_blocks = [(name, block) for name in named for block in body.layout(name).blocks(own=True)]
        sent = [
            SentBlock(
                name=block.name, start=block.start, whole=block.whole, dtype=body.dtype, values=block.of(named[name])
            )
            for name, block in self._sent_blocks
        ]
        return Parts(sent, device=body.device)

    def _whole_policy(self) -> Iterator[tuple[str, Tensor]]:
        """Yield all trained weights. If the learner only has parts, also copy them to the engine's model in this process."""
        assert self.learner is not None
        in_parts = self.learner.body.in_parts
        own = whole_body(self.model, adapter=self.adapter).named if in_parts and self.engine is not None else {}
        for name, tensor in self.learner.body.whole_tensors():
            if name in own:
                own[name].copy_(tensor)
            yield name, tensor

    def update(self, samples: Sequence[Sample]) -> tuple[dict[str, float], int]:
        """Run one step with the gang. Returns its metrics and the number of tokens trained so far."""
        assert self.learner is not None
        self._note_change()
        return self.learner.update(samples), self.learner.num_tokens_trained

    def score(self, samples: Sequence[Sample]) -> list[TokenScores]:
        scores = score_samples(self.body, samples, self.config.actor, temperature=self.config.rollout.temperature)
        return self._once(scores, self.body)

    def _once(self, results: list[Any], body: Body) -> list[Any]:
        """Return the results from one process only, because processes that run every forward pass together all have them."""
        return results if not body.together or body.gang.rank == 0 else []

    # The other roles

    def score_reference(self, samples: Sequence[Sample]) -> list[TokenScores]:
        assert self.reference is not None
        return self._once(self.reference(samples), self.reference.body)

    def values(self, samples: Sequence[Sample]) -> list[Floats]:
        assert self.critic is not None
        return self._once(self.critic.values(samples), self.critic.body)

    def update_critic(self, samples: Sequence[Sample]) -> dict[str, float]:
        assert self.critic is not None
        return self.critic.update(samples)

    def reward(self, index: int, prompt: Prompt, completions: tuple[Completion, ...]) -> list[float]:
        return list(self.reward_models[index](prompt, completions))
