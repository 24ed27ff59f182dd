"""Why an instance is refused: its epoch is over, is not confirmed, or its model is another one than its name's."""

from collections.abc import Iterable

from shared.errors import StaleEpoch
from shared.ids import Epoch, InstanceId
from shared.kv.layout import EngineDescription
from shared.wire.reports import Refused

UNCONFIRMED = "epoch.unconfirmed"  # code of a refusal: come again, under the same epoch
OTHER_MODEL = "model.other"  # and of this one: come again, it ends when those that have the name have left


def stale(instance: InstanceId, epoch: Epoch, newest: Epoch) -> Refused:
    """Of a process that another one has replaced."""
    return Refused(code=StaleEpoch.code, reason=f"{instance} has epoch {newest}; {epoch} is over")


def unconfirmed(instance: InstanceId, epoch: Epoch) -> Refused:
    """Of an epoch that the coordinator's list has contradicted."""
    reason = f"the coordinator's list does not name epoch {epoch} of {instance}"
    return Refused(code=UNCONFIRMED, reason=reason)


def other_model(
    description: EngineDescription, others: Iterable[tuple[InstanceId, EngineDescription]]
) -> Refused | None:
    """None where all have the same files, as the fingerprint tells: devices, layouts and ranks may differ.

    Args: others: name and description of each other instance that is heard.
    """
    for name, other in others:
        if description.model and description.model == other.model:
            if description.fingerprint == other.fingerprint:
                return None  # so do the rest: they were admitted beside it
            reason = (
                f"its {description.model!r} is another model (fingerprint {description.fingerprint[:12]}) than that "
                f"of {name} ({other.fingerprint[:12]}): other weights or another config.json; give them the same "
                "files, or another name to one of them"
            )
            return Refused(code=OTHER_MODEL, reason=reason)
    return None
