# SPDX-License-Identifier: Apache-2.0
"""A Python that runs the blocks of pages, one line of JSON each, and answers with one line each.

The blocks of a page share their names; another page begins anew, in the same process, so that pages share a Spark
session. Everything printed, also by Java, goes to the file that is named on the command line.
"""

from __future__ import annotations

import json
import os
import sys
import traceback
from pathlib import Path
from typing import Any


def end_queries() -> None:
    """Stop the streaming queries of a page; one that has failed raises."""
    if "pyspark" not in sys.modules:
        return
    from pyspark.sql import SparkSession

    session = SparkSession.getActiveSession()
    for query in session.streams.active if session else []:
        failure = query.exception()
        query.stop()
        if failure is not None:
            raise failure


def main(output: str) -> None:
    answers = os.fdopen(os.dup(1), "w")
    written = os.open(output, os.O_CREAT | os.O_WRONLY | os.O_APPEND, 0o600)
    os.dup2(written, 1)
    os.dup2(written, 2)
    page, names = "", dict[str, Any]()
    for request in map(json.loads, sys.stdin):
        start = Path(output).stat().st_size
        is_done = True
        try:
            if request["page"] != page:
                end_queries()
                page, names = request["page"], {"__name__": "__main__"}
            exec(request["set_up"], names)
            exec(compile("\n" * (request["line"] - 1) + request["code"], page, "exec"), names)
        except BaseException:
            is_done = False
            traceback.print_exc()
        sys.stdout.flush()
        print(json.dumps({"is_done": is_done, "start": start}), file=answers, flush=True)
    end_queries()


if __name__ == "__main__":
    sys.path.insert(0, "")
    main(sys.argv[1])
