"""Tell two spirals apart with four asynchronous learners: any PyTorch loop, made decentralized.

antiphon launch --learners 4 examples/spirals.py
"""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import antiphon

EPOCHS = 40


def spirals(points: int = 4000) -> TensorDataset:
    """Return points [N, 2] on two arms with a little noise, and the arm of each."""
    draw = torch.Generator().manual_seed(0)
    angle = 3 * torch.pi * torch.rand(points, generator=draw).sqrt()
    arm = torch.arange(points) % 2
    turned = angle + torch.pi * arm
    place = torch.stack([turned.cos(), turned.sin()], 1) * angle[:, None] / 10
    return TensorDataset(place + 0.01 * torch.randn(points, 2, generator=draw), arm)


def main() -> None:
    """Train, average, measure."""
    torch.manual_seed(0)
    data = spirals()
    model = nn.Sequential(nn.Linear(2, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 2))
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)

    learner = antiphon.Learner(model, optimizer, strategy="random-ring")
    loader = DataLoader(data, batch_sampler=learner.batch_sampler(data, batch=128, epochs=EPOCHS))
    for _ in range(EPOCHS):
        for inputs, targets in loader:
            with learner.step():
                optimizer.zero_grad()
                nn.functional.cross_entropy(model(inputs), targets).backward()
                optimizer.step()

    model.load_state_dict(learner.consensus())
    leads = learner.leads
    learner.close()
    if leads:
        inputs, targets = data.tensors
        right = (model(inputs).argmax(1) == targets).float().mean()
        print(f"accuracy {right:.3f}, steps of learner {learner.number}: {learner.round}", flush=True)


if __name__ == "__main__":
    main()
