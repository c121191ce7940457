"""Antiphon: asynchronous decentralized parallel SGD, for acoustic models and for any PyTorch loop.

>>> import antiphon
>>> sorted(antiphon.STRATEGIES)
['allreduce', 'delay-by-one', 'fixed-ring', 'random-ring', 'sync-ring']
"""

import importlib
from typing import TYPE_CHECKING, Any

from antiphon.errors import (
    AntiphonError,
    ArgumentError,
    DataError,
    DeadlineError,
    FolderError,
    LearnerError,
    UserError,
)

if TYPE_CHECKING:
    from antiphon.learner.learner import Learner
    from antiphon.learner.sampler import BatchSampler
    from antiphon.simulation.engine import Simulation
    from antiphon.strategies import STRATEGIES, strategy_class
    from antiphon.strategies.base import AverageGradients, Exchange, FinishMix, StartMix, Strategy
    from antiphon.training.launch import Launch

__all__ = [
    "STRATEGIES",
    "AntiphonError",
    "ArgumentError",
    "AverageGradients",
    "BatchSampler",
    "DataError",
    "DeadlineError",
    "Exchange",
    "FinishMix",
    "FolderError",
    "Launch",
    "Learner",
    "LearnerError",
    "Simulation",
    "StartMix",
    "Strategy",
    "UserError",
    "strategy_class",
]

# What needs torch is imported when it is first asked for: the command line answers --help without it.
_HOMES = {
    "antiphon.learner.learner": ("Learner",),
    "antiphon.learner.sampler": ("BatchSampler",),
    "antiphon.simulation.engine": ("Simulation",),
    "antiphon.strategies": ("STRATEGIES", "strategy_class"),
    "antiphon.strategies.base": ("AverageGradients", "Exchange", "FinishMix", "StartMix", "Strategy"),
    "antiphon.training.launch": ("Launch",),
}


def __getattr__(name: str) -> Any:
    for home, names in _HOMES.items():
        if name in names:
            return getattr(importlib.import_module(home), name)
    raise AttributeError(f"module 'antiphon' has no attribute '{name}'")
