"""Options of commands that also take keys of the configuration; imports nothing heavy, so that a help is there at once."""

import argparse
from collections.abc import Callable, Sequence

from marl.utils.near import did_you_mean

KEY = "MARL_API_KEY"
LOOPBACK = ("127.0.0.1", "::1", "localhost")
SOURCE = "a run's folder, …/global_step_N of one, or a model's folder"
KEYS = "Every other word is a key of the configuration, as in runner.num_rounds=3."
EVALUATION = {
    "TEAM …": "runs, checkpoints (…/global_step_N) or models; the first is compared with each other one",
    "task=FILE": "rows with answers, or a list of files; by default the first run's validation files",
    "n=4": "samples of each task; by default those of the run's validation",
    "measures=[…]": "similarity, perplexity",
    "baselines=[…]": "solo: each agent alone; vote: the majority of as many answers of one agent as the team gives; "
    "tokens: of as many as cost the team's tokens",
    "leave_one_out=true": "the team plays again without each of its agents",
    "name=NAME": "folder of the results, RUN/evaluations/NAME",
    "--model TEAM": "a team; --environment FILE: task=; --num-episodes N: the first N tasks; --output DIR: the results' folder",
}
"""The words of ``marl eval``."""


def serve() -> argparse.ArgumentParser:
    parser = with_source("serve", "Put a trained team behind one OpenAI-compatible endpoint.")
    parser.add_argument(
        "--host",
        default="127.0.0.1",
        help="address to listen on (127.0.0.1); others than this machine's need an access key",
    )
    parser.add_argument("--port", type=int, default=8000, help="8000; 0 takes a free one")
    parser.add_argument("--max-concurrent", type=int, default=8, help="episodes played at the same time (8)")
    parser.add_argument("--queue", type=int, default=64, help="episodes that may wait (64); more are refused with 429")
    parser.add_argument(
        "--timeout", type=float, default=300.0, help="seconds for a request (300), its wait included; 504 after them"
    )
    parser.add_argument(
        "--api-key-env", default=None, help=f"variable with the access key that requests bring; {KEY} if that is set"
    )
    parser.add_argument(
        "--allow-host", action="append", default=[], metavar="NAME",
        help="another name than localhost that requests may be for without an access key; may be repeated",
    )  # fmt: skip
    add_data_source(parser)
    return parser


def chat() -> argparse.ArgumentParser:
    parser = with_source(
        "chat", "Ask a trained team and read its debate. /new begins another conversation, /quit leaves."
    )
    parser.add_argument("--model", default="team", help="team, or one of its agents: team/<agent>")
    parser.add_argument("--seed", type=int, default=None, help="the same questions get the same answers")
    add_data_source(parser)
    return parser


def read(parser: argparse.ArgumentParser, words: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
    """The options, and the keys of the configuration. Raises ConfigError for an unknown option."""
    options, keys = parser.parse_known_args(list(words))
    known = [flag for action in parser._actions for flag in action.option_strings]
    from marl.config.errors import ConfigError  # imports Hydra, which a help need not wait for

    for word in keys:
        if word.startswith("-"):
            hint = did_you_mean(word.partition("=")[0], known)
            raise ConfigError(f"{word}: {parser.prog} has no such option; known: {', '.join(known)}.{hint}")
    return options, keys


def with_source(name: str, text: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog=f"marl {name}", allow_abbrev=False, description=text, epilog=KEYS)
    parser.add_argument("source", help=SOURCE)
    return parser


def add_data_source(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--data-source", default=None, help="rule by which answers are read, as a task's data_source")


def help_of_eval() -> str:
    words = "\n".join(f"  {word:<20}{text}" for word, text in EVALUATION.items())
    return f"usage: marl eval TEAM … [option=value …] [key=value …]\n\nMeasure trained teams on the same tasks.\n\n{words}\n\n{KEYS}\n"


HELPS: dict[str, Callable[[], str]] = {
    "eval": help_of_eval,
    "serve": lambda: serve().format_help(),
    "chat": lambda: chat().format_help(),
}
"""Helps of commands, by their names."""
