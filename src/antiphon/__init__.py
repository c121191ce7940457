"""Antiphon: asynchronous decentralized parallel SGD, for acoustic models and for any PyTorch loop.

>>> import antiphon
>>> sorted(antiphon.STRATEGIES)
['allreduce', 'delay-by-one', 'fixed-ring', 'random-ring', 'sync-ring']
"""

from antiphon.errors import (
    AntiphonError,
    ArgumentError,
    DataError,
    DeadlineError,
    FolderError,
    LearnerError,
    UserError,
)
from antiphon.learner.learner import BatchSampler, Learner
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
