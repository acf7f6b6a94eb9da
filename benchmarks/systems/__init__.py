"""The systems that are compared, each a process of its own that speaks the protocol of ``benchmarks.gate``."""
