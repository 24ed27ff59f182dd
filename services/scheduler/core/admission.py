"""Why an instance is refused: its epoch is over, is not confirmed, or its model is another one than its name's."""

from collections.abc import Collection
from typing import Protocol

from shared.errors import StaleEpoch
from shared.ids import Epoch, InstanceId
from shared.kv.layout import EngineDescription
from shared.wire.reports import Refused

UNCONFIRMED = "epoch.unconfirmed"  # code of a refusal: come again, under the same epoch
OTHER_MODEL = "model.other"  # and of this one: come again, it ends when those that have the name have left
SETTLE_MS = 10_000  # behind a scheduler's first Hello: all say theirs again, in any order


class Named(Protocol):
    """An instance. Epochs are times of registration, so that the smaller of two is the older one's."""

    @property
    def instance(self) -> InstanceId: ...
    @property
    def epoch(self) -> Epoch: ...
    @property
    def description(self) -> EngineDescription: ...


def stale(instance: InstanceId, epoch: Epoch, newest: Epoch) -> Refused:
    """Of a process that another one has replaced."""
    return Refused(code=StaleEpoch.code, reason=f"{instance} has epoch {newest}; {epoch} is over")


def unconfirmed(instance: InstanceId, epoch: Epoch) -> Refused:
    """Of an epoch that the coordinator's list has contradicted."""
    reason = f"the coordinator's list does not name epoch {epoch} of {instance}"
    return Refused(code=UNCONFIRMED, reason=reason)


def other_model(description: EngineDescription, others: Collection[Named]) -> Refused | None:
    """None where all have the same files, as the fingerprint tells: devices, layouts and ranks may differ.

    Args: others: that are heard.
    """
    found = _named_otherwise(description, others)
    if not found:
        return None
    reason = (
        f"its {description.model!r} is another model (fingerprint {description.fingerprint[:12]}) than that of "
        f"{found[0].instance} ({found[0].description.fingerprint[:12]}): other weights or another config.json; give "
        "them the same files, or another name to one of them"
    )
    return Refused(code=OTHER_MODEL, reason=reason)


def makes_way(
    description: EngineDescription, epoch: Epoch, others: Collection[Named], since_ms: int
) -> list[InstanceId]:
    """All that have the model's name with other files, if each came to the cluster after this one; else nobody does.

    Nor does anybody when `since_ms`, the scheduler's time since the first Hello, is past SETTLE_MS. Until then it is
    chance who says Hello first, and one with the wrong files, refused before, must not have all others refused.
    """
    if since_ms >= SETTLE_MS:
        return []
    found = _named_otherwise(description, others)
    return [each.instance for each in found] if all(each.epoch > epoch for each in found) else []


def _named_otherwise(description: EngineDescription, others: Collection[Named]) -> list[Named]:
    named = [each for each in others if description.model and each.description.model == description.model]
    return [each for each in named if each.description.fingerprint != description.fingerprint]
