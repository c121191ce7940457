"""A script of a user's, for the tests of the commands: script.py FOLDER [STRATEGY [EPOCHS [LEARNER THAT FAILS]]]."""

import os
import sys
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import antiphon

FOLDER, STRATEGY, EPOCHS, FAILS = Path(sys.argv[1]), *(sys.argv[2:] + ["random-ring", "2", "-1"][len(sys.argv) - 2 :])


def main() -> None:
    torch.manual_seed(0)
    data = TensorDataset(torch.randn(64, 4), torch.randn(64, 1))
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    learner = antiphon.Learner(model, optimizer, STRATEGY, timeout_s=60.0)
    (FOLDER / f"pid-{learner.number}").write_text(str(os.getpid()))
    loader = DataLoader(data, batch_sampler=learner.batch_sampler(data, batch=8, epochs=int(EPOCHS)))
    for _ in range(int(EPOCHS)):
        for inputs, targets in loader:
            with learner.step():
                if (learner.number, learner.round) == (int(FAILS), 2):
                    raise ValueError("a bad sample")
                optimizer.zero_grad()
                (model(inputs) - targets).square().mean().backward()
                optimizer.step()
            if learner.round == 3:
                (FOLDER / f"began-{learner.number}").touch()
    torch.save(learner.consensus(), FOLDER / f"consensus-{learner.number}.pt")
    print(f"learner {learner.number} of {learner.learners} made {learner.round} steps\n", end="", flush=True)
    learner.close()


if __name__ == "__main__":
    main()
