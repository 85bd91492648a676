# SPDX-License-Identifier: Apache-2.0
"""Prints the newest CPython of this machine that can run tensorpool; called by `make setup` with the path of uv.

Looks along PATH, among pyenv's versions (its shims show only the active ones), and among those that uv has installed.
Runs on any Python that can make an environment, so nothing of 3.12 is used here.
"""

import glob
import json
import os
import re
import subprocess
import sys

OLDEST = (3, 12)


def choose(found):
    """The path of the newest usable interpreter in uv's list; raises LookupError with what to do if there is none."""
    suitable = []
    refused = []
    for python in found:
        if python["implementation"] != "cpython" or not re.fullmatch(r"[0-9.]+", python["version"]):
            continue  # another implementation, or a release candidate
        version = tuple(int(number) for number in python["version"].split("."))
        if version[:2] >= OLDEST:
            (suitable if python["variant"] == "default" else refused).append((version, python["path"]))
    if suitable:
        newest = max(version for version, _ in suitable)
        return next(path for version, path in suitable if version == newest)
    hint = "install one, with its headers, or name it: make setup PYTHON=/path/to/python3"
    if refused:
        path = refused[0][1]
        raise LookupError(f"{path} is a free-threaded CPython, which tensorpool does not support; {hint}")
    raise LookupError("no CPython of version 3.12 or newer on PATH, in pyenv or in uv; " + hint)


def installed(uv):
    """uv's list of the interpreters of this machine."""
    root = os.environ.get("PYENV_ROOT") or os.path.expanduser("~/.pyenv")
    versions = glob.glob(os.path.join(glob.escape(root), "versions", "*", "bin"))
    path = os.pathsep.join([os.environ.get("PATH", os.defpath), *versions])
    command = [uv, "python", "list", "--only-installed", "--output-format", "json"]
    listed = subprocess.run(command, env={**os.environ, "PATH": path}, capture_output=True, check=False)
    if listed.returncode:  # otherwise it only warns, of shims that lead nowhere
        raise LookupError(listed.stderr.decode())
    return json.loads(listed.stdout)


if __name__ == "__main__":
    try:
        print(choose(installed(sys.argv[1])))
    except LookupError as error:
        sys.exit(f"error: {error}")
