"""The environment role: a process on each node of its slots, in a group beside the one that holds the models.

The group of the models goes on when such a process is lost: the episodes that it was playing are played again elsewhere
(environments/hosted.py), and a new process is made in its place, as often as restarts are allowed.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path

from rollcall.config import ClusterSection, Config, EnvironmentBase, EnvironmentSection
from rollcall.config.environments import StepEnvironment
from rollcall.environments.agent import AgentEnvironments
from rollcall.environments.endpoint import refuse_without_packages
from rollcall.environments.host import EnvironmentHost, HostPlace
from rollcall.environments.hosted import HostedEnvironments
from rollcall.environments.make import Driven, make_here
from rollcall.environments.protocol import Environments
from rollcall.errors import ConfigError, WorkerDiedError, WorkerLostError
from rollcall.groups.backend import Seat
from rollcall.groups.cluster import VirtualCluster
from rollcall.groups.group import WorkerBuilder, WorkerGroup
from rollcall.groups.reachable import About, be_reachable
from rollcall.loop.attempts import Budget, headline
from rollcall.net.door import new_secret
from rollcall.nodes.address import is_own, own_address
from rollcall.plan.placement import Plan, Role
from rollcall.wait import warn
from rollcall.worker_env.declared import submitted_env, worker_env

PURPOSES = {"listen": "to start the environment"}
REPLACE_S = 24 * 3600.0  # until a lost node is back, while the others play
WAIT_S = 360.0  # with none left; a server of a taskset has 300 to start


class EnvironmentWorker:
    """The process on a node."""

    def __init__(self, section: EnvironmentSection, *, chat_template: str | None, folder: str, run_dir: str) -> None:
        self._section = section
        self._chat_template = chat_template
        self._run_dir = run_dir
        if Path(folder).is_dir():  # where the run was started; a job's own folder is where this process is already
            os.chdir(folder)

    def listen(self, address: str, rank: int, name: str, secret: str) -> HostPlace | str:
        """Where it listens; a text: why what the section names cannot be used."""
        be_reachable(About(title=f"{Role.ENVIRONMENT} {rank}", roles=(str(Role.ENVIRONMENT),), run=self._run_dir))
        try:
            host = EnvironmentHost(make_here(self._section, chat_template=self._chat_template))
        except ConfigError as error:
            return str(error)
        return host.listen(address, name=name, secret=secret)


class EnvironmentHosts:
    """Those processes, as the controller has them."""

    def __init__(self, config: Config, group: WorkerGroup) -> None:
        self.group = group
        self._secret = new_secret()
        self._budget = Budget(most=config.trainer.max_restarts, window_s=config.trainer.restart_window_s)
        self._one = threading.Lock()
        self._is_closed = False

    def listen(self) -> list[HostPlace]:
        places = self._open(range(self.group.world_size))
        for place in places[1:]:
            if place.tools != places[0].tools:
                raise ConfigError(
                    f"the environment has other tools on {place.name} than on {places[0].name}; give both the same version of its "
                    "module"
                )
        return places

    def renew(self, rank: int) -> HostPlace:
        """A new process in the seat of a lost one; waits for its node."""
        where = self.group.specs[rank].where
        loss: WorkerLostError = WorkerDiedError(
            f"{where} is lost", role=str(Role.ENVIRONMENT), ranks=[rank], node_ranks=[]
        )
        while True:
            with self._one:
                self._budget.spend(loss)
            try:
                self.group.replace(rank, timeout_s=REPLACE_S)
                return self._open([rank])[0]
            except WorkerLostError as error:
                if self._is_closed:
                    raise
                loss = error
                warn(f"{where} is lost; the others play its episodes until it is replaced: {headline(loss)}")

    def close(self) -> None:
        """The group is about to be shut down."""
        self._is_closed = True

    def _open(self, ranks: Sequence[int]) -> list[HostPlace]:
        """All at once: starting what the section names may take long."""
        specs = [self.group.specs[rank] for rank in ranks]
        found: list[HostPlace | str] = self.group.get_all_worker_results(
            [
                self.group.run_single_worker_single_data(
                    "listen", spec.rank, spec.node.address, spec.rank, spec.where, self._secret
                )
                for spec in specs
            ]
        )
        if failed := next(((spec, one) for spec, one in zip(specs, found, strict=True) if isinstance(one, str)), None):
            raise ConfigError(f"node {failed[0].node.node_rank}: {failed[1]}")
        return [one for one in found if not isinstance(one, str)]


def start_hosts(
    config: Config,
    plan: Plan,
    cluster: VirtualCluster,
    *,
    section: ClusterSection,
    kept: Sequence[int],
    chat_template: str | None,
) -> tuple[EnvironmentHosts, Environments]:
    """On the nodes with the ``kept`` ranks, which the plan numbers from 0."""
    environment = config.environment
    assert environment is not None, "a placement without one is refused"
    if isinstance(environment, Driven):
        refuse_without_packages()
    starts = [sum(plan.slots_per_node[:rank]) for rank in range(plan.num_nodes)]
    variables = _variables(environment, section, num_nodes=plan.num_nodes)
    nodes = [process.node_rank for process in plan.environments]
    group = WorkerGroup(
        cluster=cluster,
        remote_worker_builder=WorkerBuilder(
            "rollcall.roles.environment_hosts.EnvironmentWorker",
            environment,
            chat_template=chat_template,
            folder=os.getcwd(),
            run_dir=str(config.run.dir.resolve()),
        ),
        name_prefix=str(Role.ENVIRONMENT),
        seats=[
            Seat(node_rank=kept[process.node_rank], slots=(process.slots[0] - starts[process.node_rank],))
            for process in plan.environments
        ],
        titles=list(map(str, plan.environments)),
        purposes=PURPOSES,
        node_env_vars={kept[rank]: variables[rank] for rank in nodes},
        takes_slots=False,
    )
    hosts = EnvironmentHosts(config, group)
    elastic = config.trainer.elastic
    places = hosts.listen()
    hosted = HostedEnvironments(
        places,
        renew=hosts.renew,
        needs_ids=isinstance(environment, StepEnvironment),
        wait_s=elastic.wait_s if elastic else WAIT_S,
    )
    if not isinstance(environment, Driven):
        return hosts, hosted
    address = _endpoint_address(cluster, toward=places[0].address)
    return hosts, AgentEnvironments(environment, chat_template=chat_template, programs=hosted, address=address)


def _endpoint_address(cluster: VirtualCluster, *, toward: str) -> str:
    """This node's, as its cluster knows it; where it has no slots, the one from which it reaches the hosts."""
    routed = own_address(toward=toward, node_ip=None, interface=None)
    known = [node.address for node in cluster.nodes if node.address and is_own(node.address)]
    return routed if routed in known or not known else known[0]


def _variables(environment: EnvironmentBase, section: ClusterSection, *, num_nodes: int) -> list[Mapping[str, str]]:
    """Of the hosts by node: what the run file declares for workers, and what ``environment.env`` names and is set here."""
    named = {name: os.environ[name] for name in environment.env if name in os.environ}
    submitted = submitted_env(section)
    return [{**named, **worker_env(section, submitted=submitted, node_rank=rank)} for rank in range(num_nodes)]
