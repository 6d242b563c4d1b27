"""The worker's process: told what to be on standard input, it serves until it is told to stop.

The composition root; what the worker is made of is joined in ``model_worker.build``.
"""

from __future__ import annotations

import contextlib
import gc
import logging
import os
import sys
import time
from pathlib import Path

from cache_store.copy_feed import CopyListener
from cache_store.metadata.base import WorkerRecord
from model_worker.block_publisher import BlockPublisher
from model_worker.cores import usable_cores
from model_worker.link import LinkError, read_link_secret
from model_worker.log_lines import configure_logging
from model_worker.process_start import EXIT_CONFIG, ConfigError, read_config, watch_parent
from model_worker.protocol import WorkerConfig
from model_worker.server import WorkerServer
from model_worker.shutdown import Shutdown

logger = logging.getLogger("model_worker")


def main() -> int:
    shutdown = Shutdown()
    shutdown.install()
    try:
        config = read_config()
        configure_logging(config.log_level, config.log_format)
        watch_parent(shutdown.parent_gone)
        epoch = time.time_ns()
        server = _start_server(config, epoch)
    except (ConfigError, LinkError) as error:
        return _refuse(str(error))
    try:
        with _publishing(config, epoch) as publisher:
            on_copy = None if publisher is None else publisher.tell
            return _serve(config, epoch, server, shutdown, on_copy)
    except ConfigError as error:
        server.set_status("failed", str(error))
        return _refuse(str(error))
    finally:
        server.close()


def _refuse(reason: str, form: str = "pretty") -> int:
    """For a person at the terminal in plain words, whatever the least severe log line is."""
    if form == "json":
        logger.critical("%s", reason)
    else:
        print(f"error: {reason}", file=sys.stderr, flush=True)
    return EXIT_CONFIG


def _start_server(config: WorkerConfig, epoch: int) -> WorkerServer:
    file = config.link_secret_file
    secret = None if file is None else read_link_secret(Path(file))
    server = WorkerServer(config.endpoint, config.worker_id, epoch, secret)
    server.start()
    return server


def _publishing(
    config: WorkerConfig, epoch: int
) -> contextlib.AbstractContextManager[BlockPublisher | None]:
    """While it lasts others may follow what is stored, if they are to. Raises ConfigError."""
    if config.events_endpoint is None:
        return contextlib.nullcontext()
    model = next(iter(config.served_model_names), config.model)
    topic = f"kv@{config.worker_id}@{model}"
    publisher = BlockPublisher(config.events_endpoint, topic, config.block_size, epoch)
    publisher.start()
    return contextlib.closing(publisher)


def _announced(
    config: WorkerConfig, epoch: int, fingerprint: str
) -> contextlib.AbstractContextManager[object]:
    """While it lasts gateways find the worker, where there is a Redis to find it in."""
    if config.redis_url is None:
        return contextlib.nullcontext()
    from model_worker.announcer import Announcer

    record = WorkerRecord(
        worker_id=config.worker_id, epoch=epoch, endpoint=config.endpoint, fingerprint=fingerprint
    )
    announcer = Announcer(config.redis_url, record)
    announcer.start()
    return contextlib.closing(announcer)


def _serve(
    config: WorkerConfig,
    epoch: int,
    server: WorkerServer,
    shutdown: Shutdown,
    on_copy: CopyListener | None,
) -> int:
    def progress(line: str) -> None:
        logger.info("%s", line)
        server.set_status("loading", line)

    progress("importing torch and transformers")
    _set_up_threads(config)
    from model_worker.build import build_worker, model_card, warm_up
    from model_worker.engine import EngineError
    from model_worker.engine_loop import EngineLoop
    from model_worker.loader import ModelLoadError

    try:
        parts = build_worker(config, progress, server.wake, on_copy)
        progress("warming up; at the first start on a machine, kernels are compiled for it")
        warm_up(parts)
        parts.restore()
    except ModelLoadError as error:
        server.set_status("failed", str(error))
        return _refuse(str(error), config.log_format)
    # What was built stays; without this every full collection would walk all of the model's code.
    gc.collect()
    gc.freeze()
    engine = parts.new_engine()
    shutdown.serving(server.wake)
    card = model_card(config, parts)
    server.set_ready(card)
    try:
        with _announced(config, epoch, card.fingerprint):
            EngineLoop(engine, server, shutdown, config.drain_timeout_s).run()
    except EngineError as error:
        logger.critical("%s; the worker ends", error)
        return 1
    finally:
        parts.close()
    return 0


def _set_up_threads(config: WorkerConfig) -> None:
    """Three libraries have a team of threads each, and only one computes at a time.

    Idle ones sleep instead of spinning: where the gateway or another team needs the core for a
    moment, a spinning one makes the step several times slower. All of it is read when the libraries
    are loaded, which is why imports come after; an operator's own choice stands.
    """
    num_threads = str(config.num_threads or usable_cores())
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    os.environ.setdefault("NUMBA_NUM_THREADS", num_threads)
    os.environ.setdefault("OPENBLAS_NUM_THREADS", num_threads)
    os.environ.setdefault("OPENBLAS_THREAD_TIMEOUT", "20")  # 2^20 cycles, a third of a millisecond


if __name__ == "__main__":
    sys.exit(main())
