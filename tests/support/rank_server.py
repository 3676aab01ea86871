"""A server over several processes with a small random model, to be killed piece by piece.

Arguments: the model's folder, the number of ranks, seconds of the watchdog.
"""

from __future__ import annotations

import argparse
import logging
import sys
from pathlib import Path

from fake_engine import ByteTokenizer
from rank_host import CONTEXT, VOCAB, a_plan, start

from treadle.engine.config import EngineConfig
from treadle.engine.info import EngineInfo, Parts
from treadle.tools import compose, serve


def make_parts(folder: Path, size: int, watchdog_s: float) -> Parts:
    _, executor, team = start(a_plan(folder, size), watchdog_s=watchdog_s)
    logging.info("ranks at %s", [process.pid for process in team.processes])
    info = EngineInfo(
        served_model_name="tiny", model_path="tiny", tokenizer_path="tiny", architectures=(),
        model_type="llama", max_model_len=CONTEXT, vocab_size=VOCAB, created=1, version="0",
        server_args={"device": "cpu"},
    )  # fmt: skip
    config = EngineConfig.from_flags({})
    return Parts(executor, ByteTokenizer(), info, 4, 64, config)


def main() -> int:
    folder, size, watchdog_s = Path(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3])
    compose.compose = lambda *_: make_parts(folder, size, watchdog_s)
    logging.basicConfig(level="INFO", stream=sys.stderr)
    options = argparse.Namespace(
        host="127.0.0.1", port=0, shutdown_timeout=600.0, enable_cache_report=False,
        incremental_streaming_output=False,
    )  # fmt: skip
    return serve.serve(options, {})


if __name__ == "__main__":
    sys.exit(main())
