"""Scripts that measure tierstore on a machine: `benchmarks.sweep` and `benchmarks.peers`."""
