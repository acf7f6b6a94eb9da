"""Packages of a stand-in for an image's base, and this machine's settings of pip, which are lent to a build."""

import ast
import re
import subprocess
import sys

PACKAGES = "python3,python3-venv,ca-certificates"
"""Debian's."""
SETTING = re.compile(r"(?:global|install|:env:)\.(?!config-file)([\w-]+)=('.*')$", re.MULTILINE)


def pip_settings() -> dict[str, list[str]]:
    """The words of each of this machine's settings of pip."""
    listed = subprocess.run([sys.executable, "-m", "pip", "config", "list"], capture_output=True, text=True, check=True)
    return {key: ast.literal_eval(value).split() for key, value in SETTING.findall(listed.stdout)}
