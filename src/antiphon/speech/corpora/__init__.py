"""One file a corpus: what it is, where its recordings and texts lie, and how it is split."""
