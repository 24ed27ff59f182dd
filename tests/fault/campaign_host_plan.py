"""Which stories are told on two hosts, and what happens between two of them."""

from tests.fault.campaign_call_stories import by_layer, end_layers, free_all, nine_calls
from tests.fault.campaign_host_stories import memory_released, pins_end_early, regain, remote_pull
from tests.fault.campaign_hosts import Hosts
from tests.fault.campaign_stories import tidy_core
from tests.fault.campaign_swap_stories import end_swaps, swap, swap_to_lent_pages


def tidy_hosts(world: Hosts) -> None:
    """Whatever a story left: let it go, as the end of its requests would. Raises: Gone, Refused."""
    for host in world.hosts:
        for instance in host.engines:
            if instance.acquiring:
                instance.acquiring = False
                lease_id, _ = instance.part("front").ask("acquired")
                if lease_id:
                    instance.part("front").ask("release", lease_id)
            tidy_core(instance)
    end_swaps(world)
    end_layers(world)
    free_all(world)
    regain(world)


HOST_STORIES = {
    "remote pull": (remote_pull, 5),
    "pins end early": (pins_end_early, 2),
    "swap": (swap, 3),
    "swap to lent pages": (swap_to_lent_pages, 2),
    "memory released": (memory_released, 3),
    "nine calls": (nine_calls, 3),
    "by layer": (by_layer, 2),
}
