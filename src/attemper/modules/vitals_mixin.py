"""VitalsMixin: what the modules share: the vitals of the last call, where the constructor was asked for signs."""

from __future__ import annotations

from typing import Any

from torch import nn

from ..operation.call import Signs, check_signs
from ..vitals import Vitals


class VitalsMixin(nn.Module):
    """Keeps the vitals of the last call in ``vitals``, where the constructor was asked for signs."""

    vitals: Vitals | None

    def __init__(self, signs: Signs) -> None:
        super().__init__()
        self.signs = check_signs(type(self).__name__, signs)
        self.vitals = None

    def _wanted(self, signs: Signs | None) -> tuple[str, ...]:
        """What to measure now: what this call asks for, and what the constructor was asked to keep."""
        asked = () if signs is None else check_signs(type(self).__name__, signs)
        return (*self.signs, *asked)

    def _keep(self, vitals: Vitals) -> None:
        if self.signs:
            self.vitals = vitals

    def __getstate__(self) -> dict[str, Any]:
        # vitals hold a graph, which can be neither copied nor saved
        return {**self.__dict__, "vitals": None}
