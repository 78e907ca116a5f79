"""Directed patterns: what they are made of, and that nothing is lost along them."""

import numpy as np
import pytest

from gossamer.comm.digraph import Digraph, OutNeighbours, RandomPush, digraph, push_matrix
from gossamer.comm.mixing import check_connected
from gossamer.comm.topology import FAMILY, Hypercube, Ring, mixing_matrix


@pytest.mark.parametrize("to", [((1,), (1,)), ((2,), (0,)), ((1, 1), (0,)), ((2, 1), (0,), (0,)), ((-1,), (0,))])
def test_what_is_no_digraph_is_refused(to):
    with pytest.raises(ValueError, match="other ranks below"):
        Digraph(to)


def test_sources_are_the_other_ends():
    graph = Digraph(((1, 2), (2,), (0,)))
    assert [graph.sources(rank) for rank in range(3)] == [(2,), (0,), (0, 1)]
    assert [graph.destinations(rank) for rank in range(3)] == [(1, 2), (2,), (0,)]


@pytest.mark.parametrize(
    ("to", "most"),
    [(((1, 2), (2,), (0,)), 2), (((1,), (0, 2), (0, 3), (0,)), 3), (((), (0,), (0,)), 2), (((), ()), 0), ((), 0)],
)
def test_most_messages_are_of_the_rank_that_sends_or_receives_most(to, most):
    assert Digraph(to).most_messages == most


@pytest.mark.parametrize("world", [2, 3, 4, 8, 24])
@pytest.mark.parametrize("peers", [1, 2, 30])
def test_random_pushes_are_drawn_anew_and_alike_everywhere(world, peers):
    topology = RandomPush(peers=peers, seed=5)
    graphs = [topology.at(step, world) for step in range(40)]
    assert graphs == [RandomPush(peers=peers, seed=5).at(step, world) for step in range(40)]
    assert all(len(targets) == min(peers, world - 1) for graph in graphs for targets in graph.to)
    if world > 3 and peers == 1:
        counts = [len(graph.sources(rank)) for graph in graphs for rank in range(world)]
        assert {0, 1, 2} <= set(counts), "uneven"
        met = {(rank, graph.to[rank][0]) for graph in graphs for rank in range(world)}
        assert len(met) > 0.7 * min(world * (world - 1), 40 * world)
    check_connected(topology, world)


@pytest.mark.parametrize("world", [2, 4, 8])
@pytest.mark.parametrize("topology", FAMILY, ids=repr)
def test_columns_of_the_push_matrix_sum_to_one(topology, world):
    for step in range(3):
        matrix = np.array(push_matrix(topology.at(step, world)))
        assert np.allclose(matrix.sum(0), 1)
        if not (isinstance(topology, Ring) and world == 2):
            assert np.allclose(matrix, mixing_matrix(topology.at(step, world)))
    uneven = np.array(push_matrix(RandomPush().at(0, 8)))
    assert np.allclose(uneven.sum(0), 1)
    assert not np.allclose(uneven.sum(1), 1)


def test_edges_of_an_exchange():
    assert digraph(Hypercube().at(0, 4)) == Digraph(((1,), (0,), (3,), (2,)))
    assert digraph(Digraph(((1,), (0,)))) == Digraph(((1,), (0,)))


def test_a_graph_that_reaches_nobody_is_named():
    with pytest.raises(ValueError, match="what rank 2 learns never reaches ranks 0, 1"):
        check_connected(OutNeighbours(((1,), (0, 2), ())), 3)
    with pytest.raises(ValueError, match="is for 3 ranks; there are 4"):
        OutNeighbours(((1,), (2,), (0,))).at(0, 4)
    with pytest.raises(ValueError, match="peers must be"):
        RandomPush(peers=0)
