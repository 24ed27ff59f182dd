"""Coefficients for instances that sent none: another's of their family, else of their model. No I/O."""

from functools import lru_cache

from msgspec import structs

from shared.costmodel.model import CostModel
from shared.kv.layout import EngineDescription
from shared.wire.cost import CostCoefficients

MOST = 1_024  # families, and models, that are remembered

model_of = lru_cache(maxsize=1_024)(CostModel)  # equal coefficients, one model


class LentCosts:
    """The last of each family, and of each model."""

    def __init__(self) -> None:
        self._families: dict[str, CostCoefficients] = {}
        self._models: dict[str, CostCoefficients] = {}

    def note(self, description: EngineDescription, cost: CostCoefficients) -> None:
        """An instance sent its own."""
        for known, key in ((self._families, description.family_key), (self._models, description.model)):
            known.pop(key, None)
            known[key] = cost
            if len(known) > MOST:
                del known[next(iter(known))]

    def model_for(self, description: EngineDescription) -> CostModel | None:
        """Divided by as many ranks as this engine has, as CostModel.scaled() does. None: nobody sent any."""
        found = self._families.get(description.family_key)
        if found is None and description.model:
            found = self._models.get(description.model)
        if found is None:
            return None
        tp, pp = max(1, description.tp_size), max(1, description.pp_size)
        return model_of(found if (found.tp, found.pp) == (tp, pp) else structs.replace(found, tp=tp, pp=pp))
