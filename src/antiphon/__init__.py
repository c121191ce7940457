"""Antiphon: asynchronous decentralized parallel SGD, for acoustic models and for any PyTorch loop."""
