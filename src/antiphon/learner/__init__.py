"""One learner: its weights, its share of the work, its strategy bound to its transport."""
