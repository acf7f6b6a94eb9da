"""``marl serve RUN|CHECKPOINT|MODEL``: a trained team behind one OpenAI-compatible endpoint.

marl serve outputs/quickstart/latest --port 8000
"""

import argparse
import json
import logging
import os
import signal
import socket
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from marl.config.command_options import KEY, LOOPBACK, read, serve as serve_options
from marl.config.errors import ConfigError
from marl.data.rows import file_list
from marl.evaluation.source import Source, find, reads_examples
from marl.main import exit_code
from marl.utils.numbers import SECONDS, Number, count
from marl.utils.quiet import quiet
from marl.utils.secret_masking import hide, masked_logs

logger = logging.getLogger(__name__)
BACKLOG = 2048
BOUNDS: dict[str, Number] = {
    "port": count(0, 65535),
    "max_concurrent": count(1, 4096),
    "queue": count(0, 1_000_000),
    "timeout": SECONDS,
}


def main(arguments: Sequence[str] | None = None) -> int:
    return exit_code(lambda: serve(*parsed(sys.argv[1:] if arguments is None else arguments)))


def parsed(arguments: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
    """The command's own options, and the ``key=value`` of the configuration. Raises ConfigError."""
    options, words = read(serve_options(), arguments)
    check(options)
    return options, words


def check(options: argparse.Namespace) -> None:
    for name, bound in BOUNDS.items():
        if not bound.takes(value := getattr(options, name)):
            raise ConfigError(f"--{name.replace('_', '-')} {value}: {bound}")
    key = access_key(options)
    if options.host not in LOOPBACK and key is None:
        raise ConfigError(
            f"--host {options.host}: everybody who can reach it could use the team; set {KEY} to an access key, or listen on 127.0.0.1"
        )


def access_key(options: argparse.Namespace) -> str | None:
    """The key in the environment. Raises ConfigError for a named variable that is not set."""
    name = options.api_key_env or KEY
    value = os.environ.get(name, "").strip()
    if options.api_key_env and not value:
        raise ConfigError(f"--api-key-env {name}: this variable is not set; export it, or leave the option out")
    if value:
        hide([value])
    return value or None


def serve(options: argparse.Namespace, words: Sequence[str]) -> None:
    """Listen until a signal ends it: SIGTERM in order, SIGINT by a KeyboardInterrupt."""
    from marl.evaluation.team import opened
    from marl.serving.app import make_app
    from marl.serving.host import hosted
    from marl.serving.listener import Listener
    from marl.serving.player import Player
    from marl.serving.service import Limits, Service

    source, key = find(options.source), access_key(options)
    with ExitStack() as stack:
        stack.enter_context(quiet("verbose=true" in words))
        stack.enter_context(masked_logs())
        place = stack.enter_context(listening(options))
        asked = stack.enter_context(answerable(source, options, words))
        team = stack.enter_context(opened(source, asked))
        host = stack.enter_context(hosted(team.loop))
        limits = Limits(options.max_concurrent, options.queue, options.timeout)
        service = Service(Player(team, options.data_source), host, limits)
        listener = Listener(make_app(service, key, options.allow_host))
        listener.listen_to_signals()
        stack.callback(
            signal.signal, signal.SIGINT, signal.default_int_handler
        )  # it ends what stops workers and servers
        announce(source, service, options, place, bool(key))
        listener.run(sockets=[place])


def announce(source: Source, service: Any, options: argparse.Namespace, place: socket.socket, closed: bool) -> None:
    address, models = f"http://{options.host}:{place.getsockname()[1]}", ", ".join(service.player.models)
    access = "asked for" if closed else "none"
    sys.stdout.write(f"serving {source.path} at {address}/v1   models: {models}   access key: {access}\n")
    sys.stdout.flush()


@contextmanager
def listening(options: argparse.Namespace) -> Iterator[socket.socket]:
    """The socket, taken before any model is loaded. Raises ConfigError for an address that cannot be had."""
    family = socket.AF_INET6 if ":" in options.host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as place:
        place.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            place.bind((options.host, options.port))
            place.listen(BACKLOG)  # without it another server could bind the same port
        except OSError as error:
            raise ConfigError(
                f"--port {options.port}: {options.host}:{options.port} cannot be listened on ({error.strerror or error}); "
                "choose another, or 0 for a free one"
            ) from None
        yield place


@contextmanager
def answerable(source: Source, options: Any, words: Sequence[str]) -> Iterator[list[str]]:
    """The configuration's words; where the run's data are not on this machine, or hold examples in place of tasks, as for a plain
    model, with a question in their place: prompts are checked before anything starts, and questions come from elsewhere."""
    named = [word for word in words if word.lstrip("+").startswith("data.val_files=")]
    files = [] if source.saved is None or reads_examples(source) else file_list(source.saved["data"]["val_files"])
    if named or (files and all(Path(file).is_file() for file in files)):
        yield list(words)
        return
    if not options.data_source:
        logger.warning(
            "%s: its data are not on this machine, so answers are read by no data set's own rule; name it with --data-source",
            source.path,
        )
    with tempfile.TemporaryDirectory(prefix="marl-serve-") as folder:
        row = {
            "prompt": [{"role": "user", "content": "hello"}],
            "data_source": options.data_source or "question",
            "reward_model": {"style": "rule", "ground_truth": "0"},
        }
        path = Path(folder) / "question.jsonl"
        path.write_text(json.dumps(row) + "\n")
        yield [*words, f"data.val_files={path}"]


if __name__ == "__main__":
    sys.exit(main())
