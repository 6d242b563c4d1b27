"""The byte form of messages, versions, and the keys of a link."""

from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq

from cache_store.events import AllBlocksCleared, BlockRemoved, BlockStored, Tier
from model_worker.protocol import (
    Abort,
    AddRequest,
    BlockReport,
    CacheReset,
    ErrorCode,
    EvictedPrefix,
    FinishReason,
    GatewayMessage,
    Goodbye,
    Grammar,
    Heartbeat,
    Hello,
    LinkError,
    PrefixAction,
    PrefixCommand,
    PrefixReply,
    ProtocolVersion,
    Refusal,
    RequestError,
    RequestOutput,
    ResetCache,
    SamplingParams,
    StepFrame,
    TenantPolicies,
    TenantPolicy,
    TenantUsage,
    TierReport,
    TokenLogprobs,
    Welcome,
    WorkerConfig,
    WorkerMessage,
    WorkerStats,
    WorkerStatus,
    decode_gateway_message,
    decode_worker_message,
    derive_link_keys,
    encode,
    link_keys_for,
    peek_request_id,
    read_link_secret,
)
from tests.scripted_worker import make_card

VERSION = ProtocolVersion(1, 0)
SECRET = b"0123456789abcdef"


def make_request(**changes: object) -> AddRequest:
    fields = {
        "request_id": "r1",
        "prompt_token_ids": b"\x01\x00\x00\x00\x02\x00\x00\x00",
        "sampling_params": SamplingParams(max_tokens=3, seed=7, stop_token_ids=(2,)),
    }
    return AddRequest(**{**fields, **changes})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "message",
    [
        Hello(version=VERSION, gateway_id="g"),
        make_request(cache_salt="salt", tenant="a"),
        make_request(
            sampling_params=SamplingParams(
                max_tokens=9,
                num_logprobs=0,
                num_prompt_logprobs=20,
                min_tokens=2,
                grammar=Grammar("regex", "a+"),
            )
        ),
        Abort(request_id="r1"),
        ResetCache(call_id="c"),
        PrefixCommand(
            call_id="c",
            action=PrefixAction.DEMOTE,
            prompt_token_ids=b"\x01\x00\x00\x00",
            cache_salt="tenant",
            keep_num_tokens=1,
        ),
        TenantPolicies(policies=(TenantPolicy(tenant="a", weight=2.0, max_disk_bytes=2**41),)),
        Heartbeat(),
        Goodbye(reason="done"),
    ],
    ids=lambda message: type(message).__name__,
)
def test_gateway_messages_survive_the_wire(message: GatewayMessage) -> None:
    assert decode_gateway_message(encode(message)) == message


@pytest.mark.parametrize(
    "message",
    [
        Welcome(version=VERSION, worker_id="w", epoch=2**62, model=make_card()),
        WorkerStatus(worker_id="w", state="loading", detail="40 %"),
        Refusal(version=VERSION, reason="too old"),
        Heartbeat(epoch=4, sequence=9),
        CacheReset(call_id="c", num_blocks_dropped=5),
        PrefixReply(call_id="c", num_host_tokens=96, num_blocks_changed=3, num_blocks_left=1),
        Goodbye(reason="done"),
        StepFrame(
            epoch=4,
            sequence=1,
            outputs=(
                RequestOutput(
                    request_id="a",
                    token_ids=(5, 6),
                    num_cached_tokens=0,
                    logprobs=(
                        TokenLogprobs(-0.5, 1, (5, 7), (-0.5, -2.25)),
                        TokenLogprobs(-9999.0, 40, (), ()),
                    ),
                    prompt_logprobs=(None, TokenLogprobs(-0.25, 1, (), ())),
                ),
                RequestOutput(
                    request_id="b",
                    finish_reason=FinishReason.ERROR,
                    error=RequestError(code=ErrorCode.NEVER_FITS, message="too long", param="x"),
                ),
            ),
            stats=WorkerStats(num_running=2, tenants=(TenantUsage("a", 2, num_disk_blocks=9),)),
            events=(BlockStored(Tier.DISK, b"h" * 32), BlockRemoved(b"i" * 16), AllBlocksCleared()),
        ),
    ],
    ids=lambda message: type(message).__name__,
)
def test_worker_messages_survive_the_wire(message: WorkerMessage) -> None:
    assert decode_worker_message(encode(message)) == message


def test_token_output_of_a_step_stays_small() -> None:
    output = RequestOutput(request_id="r" * 32, token_ids=(49151,))
    assert len(encode(output)) <= 70


@pytest.mark.parametrize(
    "frame", [b"", b"\xc1", b"{}", encode(Heartbeat())[:-1], msgspec.msgpack.encode({"type": "X"})]
)
def test_bytes_that_are_no_message_raise_a_decode_error(frame: bytes) -> None:
    with pytest.raises(msgspec.DecodeError):
        decode_gateway_message(frame)
    with pytest.raises(msgspec.DecodeError):
        decode_worker_message(frame)


def test_worker_messages_are_not_gateway_messages() -> None:
    with pytest.raises(msgspec.ValidationError):
        decode_gateway_message(encode(CacheReset(call_id="c", num_blocks_dropped=1)))


def test_fields_added_by_a_newer_peer_are_ignored() -> None:
    newer = {"type": "Abort", "request_id": "r", "because": "of a later version"}
    assert decode_gateway_message(msgspec.msgpack.encode(newer)) == Abort(request_id="r")


class OldAddRequest(msgspec.Struct, frozen=True, tag="AddRequest", kw_only=True):
    """As of 1.2."""

    request_id: str
    prompt_token_ids: bytes
    sampling_params: SamplingParams
    cache_salt: str = ""
    priority: int = 0
    retention_s: float = 0.0
    tenant: str = ""


class OldRequestOutput(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """As of 1.2."""

    request_id: str
    token_ids: tuple[int, ...] = ()
    num_cached_tokens: int | None = None
    finish_reason: FinishReason | None = None
    stop_token_id: int | None = None
    error: RequestError | None = None
    queue_s: float | None = None
    prefill_s: float | None = None
    num_host_tokens: int = 0
    num_disk_tokens: int = 0
    logprobs: tuple[TokenLogprobs, ...] = ()
    prompt_logprobs: tuple[TokenLogprobs | None, ...] = ()


class OldWorkerStats(msgspec.Struct, frozen=True, kw_only=True):
    """As of 1.2, as far as it matters."""

    num_running: int = 0
    steps_total: int = 0
    tiers: tuple[TierReport, ...] = ()


PARAMS = {"max_tokens": 3, "temperature": 0.5, "seed": 7, "logit_bias": {5: 1.0}}


@pytest.mark.parametrize("fields", [{"max_tokens": 3}, PARAMS], ids=["defaults", "others"])
def test_a_request_is_understood_by_both_minor_versions(fields: dict[str, Any]) -> None:
    old = OldAddRequest(
        request_id="r1",
        prompt_token_ids=b"\0\0\0\0",
        sampling_params=SamplingParams(**fields),
        priority=3,
    )
    new = make_request(
        prompt_token_ids=b"\0\0\0\0", sampling_params=SamplingParams(**fields), priority=3
    )
    assert decode_gateway_message(encode(old)) == new
    assert msgspec.msgpack.decode(encode(new), type=OldAddRequest) == old


def test_an_output_is_understood_by_both_minor_versions() -> None:
    old = OldRequestOutput(request_id="a", token_ids=(5,), num_cached_tokens=0)
    new = RequestOutput(request_id="a", token_ids=(5,), num_cached_tokens=0)
    assert encode(old) == encode(new)
    told = msgspec.structs.replace(new, load_s=0.5)
    assert msgspec.msgpack.decode(encode(told), type=OldRequestOutput) == old
    left = EvictedPrefix(num_tokens=32, ago_s=1.5, tier="device", cause="capacity")
    evicted = msgspec.structs.replace(new, evicted=left)
    assert msgspec.msgpack.decode(encode(evicted), type=OldRequestOutput) == old
    assert msgspec.msgpack.decode(encode(evicted), type=RequestOutput).evicted == left


def test_stats_are_understood_by_both_minor_versions() -> None:
    old = OldWorkerStats(num_running=2, steps_total=7)
    told = WorkerStats(num_running=2, steps_total=7, prefill_token_s=0.5, blocks=BlockReport(9, 3))
    assert msgspec.msgpack.decode(encode(told), type=OldWorkerStats) == old
    assert msgspec.msgpack.decode(encode(old), type=WorkerStats) == WorkerStats(
        num_running=2, steps_total=7
    )


def test_request_with_a_bad_field_still_names_itself() -> None:
    bad = msgspec.to_builtins(make_request()) | {"prompt_token_ids": 3.5}
    frame = msgspec.msgpack.encode(bad)
    with pytest.raises(msgspec.ValidationError):
        decode_gateway_message(frame)
    assert peek_request_id(frame) == "r1"


@pytest.mark.parametrize("frame", [b"", b"\xc1", encode(Abort(request_id="r1"))])
def test_other_frames_name_no_request(frame: bytes) -> None:
    assert peek_request_id(frame) is None


@pytest.mark.parametrize(
    ("ours", "theirs", "is_accepted"),
    [
        ((1, 3), (1, 3), True),
        ((1, 3), (1, 2), True),
        ((1, 2), (1, 3), True),
        ((1, 3), (1, 1), False),
        ((1, 0), (2, 0), False),
    ],
)
def test_versions_accept_their_neighbours(
    ours: tuple[int, int], theirs: tuple[int, int], is_accepted: bool
) -> None:
    assert ProtocolVersion(*ours).accepts(ProtocolVersion(*theirs)) is is_accepted


def test_worker_config_refuses_unknown_fields() -> None:
    with pytest.raises(msgspec.ValidationError, match="blok_size"):
        msgspec.json.decode(
            b'{"endpoint": "ipc:///a", "worker_id": "w", "blok_size": 3}', type=WorkerConfig
        )


def test_link_keys_depend_on_the_secret_alone() -> None:
    keys = derive_link_keys(SECRET)
    assert keys == derive_link_keys(SECRET)
    # RFC 5869 by hand: HMAC(HMAC(salt, secret), "server" || 1) as an X25519 secret, in z85.
    assert keys.server_secret == b".v)aKKA9@3)oU[Jpv7]SVmdu:rRn7*oz=GK.4u3]"
    assert zmq.curve_public(keys.server_secret) == keys.server_public
    assert zmq.curve_public(keys.client_secret) == keys.client_public
    others = derive_link_keys(b"another secret, as long")
    pairs = {keys.server_secret, keys.client_secret, others.server_secret, others.client_secret}
    assert len(pairs) == 4


def test_link_keys_do_not_print_their_secrets() -> None:
    keys = derive_link_keys(SECRET)
    assert keys.server_secret.decode() not in repr(keys)
    assert keys.client_secret.decode() not in repr(keys)


def test_short_secret_is_refused() -> None:
    with pytest.raises(LinkError, match="at least 16 bytes"):
        derive_link_keys(b"too short")


def test_tcp_without_a_secret_is_refused() -> None:
    with pytest.raises(LinkError, match="needs a shared secret"):
        link_keys_for("tcp://127.0.0.1:5000", None)


def test_ipc_needs_no_keys() -> None:
    assert link_keys_for("ipc:///run/headstart/w.sock", None) is None


def test_other_transports_and_overlong_paths_are_refused() -> None:
    with pytest.raises(LinkError, match="starts with ipc:// or tcp://"):
        link_keys_for("udp://127.0.0.1:5000", SECRET)
    with pytest.raises(LinkError, match="longer than 107 bytes"):
        link_keys_for("ipc:///" + "x" * 107, None)


def test_secret_file_is_read_without_the_space_around_it(tmp_path: Path) -> None:
    path = tmp_path / "secret"
    path.write_bytes(b"  " + SECRET + b"\n")
    assert read_link_secret(path) == SECRET


def test_missing_or_short_secret_file_is_one_clear_line(tmp_path: Path) -> None:
    with pytest.raises(LinkError, match=r"cannot read the link secret file .*No such file"):
        read_link_secret(tmp_path / "absent")
    short = tmp_path / "short"
    short.write_bytes(b"abc\n")
    with pytest.raises(LinkError, match="must hold at least 16 bytes"):
        read_link_secret(short)
