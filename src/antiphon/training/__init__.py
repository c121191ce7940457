"""The loop around a learner, the launch of several, and the watch over them."""
