"""Paths between instances: those by which blocks are really found, and the same for hand-offs and for fetches."""

from hypothesis import given
from hypothesis import strategies as st

from services.scheduler.core.predict import Holders, path_between
from tests.support.cost_view import View

instances = st.lists(
    st.fixed_dictionaries(
        {
            "host": st.integers(0, 3),  # 0: no mempool
            "space": st.integers(0, 2),
            "tp": st.sampled_from([1, 2]),
            "crosses": st.booleans(),
            "tokens": st.integers(0, 4),
            "with_dram": st.integers(0, 4),
        }
    ),
    min_size=2,
    max_size=7,
)
addressed = st.sets(st.integers(1, 3))


def known_of(made, hosts):
    """Spaces are of one cut: a mempool keeps those of another apart."""
    view = View()
    for number, one in enumerate(made):
        space = 10 * one["tp"] + one["space"] if one["space"] else 0
        address = f"h{one['host']}" if one["host"] in hosts else ""
        more = {"address": address, "crosses": one["crosses"]}
        view.add(f"i{number}", host=one["host"], space=space, tp=one["tp"], **more)
    return [view.placer.instances.get(f"i{number}") for number in range(len(made))]


@given(instances, addressed)
def test_blocks_pass_between_hosts_with_addresses_and_memory_for_it_however_they_are_cut(made, hosts):
    known = known_of(made, hosts)
    for reader, at in zip(known, made, strict=True):
        for holder, other in zip(known, made, strict=True):
            path = path_between(reader, holder)
            assert path == path_between(holder, reader)
            if not at["host"] or not other["host"]:
                assert path is None
            elif at["host"] == other["host"]:
                assert path in ("alias", "peer"), "cut anew within a mempool"
            else:
                may = {at["host"], other["host"]} <= hosts and at["crosses"] and other["crosses"]
                assert path == ("remote" if may else None)


@given(instances, addressed)
def test_what_may_be_fetched_is_what_most_is_held_of_by_each_path(made, hosts):
    known = known_of(made, hosts)
    held = [(k, 32 * one["tokens"], 32 * one["with_dram"]) for k, one in zip(known, made, strict=True)]
    holders = Holders(held)
    for reader in known:
        best = {}
        for holder, tokens, with_dram in held:
            path = path_between(reader, holder)
            if path == "remote":
                best[path] = max(tokens, with_dram, best.get(path, 0))
            elif path == "peer":
                best[path] = max(tokens, best.get(path, 0))
            if path in ("alias", "peer") and with_dram > tokens:
                best["dram"] = max(with_dram, best.get("dram", 0))
        assert {path: tokens for tokens, _, path in holders.sources(reader)} == best
