"""The embedded default: two tiny tasks, a word-level tokenizer, and a tiny model that a minute of a CPU warms up."""
