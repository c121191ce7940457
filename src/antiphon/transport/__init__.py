"""How snapshots travel between learners: in process under a virtual clock, or over shared memory."""
