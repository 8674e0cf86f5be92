"""A job that goes wrong in the ways in which jobs do; run as a module by the tests of the series."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Mapping
from pathlib import Path

from orchestrator.errors import InputError
from orchestrator.onboarding.children import answer_order


def job(order: Mapping[str, object]) -> Mapping[str, object]:
    match order["how"]:
        case "well":
            print("something else first")
            return {"answer": 42, "setting": os.environ.get("LINKCPP_TEST_SETTING")}
        case "refused":
            raise InputError("these hyperparameters fit nobody\nand a second line")
        case "defect":
            raise ZeroDivisionError("a defect")
        case "abort":
            sys.stderr.write("/somewhere/llama.cpp:12: GGML_ASSERT(n > 0) failed\nbacktrace\n")
            sys.stderr.flush()
            os.abort()
        case "hang":
            if "mark" in order:
                Path(str(order["mark"])).write_text(str(os.getpid()), encoding="utf-8")
            time.sleep(60)
    os._exit(0)


if __name__ == "__main__":
    answer_order(job)
