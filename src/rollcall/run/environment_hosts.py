"""The environment role: one process on each node that has slots for it. These processes form a separate worker group.

If such a process is lost, the group with the models continues. The other processes replay the lost process's episodes
(environments/hosted.py), and a new process takes its place.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from rollcall.base.errors import ConfigError
from rollcall.config import EnvironmentSection, TrainerSection
from rollcall.environments.agent import AgentEnvironments
from rollcall.environments.endpoint import refuse_without_packages
from rollcall.environments.host import Driven, EnvironmentHost, HostPlace, make_here
from rollcall.environments.hosted import HostedEnvironments
from rollcall.environments.protocol import Environments
from rollcall.nodes.address import is_own, own_address
from rollcall.nodes.door import new_secret
from rollcall.plan.placement import Role
from rollcall.process.groups.group import WorkerBuilder, WorkerGroup
from rollcall.process.groups.reachable import About, be_reachable
from rollcall.run.team import Site, Spares

WAIT_S = 360.0  # how long to wait if no process is left; a taskset's server has 300 s to start


class EnvironmentWorker:
    """The environment process on a node."""

    def __init__(self, section: EnvironmentSection, *, chat_template: str | None, folder: str, run_dir: str) -> None:
        self._section = section
        self._chat_template = chat_template
        self._run_dir = run_dir
        if Path(folder).is_dir():  # where the run was started; a job's process already runs in its own folder
            os.chdir(folder)

    def listen(self, address: str, rank: int, name: str, secret: str) -> HostPlace | str:
        """Return the address that the process listens on, or the reason why the environment cannot start."""
        be_reachable(About(title=f"{Role.ENVIRONMENT} {rank}", roles=(str(Role.ENVIRONMENT),), run=self._run_dir))
        try:
            host = EnvironmentHost(make_here(self._section, chat_template=self._chat_template))
        except ConfigError as error:
            return str(error)
        return host.listen(address, name=name, secret=secret)


class EnvironmentHosts:
    """The environment processes, as seen from the controller."""

    group: WorkerGroup
    spares: Spares

    def __init__(self, section: EnvironmentSection, *, site: Site, trainer: TrainerSection, run_dir: Path) -> None:
        self._section = section
        self._site = site
        self._trainer = trainer
        self._run_dir = run_dir
        self._secret = new_secret()

    def start(self, chat_template: str | None) -> Environments:
        section, elastic = self._section, self._trainer.elastic
        if isinstance(section, Driven):
            refuse_without_packages()
        worker, run_dir = f"{__name__}.EnvironmentWorker", str(self._run_dir.resolve())
        self.group = self._site.start(
            WorkerBuilder(worker, section, chat_template=chat_template, folder=os.getcwd(), run_dir=run_dir),
            self._site.plan.environments,
            name=str(Role.ENVIRONMENT),
            purposes={"listen": "to start the environment"},
            env={name: os.environ[name] for name in section.env if name in os.environ},
            takes_slots=False,
        )
        self.spares = Spares(self.group, self._trainer, role=Role.ENVIRONMENT)
        places = self._listen(range(self.group.world_size))
        for place in places[1:]:
            if place.tools != places[0].tools:
                raise ConfigError(
                    f"the environment has different tools on {place.name} and {places[0].name}; install the same version of its module "
                    "on both"
                )
        hosted = HostedEnvironments(
            places,
            renew=lambda rank: self.spares.replace(rank, lambda: self._listen([rank])[0]),
            wait_s=elastic.wait_s if elastic else WAIT_S,
        )
        if not isinstance(section, Driven):
            return hosted
        routed = own_address(toward=places[0].address, node_ip=None, interface=None)
        known = [node.address for node in self._site.cluster.nodes if node.address and is_own(node.address)]
        # If this node has no slots in the cluster, its address on the route to the hosts is used.
        address = routed if routed in known or not known else known[0]
        return AgentEnvironments(section, programs=hosted, address=address)

    def _listen(self, ranks: Sequence[int]) -> list[HostPlace]:
        """Start these ranks' environments in parallel, because each may take a long time to start."""
        specs = [self.group.specs[rank] for rank in ranks]
        listen = partial(self.group.run_single_worker_single_data, "listen")
        answers: list[HostPlace | str] = self.group.get_all_worker_results(
            [listen(spec.rank, spec.node.address, spec.rank, spec.where, self._secret) for spec in specs]
        )
        for spec, answer in zip(specs, answers, strict=True):
            if isinstance(answer, str):
                raise ConfigError(f"node {spec.node.node_rank}: {answer}")
        return [answer for answer in answers if not isinstance(answer, str)]
