"""From recordings to word error rates: data, alignment, graph, acoustic model, decoding, scoring."""
