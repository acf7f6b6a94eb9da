"""``marl replay RUN step=12``: a recorded step, played again from the run's ledger without servers, and compared with the run.

marl replay outputs/quickstart/latest step=12                    the same batch, advantages and update? exit code 0 or 1
marl replay outputs/quickstart/latest step=12 learner.lam=0.9    with another setting: what would have been different
marl replay outputs/quickstart/latest step=12 from=2             from round 2 on the turns are generated, by servers
"""

import sys
from collections.abc import Sequence
from pathlib import Path

from marl.config.errors import ConfigError
from marl.main import exit_code
from marl.utils.quiet import quiet
from marl.utils.secret_masking import masked_logs, masked_text

OWN = ("step", "from", "rescore")
USAGE = "expected marl replay RUN step=N, and from=TURN rescore=true key=value … if wanted"


def main(arguments: Sequence[str]) -> int:
    outcomes: list[bool] = []
    code = exit_code(lambda: outcomes.append(run(arguments)))
    return code or int(not outcomes[0])


def run(arguments: Sequence[str]) -> bool:
    """Replay, print; True if all that was compared is equal. Raises ConfigError."""
    folder, own, changes = parsed(arguments)
    # heavy: imported once the command line is known to be right
    from marl.evaluation.replay import LiveFrom, Wanted, lines_of, replay

    step = number_of(own)
    live = LiveFrom.of(step, own["from"]) if "from" in own else None
    with quiet("verbose=true" in changes), masked_logs():
        outcome = replay(Wanted(folder, step, live, own.get("rescore") == "true", changes))
    sys.stdout.write(masked_text("\n".join([f"step {step} of {folder}", *lines_of(outcome), ""])))
    return outcome.equal


def parsed(arguments: Sequence[str]) -> tuple[Path, dict[str, str], tuple[str, ...]]:
    """The run's folder, the command's own options, and changes to the run's settings."""
    folders = [word for word in arguments if "=" not in word or Path(word).expanduser().exists()]
    pairs = [word.partition("=") for word in arguments if word not in folders]
    if len(folders) != 1:
        raise ConfigError(f"marl replay {' '.join(arguments)}: {len(folders)} folders; {USAGE}")
    own = {key: value for key, _, value in pairs if key in OWN}
    if own.get("rescore", "false") not in ("true", "false"):
        raise ConfigError(f"rescore={own['rescore']}: expected true or false")
    return Path(folders[0]).expanduser().resolve(), own, tuple(f"{key}={v}" for key, _, v in pairs if key not in OWN)


def number_of(own: dict[str, str]) -> int:
    text = own.get("step", "")
    if not text.isdecimal() or not int(text):
        raise ConfigError(f"step={text}: expected the number of a step, from 1 on; {USAGE}")
    return int(text)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
