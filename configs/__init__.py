"""The shipped configurations, found by Hydra as ``pkg://marl.configs``."""
