"""Virtual learners: the real strategies and the real protocol under a virtual clock."""
