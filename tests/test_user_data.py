"""Where what users said is kept, and that it is gone from there once it is deleted.

A real gateway, worker and Redis; words that occur nowhere else are looked for in every file, in
every value of Redis and in its dump, in the logs and in the metrics. Each search first finds what
it is to find no more later.
"""

from __future__ import annotations

import os
import secrets
import signal
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from service.sessions.history import History
from tests import models
from tests.session_kit import wait_for
from tests.target import cached_tokens, text_of
from tests.user_data_kit import ALICE, BOB, DISK, Needle, Place, place, running_redis

SYSTEM = "You are the assistant of a small shop, and you give good answers to all. " * 4
SPECIAL_IDS = range(4)  # an answer with one of them would not be the text that was given
Messages = list[dict[str, Any]]


@dataclass(frozen=True)
class Places:
    """Deployments that start side by side, which takes little longer than one."""

    shop: Place  # with Redis; its tests have sessions of their own
    alone: Place  # without
    sealed: Place  # with Redis and a key
    model: Path
    stop_sealed: Callable[[], None]


@pytest.fixture(scope="module")
def places(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Places]:
    folder = tmp_path_factory.mktemp("places")
    model = models.save_model("llama", folder / "model")
    with ExitStack() as stack:
        redis = stack.enter_context(running_redis(folder / "redis"))
        shop = stack.enter_context(place(folder / "shop", model, redis=redis))
        alone = stack.enter_context(place(folder / "alone", model))
        key = ("--encryption-key-file", make_key(folder / "key"))
        until_stopped = stack.enter_context(ExitStack())
        sealed = until_stopped.enter_context(place(folder / "sealed", model, *key, redis=redis))
        yield Places(shop, alone, sealed, model, until_stopped.close)


def make_key(path: Path) -> str:
    path.write_text(secrets.token_hex(32))
    path.chmod(0o600)
    return str(path)


@pytest.fixture
def shop(places: Places) -> Place:
    places.shop.server.wait_ready()
    return places.shop


@pytest.fixture
def alice(shop: Place) -> Iterator[httpx.Client]:
    with shop.client(ALICE) as client:
        yield client


@pytest.fixture
def bob(shop: Place) -> Iterator[httpx.Client]:
    with shop.client(BOB) as client:
        yield client


def told(needle: Needle, system: str = SYSTEM) -> Messages:
    return [
        {"role": "system", "content": system},
        {"role": "user", "content": f"Keep this: {needle.text}."},
    ]


def request(session: str, messages: Messages, **fields: Any) -> dict[str, Any]:
    return {
        "model": "tiny",
        "messages": messages,
        "session_id": session,
        "max_tokens": 8,
        "temperature": 1.0,
        "seed": 1,
        "logit_bias": {str(token_id): -100 for token_id in SPECIAL_IDS},
        **fields,
    }


def ask(client: httpx.Client, session: str, messages: Messages, **fields: Any) -> Any:
    body = request(session, messages, **fields)
    response = client.post("/v1/chat/completions", json=body)
    assert response.status_code == 200, response.text
    return response.json()


def go_on(client: httpx.Client, session: str, messages: Messages, text: str) -> Any:
    """One more turn, after which ``messages`` hold the answer."""
    messages.append({"role": "user", "content": text})
    answer = ask(client, session, messages)
    messages.append(answer["choices"][0]["message"])
    return answer


def num_known(answer: Any) -> int:
    """Tokens whose KV there is after this answer: all but the last, which was never run."""
    usage = answer["usage"]
    return int(usage["prompt_tokens"]) + int(usage["completion_tokens"]) - 1


def delete(client: httpx.Client, session: str) -> None:
    response = client.delete(f"/v1/sessions/{session}")
    assert response.status_code == 200, response.text


def test_what_is_deleted_is_nowhere_and_what_others_share_stays(
    shop: Place, alice: httpx.Client, bob: httpx.Client
) -> None:
    needles = {name: shop.needle(name) for name in ("name-of-gone", "name-of-kept", "name-of-bobs")}
    talks: dict[str, Messages] = {}
    last: dict[str, Any] = {}
    for name, client in (("name-of-gone", alice), ("name-of-kept", alice), ("name-of-bobs", bob)):
        talks[name] = told(needles[name])[:1]
        first = go_on(client, name, talks[name], told(needles[name])[1]["content"])
        if name == "name-of-kept":
            assert cached_tokens(first) > len(SYSTEM.split())  # what all of hers have in common
        if name == "name-of-bobs":
            assert cached_tokens(first) == 0  # and no other tenant's
        last[name] = go_on(client, name, talks[name], "And what else?")
    for needle in needles.values():
        shop.wait_found(needle)
    with shop.forgetting(needles["name-of-gone"]):
        delete(alice, "name-of-gone")
    for name, client in (("name-of-kept", alice), ("name-of-bobs", bob)):
        assert shop.where(needles[name]) == shop.everywhere
        turn = go_on(client, name, talks[name], "Which one?")
        assert cached_tokens(turn) >= num_known(last[name])
        last[name] = turn
    with shop.forgetting(needles["name-of-bobs"]):
        response = bob.delete("/v1/tenants/me/data")
        assert response.status_code == 200, response.text
    assert shop.where(needles["name-of-kept"]) == shop.everywhere
    turn = go_on(alice, "name-of-kept", talks["name-of-kept"], "Really?")
    assert cached_tokens(turn) >= num_known(last["name-of-kept"])
    with shop.forgetting(needles["name-of-kept"]):
        delete(alice, "name-of-kept")


def test_an_answer_that_was_cut_goes_whole(shop: Place, alice: httpx.Client) -> None:
    """By a stop string: the worker had computed more than the client was given."""
    asked = shop.needle("asked")
    whole = ask(alice, "whole", told(asked), max_tokens=60)
    answer = shop.note(Needle(history_of(shop, "whole")[whole["usage"]["prompt_tokens"] :]))
    with shop.forgetting(asked, answer):
        delete(alice, "whole")
    del shop.deleted[-2:]  # it is said once more
    said = text_of(whole)
    stop = said[len(said) // 2 :][:3]
    cut = ask(alice, "cut", told(asked), max_tokens=60, stop=[stop])
    assert text_of(cut) == said[: said.index(stop)]
    with shop.forgetting(asked, answer):
        delete(alice, "cut")


def history_of(here: Place, session: str) -> tuple[int, ...]:
    assert here.redis is not None
    with here.redis.server.client() as client:
        (key,) = client.keys(f"headstart:1:session:*:{session}")
        history = History.decode(client.hget(key, "history"), None)
    assert history is not None
    return tuple(history.token_ids.tolist())


def test_what_an_edit_left_behind_goes_too(shop: Place, alice: httpx.Client) -> None:
    before, after = shop.needle("before"), shop.needle("after")
    ask(alice, "edited", told(before))
    ask(alice, "edited", told(after))
    with shop.forgetting(before, after):
        delete(alice, "edited")


def test_what_was_only_prewarmed_goes(shop: Place, alice: httpx.Client) -> None:
    at_once, later = shop.needle("at once"), shop.needle("later")
    created = alice.post(
        "/v1/sessions", json={"session_id": "prewarmed", "messages": told(at_once)}
    )
    assert created.status_code == 201, created.text
    url = "/v1/sessions/prewarmed/prewarm"
    assert alice.post(url, json={"messages": told(later)}).status_code == 200
    with shop.forgetting(at_once, later):
        delete(alice, "prewarmed")


def test_an_answer_that_nobody_read_to_its_end_goes(shop: Place, alice: httpx.Client) -> None:
    """Of a client that left, and of a session that is deleted while its answer is made."""
    left, deleted = shop.needle("left"), shop.needle("deleted")
    with streaming(alice, "left", told(left)):
        pass
    with shop.forgetting(left):
        delete(alice, "left")
    messages = told(deleted)
    messages.append(ask(alice, "running", messages)["choices"][0]["message"])
    with (
        shop.forgetting(deleted),
        streaming(alice, "running", [*messages, {"role": "user", "content": "More."}]) as lines,
    ):
        delete(alice, "running")
        assert sum(1 for _ in lines) > 10  # it is answered


@contextmanager
def streaming(client: httpx.Client, session: str, messages: Messages) -> Iterator[Iterator[str]]:
    """The lines of a long answer that has begun."""
    body = request(session, messages, max_tokens=300, stream=True, ignore_eos=True)
    with client.stream("POST", "/v1/chat/completions", json=body) as response:
        lines = response.iter_lines()
        for _ in range(6):
            next(lines)
        yield lines


def test_a_fork_keeps_what_it_goes_on_with(shop: Place, alice: httpx.Client) -> None:
    shared, own = shop.needle("shared"), shop.needle("own")
    messages = told(shared)
    messages.append(ask(alice, "trunk", messages)["choices"][0]["message"])
    forked = alice.post("/v1/sessions/trunk/fork", json={"session_id": "fork"})
    assert forked.status_code == 201, forked.text
    go_on(alice, "trunk", list(messages), f"Keep this too: {own.text}.")
    with shop.forgetting(own):
        delete(alice, "trunk")
    assert shop.where(shared) == shop.everywhere
    assert go_on(alice, "fork", messages, "And now?")["history"] == "exact"
    with shop.forgetting(shared):
        delete(alice, "fork")


def test_a_session_whose_time_is_over_goes(shop: Place, alice: httpx.Client) -> None:
    needle = shop.needle("short")
    created = alice.post("/v1/sessions", json={"session_id": "short", "ttl": 6})
    assert created.status_code == 201, created.text
    ask(alice, "short", told(needle))
    with shop.forgetting(needle):
        pass


def test_what_has_left_the_device_goes(shop: Place, alice: httpx.Client) -> None:
    needle = shop.needle("idle")
    messages = told(needle, "This one is alone with its words.")
    ask(alice, "idle", messages)
    assert sum(blocks_of(alice, "idle").values()) > 4
    wait_for(lambda: blocks_of(alice, "idle")["device"] == 0)
    assert blocks_of(alice, "idle")["host"] > 4
    for _ in range(2):
        with shop.forgetting(needle):
            delete(alice, "idle")
        # The memory of the host knows nothing of it either.
        assert cached_tokens(ask(alice, "idle", messages)) < 16
    delete(alice, "idle")


def blocks_of(client: httpx.Client, session: str) -> dict[str, int]:
    blocks: dict[str, int] = client.get(f"/v1/sessions/{session}").json()["blocks"]
    return blocks


def test_what_a_worker_finds_when_it_starts_goes(shop: Place, alice: httpx.Client) -> None:
    """Of one session that is deleted while no worker is there, and of one afterwards."""
    meanwhile, later = shop.needle("meanwhile"), shop.needle("afterwards")
    ask(alice, "meanwhile", told(meanwhile))
    ask(alice, "afterwards", told(later))
    for needle in (meanwhile, later):
        shop.wait_found(needle)
    os.kill(shop.server.worker_pid, signal.SIGKILL)
    shop.server.wait_health(503, 10.0)
    delete(alice, "meanwhile")
    assert shop.where(meanwhile) == {DISK}
    shop.server.wait_health(200)
    shop.wait_gone(meanwhile)
    with shop.forgetting(later):
        delete(alice, "afterwards")


def test_without_redis_it_is_gone_from_the_file_of_sessions(places: Places) -> None:
    alone = places.alone
    alone.server.wait_ready()
    gone, kept = alone.needle("gone"), alone.needle("kept")
    with alone.client(ALICE) as alice:
        ask(alice, "gone", told(gone))
        ask(alice, "kept", told(kept))
        alone.wait_found(kept)
        with alone.forgetting(gone):
            delete(alice, "gone")
        assert alone.where(kept) == alone.everywhere


def test_with_a_key_nothing_is_in_the_clear_and_another_key_opens_nothing(places: Places) -> None:
    sealed = places.sealed
    sealed.server.wait_ready()
    messages = talk_under_seal(sealed, told(sealed.needle("sealed"))[:1], 0)
    places.stop_sealed()
    folder = sealed.disk.parent
    key = ("--encryption-key-file", make_key(folder / "other-key"))
    with place(folder, places.model, *key, redis=sealed.redis) as here:
        here.used += sealed.used
        here.server.wait_ready()
        talk_under_seal(here, messages, 0)
        with here.client(ALICE) as alice:
            delete(alice, "sealed")
        assert "have another key or format version" in here.server.stderr


def talk_under_seal(here: Place, messages: Messages, num_cached: int) -> Messages:
    (needle,) = here.used
    with here.client(ALICE) as alice:
        text = told(needle)[1]["content"]
        first = go_on(alice, "sealed", messages, text)
        assert cached_tokens(first) == num_cached
        second = go_on(alice, "sealed", messages, "And what else?")
        assert (second["history"], cached_tokens(second)) == ("exact", num_known(first))
        wait_for(lambda: blocks_of(alice, "sealed")["device"] == 0)
        wait_for(lambda: [*here.disk.rglob("*.kv")])
    assert not here.where(needle)
    here.deleted.append(needle)  # nor at the end
    return messages
