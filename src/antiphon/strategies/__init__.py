"""One file a strategy: events in, actions out. No I/O, threads or clocks."""
