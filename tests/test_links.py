"""A slow link is named by its two nodes, with its rate against the fastest; idle and shared links are not called slow."""

from __future__ import annotations

from rollcall.groups.links import RECENT_S, Link, Links
from rollcall.groups.sockets import Flow, Flows

ADDRESSES = {rank: f"10.0.0.{rank + 1}" for rank in range(9)}


class Cluster:
    """Nodes that are looked at every second."""

    def __init__(self, num_nodes: int = 2) -> None:
        self.links, self.now_s, self.num_nodes = Links(), 0.0, num_nodes
        self.look({})

    def look(self, flows: dict[tuple[int, int], Flow], *, silent: int | None = None) -> None:
        self.now_s += 1
        looks = {
            rank: Flows(
                by_peer={ADDRESSES[to]: flow for (sender, to), flow in flows.items() if sender == rank},
                addresses=frozenset({ADDRESSES[rank], "172.17.0.1"}),
            )
            for rank in range(self.num_nodes)
            if rank != silent
        }
        self.links.note(looks, now_s=self.now_s)

    def words(self, *nodes: int) -> str:
        return self.links.words(nodes, now_s=self.now_s)


def idle(fastest: float = 95e6) -> Flow:
    return Flow(fastest=fastest)


def busy(rate: float, *, waiting: int = 400_000, fastest: float = 95e6) -> Flow:
    return Flow(fastest=fastest, waiting=waiting, carried=int(rate), busy_s=1.0)


def test_a_slow_link_is_named_with_its_rate_against_its_fastest() -> None:
    cluster = Cluster()
    cluster.look({(0, 1): idle()})
    assert cluster.words(0, 1) == ""
    for _ in range(3):
        cluster.look({(0, 1): busy(18_000)}, silent=1)
    expected = (
        "the link between nodes 0 and 1 is slow: 18 kB/s went from node 0 to node 1 over 3 s, with 400 kB still waiting "
        "(95 MB/s at its fastest in this run)"
    )
    assert cluster.words(1) == cluster.words(0) == expected
    assert cluster.words(7) == ""


def test_what_is_known_outlives_the_node_for_a_while() -> None:
    cluster = Cluster()
    cluster.look({(1, 0): busy(18_000)})
    for _ in range(5):
        cluster.look({}, silent=1)
    assert "the link between nodes 0 and 1 is slow: 18 kB/s went from node 1 to node 0" in cluster.words(1)
    cluster.now_s += RECENT_S
    assert cluster.words(1) == ""


def test_a_link_that_was_always_slow_is_told_against_another() -> None:
    cluster = Cluster(num_nodes=3)
    cluster.look({(0, 1): busy(18_000, fastest=20_000), (0, 2): idle()})
    assert cluster.words(1).endswith("(20 kB/s at its fastest in this run; 95 MB/s from node 0 to node 2)")
    assert cluster.words(2) == ""


def test_a_link_that_is_cut_carries_nothing() -> None:
    cluster = Cluster()
    cluster.look({(0, 1): busy(0)})
    assert cluster.words(1).startswith(
        "nothing went from node 0 to node 1 over 1 s, with 400 kB still waiting (95 MB/s"
    )


def test_of_a_lost_node_a_rate_is_told_also_where_no_faster_one_is_known() -> None:
    cluster = Cluster()
    cluster.look({(0, 1): busy(18_000, fastest=20_000)})
    assert cluster.words(1) == ""
    told = cluster.links.words([1], now_s=cluster.now_s, if_slow=False)
    assert told.startswith("18 kB/s went from node 0 to node 1 over 1 s, with 400 kB still waiting (20 kB/s at its")


def test_links_that_share_a_node_are_measured_by_their_share() -> None:
    cluster = Cluster(num_nodes=9)
    cluster.look({(0, peer): busy(95e6 / 16) for peer in range(1, 9)})
    assert cluster.links.slow(now_s=cluster.now_s) == set()
    cluster = Cluster(num_nodes=9)
    cluster.look({(0, 1): busy(18_000), (0, 2): busy(90e6)})
    assert cluster.links.slow(now_s=cluster.now_s) == {Link(sender=0, receiver=1)}


def test_a_rate_is_that_of_the_last_seconds_and_a_transfer_that_has_ended_is_left_out() -> None:
    cluster = Cluster()
    for _ in range(60):
        cluster.look({(0, 1): busy(95e6)})
    for _ in range(12):
        cluster.look({(0, 1): busy(18_000)})
    assert "18 kB/s went" in cluster.words(1)
    cluster.look({(0, 1): idle()})
    cluster.look({(0, 1): busy(95e6)})
    assert cluster.words(1) == ""


def test_many_short_slow_transfers_are_told_once_and_again_after_twice_the_time() -> None:
    cluster, told = Cluster(), []
    for second in range(1, 81):
        cluster.look({(0, 1): busy(18_000) if second % 2 else idle()})
        if news := cluster.links.news(now_s=cluster.now_s):
            told.append(second)
            assert news.startswith(
                "the link between nodes 0 and 1 is slow: 18 kB/s went from node 0 to node 1 over 1 s"
            )
    assert told == [19, 39, 79]


def test_an_address_that_two_nodes_have_leads_to_none() -> None:
    assert Cluster().links.addresses == {"10.0.0.1", "10.0.0.2"}
