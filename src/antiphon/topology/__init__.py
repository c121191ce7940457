"""Who mixes with whom, and with which weights: pure data, no torch."""
