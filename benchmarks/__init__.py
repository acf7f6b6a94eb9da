"""Side-by-side benchmarks: ours, a bare loop and other frameworks on equal work. See ``README.md``."""
