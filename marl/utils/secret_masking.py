"""Masking of secrets in what is saved, printed, logged or shown to trackers.

A secret is known by its key (``api_key=…``), by its value (that of a secret environment variable, or one that was given to
``hide``), or by its form (an address with a password, a hub token).
"""

import logging
import os
import re
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

SECRET = re.compile(
    r"(api_?key|access_?key|private_?key|secret|passw(or)?d|credential|(auth|access|hf|hub|bearer)_?token|^token$)",
    re.I,
)
MASKED = "***"
FORMS = (
    # the user and the password of an address
    re.compile(r"(?P<kept>\b[a-z][a-z0-9+.-]{0,30}://)[^\s/@'\"]+(?=@)", re.I),
    re.compile(r"(?P<kept>\bbearer\s+)(?=\S*\d)[\w.~+/=-]{16,}", re.I),
    # Hugging Face, OpenAI and others, GitHub, GitLab, Slack, AWS, wandb
    re.compile(
        r"(?P<kept>\b)(hf_\w{20,}|sk-[\w-]{20,}|gh[pousr]_\w{30,}|github_pat_\w{30,}|glpat-[\w-]{20,}|xox[abprs]-[\w-]{10,}"
        r"|AKIA[0-9A-Z]{16}|wandb_v\d_\w{20,})"
    ),
)
VALUE = r"""(?P<value>'[^']*'|"[^"]*"|[^\s,;&)}\]'"]*[^\s,;&)}\]'":])"""
NAMED = (
    # key=value, as in an override or a query; 'key' (=value), as in an error; 'key': 'value', as in a dictionary
    re.compile(rf"(?P<kept>(?<![\w.-])(?P<key>[\w.-]{{1,200}})(=|'? \(=|['\"]\s*:\s*)){VALUE}"),
    # a line of YAML
    re.compile(r"(?P<kept>^[ -]*(?P<key>[\w-]+):[ ]+)(?P<value>\S.*)$", re.M),
)
EMPTY = ("null", "None", "''", '""')
"""Values that hold no secret, and tell that a key is unset."""
HIDDEN: set[str] = set()
"""Values that ``hide`` was given in this process."""


def hide(values: Collection[str]) -> None:
    """Mask these values from here on in all texts of this process; short ones are words that mean other things."""
    HIDDEN.update(value for value in values if len(value) >= 8)


def masked(tree: Any, secret: bool = False, hidden: Collection[str] = ()) -> Any:
    """The same tree with the values of secret keys, of environment variables and of secret variables hidden, and ``hidden``
    wherever a text holds one of them."""
    if isinstance(tree, Mapping):
        return {
            key: masked(value, secret or key == "env_vars" or is_secret(key), hidden) for key, value in tree.items()
        }
    if isinstance(tree, list):
        return [masked(value, secret, hidden) for value in tree]
    if not isinstance(tree, str):
        return MASKED if secret and tree is not None else tree
    spelt = any(tree == word or (len(word) >= 8 and word in tree) for word in hidden)
    return MASKED if secret or spelt or tree in secrets_of_environment() else masked_text(tree)


def masked_text(text: str) -> str:
    """A text for people, such as an error with its traceback, without the secrets that it holds."""
    for value in sorted(HIDDEN | secrets_of_environment(), key=len, reverse=True):
        text = text.replace(value, MASKED)
    for form in FORMS:
        text = form.sub(rf"\g<kept>{MASKED}", text)
    for named in NAMED:
        text = named.sub(without_value, text)
    return text


def without_value(found: re.Match[str]) -> str:
    secret = is_secret(found["key"].rpartition(".")[2]) and found["value"] not in EMPTY
    return found["kept"] + MASKED if secret else found[0]


def is_secret(key: Any) -> bool:
    """True for keys that hold secrets; those that name a variable (``api_key_env``) hold none."""
    return isinstance(key, str) and not key.endswith("_env") and SECRET.search(key) is not None


def secrets_of_environment() -> set[str]:
    """Values that a key may have been given by ``${oc.env:…}``; short ones are words that mean other things."""
    return {value for key, value in os.environ.items() if len(value) >= 8 and (is_secret(key) or key.endswith("TOKEN"))}


@contextmanager
def masked_logs() -> Iterator[None]:
    """Mask every record that this process logs meanwhile, with its traceback."""
    make = logging.getLogRecordFactory()

    def make_masked(*parts: Any, **named: Any) -> logging.LogRecord:
        record = make(*parts, **named)
        try:
            record.msg, record.args = masked_text(record.getMessage()), ()
        except (TypeError, ValueError):
            return record  # arguments that do not fit the message: logging itself reports them
        if record.exc_info:
            record.exc_text = masked_text(logging.Formatter().formatException(record.exc_info))
        return record

    logging.setLogRecordFactory(make_masked)
    try:
        yield
    finally:
        logging.setLogRecordFactory(make)
