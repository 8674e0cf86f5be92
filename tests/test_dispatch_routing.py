from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from orchestrator.dispatch.routing import Share, assign_owners, route_rows
from orchestrator.dispatch.state import Health, Ledger, StarState
from orchestrator.errors import OwnershipError, ProtocolError
from orchestrator.types import Contract, LayerDescriptor, Ownership
from orchestrator.wire.codec import CONTRACT_CODES, DISPATCH, EncodedDispatch, frame_dispatch, pull_dispatch
from orchestrator.wire.frame import HEADER_SIZE
from orchestrator.wire.messages import Dispatch


def descriptor(layer: int = 0, *, call: int = 0, n_expert: int = 8, n_embd: int = 4) -> LayerDescriptor:
    return LayerDescriptor(layer, call, "llama", 0, n_embd, 8, n_expert, 2, False, 0.0, 0.0, 0.0, 0, ())


def holdings_of(*experts: range | tuple[int, ...], layers: range = range(1)) -> list[Ownership]:
    return [Ownership.product(layers, ids) for ids in experts]


def as_request(share: Share, rows: np.ndarray) -> Dispatch:
    """Put a share on the wire and read it as its worker would."""
    chosen = rows if share.rows is None else rows[share.rows]
    encoded = EncodedDispatch(
        0,
        0,
        CONTRACT_CODES[Contract.EXACT],
        0,
        share.n_rows,
        share.n_pairs,
        rows.shape[1],
        chosen.tobytes(),
        share.tail,
    )
    wire = b"".join(frame_dispatch(0, 1, encoded))
    return pull_dispatch(1, memoryview(bytearray(wire))[HEADER_SIZE:])


@st.composite
def calls(draw: st.DrawFn) -> tuple[list[Ownership], np.ndarray, np.ndarray, np.ndarray, int]:
    n_expert, n_workers = draw(st.integers(1, 12)), draw(st.integers(1, 5))
    extra = st.sets(st.integers(0, n_workers - 1), max_size=n_workers)
    holders = [draw(extra) | {draw(st.integers(0, n_workers - 1))} for _ in range(n_expert)]
    holdings = [
        Ownership.product([0], [expert for expert, who in enumerate(holders) if worker in who])
        for worker in range(n_workers)
    ]
    n_tokens, top_k = draw(st.integers(1, 9)), draw(st.integers(1, n_expert))
    random = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    experts = np.stack([random.permutation(n_expert)[:top_k] for _ in range(n_tokens)]).astype(np.int32)
    weights = random.standard_normal((n_tokens, top_k), dtype=np.float32)
    rows = random.standard_normal((n_tokens, 3), dtype=np.float32)
    return holdings, experts, weights, rows, n_expert


@settings(max_examples=300, deadline=None)
@given(calls())
def test_every_pair_is_computed_once_and_every_row_sent_once_to_a_worker(call):
    holdings, experts, weights, rows, n_expert = call
    n_tokens, top_k = experts.shape
    route = assign_owners([descriptor(n_expert=n_expert)], holdings)[0, 0]
    shares = route_rows(route, experts, weights)
    assert [share.worker for share in shares] == sorted({share.worker for share in shares})
    covered: list[int] = []
    for share in shares:
        request = as_request(share, rows)
        tokens = np.arange(n_tokens) if share.rows is None else share.rows
        places = np.arange(n_tokens * top_k) if share.places is None else np.array(share.places)
        assert len(set(tokens.tolist())) == len(tokens) == request.rows.shape[0]
        assert request.rows.tobytes() == rows[tokens].tobytes()
        # The pairs of the request, row by row, are the places in router order: token-major, then slot.
        assert places.tolist() == sorted(places.tolist())
        assert (places // top_k).tolist() == np.repeat(tokens, request.counts).tolist()
        assert request.experts.tolist() == experts.ravel()[places].tolist()
        assert request.weights.tobytes() == weights.ravel()[places].tobytes()
        for expert in request.experts.tolist():
            assert holdings[share.worker].holds(0, expert)
        covered += places.tolist()
    assert sorted(covered) == list(range(n_tokens * top_k))


@settings(max_examples=100, deadline=None)
@given(calls())
def test_a_row_alone_goes_where_it_goes_in_company(call):
    holdings, experts, weights, _, n_expert = call
    top_k = experts.shape[1]
    route = assign_owners([descriptor(n_expert=n_expert)], holdings)[0, 0]

    def pairs(shares: list[Share], first: int) -> set[tuple[int, int]]:
        found = set()
        for share in shares:
            places = range(top_k * len(experts)) if share.places is None else share.places
            found |= {(share.worker, int(place) + first) for place in places}
        return found

    alone = set()
    for token in range(len(experts)):
        one = slice(token, token + 1)
        alone |= pairs(route_rows(route, experts[one], weights[one]), token * top_k)
    assert alone == pairs(route_rows(route, experts, weights), 0) or route.sole is not None


def test_overlaps_are_shared_out_evenly_and_the_first_wins_a_tie():
    both = assign_owners([descriptor()], holdings_of(range(8), range(8)))[0, 0]
    assert both.owner_list == (0, 1, 0, 1, 0, 1, 0, 1)
    # Worker 1 alone holds 0 to 3, so worker 0 takes the four that both hold.
    tilted = assign_owners([descriptor()], holdings_of(range(4, 8), range(8)))[0, 0]
    assert tilted.owner_list == (1, 1, 1, 1, 0, 0, 0, 0)
    assert assign_owners([descriptor()], holdings_of((), range(8)))[0, 0].sole == 1


def test_gaps_are_named_by_layer_and_expert():
    layers = [descriptor(layer) for layer in range(4)]
    holdings = [Ownership.product(range(4), range(6)), Ownership({0: (6, 7), 3: (6,)})]
    with pytest.raises(OwnershipError) as caught:
        assign_owners(layers, holdings)
    assert str(caught.value) == "no worker owns experts 6-7 of layers 1-2, experts 7 of layers 3"
    assert caught.value.hint == "start another worker with --experts 6-7 --layers 1-2"


def test_calls_of_one_layer_have_their_own_owners():
    routes = assign_owners([descriptor(), descriptor(call=1, n_expert=2)], holdings_of(range(4), range(4, 8)))
    assert routes[0, 0].owner_list == (0, 0, 0, 0, 1, 1, 1, 1)
    assert routes[0, 1].sole == 0


@pytest.mark.parametrize("n_tokens", [1, 3])
def test_an_expert_that_the_layer_does_not_have_is_an_error_in_words(n_tokens: int):
    route = assign_owners([descriptor()], holdings_of(range(4), range(4, 8)))[0, 0]
    experts = np.full((n_tokens, 1), 8, np.int32)
    with pytest.raises(OwnershipError, match="expert over 7"):
        route_rows(route, experts, np.ones((n_tokens, 1), np.float32))


def test_the_wire_header_of_a_share_is_what_the_codec_reads():
    assert DISPATCH.size == 24


# --- bookkeeping ---------------------------------------------------------------------------------------------


@given(st.lists(st.tuples(st.sampled_from(["ask", "answer", "abandon"]), st.integers(1, 12)), max_size=40))
def test_an_answer_is_taken_once_and_only_if_it_is_awaited(events: list[tuple[str, int]]):
    ledger, awaited, highest = Ledger(), set(), 0
    for event, number in events:
        if event == "ask":
            highest += number
            ledger.asked(highest)
            awaited.add(highest)
        elif event == "abandon":
            ledger.abandon()
            awaited.clear()
        elif number > highest:
            with pytest.raises(ProtocolError):
                ledger.answered(number)
        else:
            assert ledger.answered(number) == (number in awaited)
            awaited.discard(number)


def test_a_lost_worker_is_absent_until_it_greets_again():
    state = StarState(2)
    assert state.absent() == (0, 1)
    state.greeted(0, Ownership.product([0], range(4)))
    state.greeted(1, Ownership.product([0], range(4, 8)))
    state.described([descriptor()])
    state.settle()
    assert state.absent() == ()
    state.lost(1)
    assert state.absent() == (1,)
    assert state.health(1) is Health.LOST
    state.settle()
    assert state.routes[0, 0].owner_list == (0, 0, 0, 0, 1, 1, 1, 1)  # its experts stay its own
    state.greeted(1, Ownership.product([0], range(5, 8)))
    with pytest.raises(OwnershipError, match="experts 4 of layers 0"):
        state.settle()
    with pytest.raises(OwnershipError):
        state.settle()  # not forgotten
    state.greeted(1, Ownership.product([0], range(8)))
    state.settle()
    assert state.routes[0, 0].owner_list == (0, 0, 0, 0, 1, 1, 1, 1)


def test_a_worker_that_never_greeted_is_new_and_not_lost():
    state = StarState(1)
    state.lost(0)
    assert state.health(0) is Health.NEW
