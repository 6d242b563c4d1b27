"""What a worker process reads from its standard input, and what the end of it means."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import msgspec
import pytest

from model_worker.process_start import EXIT_CONFIG, ConfigError, read_config, watch_parent
from model_worker.protocol import WorkerConfig

CONFIG = WorkerConfig(endpoint="ipc:///run/w.sock", worker_id="w0")


@contextmanager
def stdin_of(content: bytes) -> Iterator[int]:
    """A descriptor that holds ``content`` and then ends."""
    reader, writer = os.pipe()
    os.write(writer, content)
    os.close(writer)
    try:
        yield reader
    finally:
        os.close(reader)


def test_the_first_line_is_the_configuration_and_no_more_is_read() -> None:
    with stdin_of(msgspec.json.encode(CONFIG) + b"\nrest") as stdin:
        assert read_config(stdin) == CONFIG
        assert os.read(stdin, 100) == b"rest"


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (b"", "truncated"),
        (b"{]\n", "malformed"),
        (b'{"worker_id": "w"}\n', "missing required field `endpoint`"),
        (b'{"endpoint": "e", "worker_id": "w", "blok": 1}\n', "unknown field `blok`"),
        (b" " * ((1 << 16) + 1), "too long"),
    ],
)
def test_anything_else_is_one_clear_line(content: bytes, problem: str) -> None:
    reader, writer = os.pipe()

    def feed() -> None:
        with os.fdopen(writer, "wb") as pipe:
            pipe.write(content)

    feeder = threading.Thread(target=feed)
    feeder.start()
    try:
        with pytest.raises(ConfigError, match=problem) as caught:
            read_config(reader)
        assert "\n" not in str(caught.value)
        assert str(caught.value).startswith("the worker configuration on standard input")
    finally:
        feeder.join()
        os.close(reader)


def test_the_end_of_standard_input_is_the_parents_death() -> None:
    reader, writer = os.pipe()
    is_gone = threading.Event()
    thread = watch_parent(is_gone.set, reader)
    os.write(writer, b"anything\n")
    assert not is_gone.wait(0.05)
    os.close(writer)
    assert is_gone.wait(5)
    thread.join()
    os.close(reader)


def test_the_exit_status_of_a_configuration_error_is_ex_config() -> None:
    assert EXIT_CONFIG == os.EX_CONFIG
