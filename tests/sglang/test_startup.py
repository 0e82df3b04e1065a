"""Meeting the servers: URLs, who answers, routers, tokenizers, vocabularies, settings."""

import json
import random
import socket
from functools import partial

import pytest
import trio

from trio_rollout import Prompt, SamplingParams, Stop
from trio_rollout._http import parse_url
from trio_rollout.errors import RequestRejected, ServerError, SettingsError
from trio_rollout.sglang import ServerSettings, open_sglang_servers
from trio_rollout.testing import FakeSGLang, Fault, Reply, Run, open_fake_sglang, open_sim_net

from .helpers import CERTIFICATE, EXPECTED, FIVE, PROMPT, PROMPT_LINK, SETTINGS, memory_world, socket_world, tls_fake


async def opened(*urls, **options):
    async with open_sglang_servers(urls, settings=options.pop("settings", SETTINGS), **options):
        pass


def closed_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


async def test_a_server_that_is_down_is_named_at_once():
    url = f"http://127.0.0.1:{closed_port()}"
    with pytest.raises(ServerError, match=rf"1 of 1 servers.*{url}.*refused"):
        await opened(url)


async def test_every_server_that_is_down_is_named():
    urls = [f"http://127.0.0.1:{closed_port()}" for _ in range(2)]
    async with open_fake_sglang() as fake:
        with pytest.raises(ServerError, match="2 of 3 servers") as caught:
            await opened(urls[0], fake.url, urls[1])
        assert all(url in str(caught.value) for url in urls)
        assert fake.url not in str(caught.value)


@pytest.mark.parametrize(
    ("action", "words"),
    [
        (Reply(status=200, body={"hello": "world"}), "does not speak SGLang.*hello"),
        (Reply(status=200, body=b"<html>"), "not JSON.*<html>"),
        (Reply(status=500, body={"error": "starting"}), "answered 500: starting"),
        (Reply(status=401, body={"error": {"message": "no key"}}), "no key"),
        (Fault.NOT_HTTP, "not HTTP"),
        (Fault.CLOSE, "closed"),
        (Reply(body={"model_path": "x", "is_generation": False}), "does not generate"),
    ],
)
async def test_something_else_at_the_url_is_named_with_what_it_said(action, words):
    plan = {"/model_info": [action] * 2, "/get_model_info": [action]}
    async with open_fake_sglang(plan) as fake:
        with pytest.raises(ServerError, match=words) as caught:
            await opened(fake.url)
        assert fake.url in str(caught.value)


async def test_a_server_that_does_not_answer_is_named_after_the_control_budget(autojump_clock):
    fake = FakeSGLang({"/model_info": [Fault.HANG]})
    async with open_sim_net({"http://fake:1": fake.serve}, rng=random.Random(0), link=PROMPT_LINK) as net:
        with pytest.raises(ServerError, match="http://fake:1: no answer within 7 s"):
            await opened("http://fake:1", connect=net.connect, settings=ServerSettings(vocab_size=9, control=7))
        assert trio.current_time() == 7


async def test_an_older_name_of_the_model_info_will_do():
    async with socket_world({"/model_info": [Reply(status=404)]}) as run:
        assert (await run.servers.generate(PROMPT, FIVE)).output_ids.tolist() == EXPECTED


async def test_the_same_url_twice_is_one_server():
    async with (
        open_fake_sglang() as fake,
        open_sglang_servers([fake.url, fake.url + "/"], settings=SETTINGS) as servers,
    ):
        assert len(servers.statistics().servers) == 1


async def test_leaving_closes_every_connection():
    async with open_fake_sglang() as fake:
        async with open_sglang_servers([fake.url], settings=SETTINGS) as servers, trio.open_nursery() as nursery:
            for _ in range(10):
                nursery.start_soon(servers.generate, PROMPT, FIVE)
        await fake.until(lambda: fake.connections == 0)
        with pytest.raises(RuntimeError, match="left"):
            await servers.generate(PROMPT, FIVE)


async def test_the_bodys_exception_comes_out_as_itself():
    error = ValueError("mine")
    with pytest.raises(ValueError, match="mine") as caught:
        async with socket_world():
            raise error
    assert caught.value is error


# --- URLs


@pytest.mark.parametrize(
    ("url", "host_header", "prefix"),
    [
        ("http://127.0.0.1:30000", "127.0.0.1:30000", ""),
        ("http://host", "host", ""),
        ("http://host:80/", "host", ""),
        ("http://[::1]:30000", "[::1]:30000", ""),
        ("http://host:1/base/", "host:1", "/base"),
        ("https://host", "host", ""),
        ("https://host:8443", "host:8443", ""),
        ("unix:/x.sock", "localhost", ""),
    ],
)
def test_what_a_url_means(url, host_header, prefix):
    address = parse_url(url)

    assert (address.host_header, address.prefix) == (host_header, prefix)
    assert parse_url(address.url) == address


@pytest.mark.parametrize(
    "url",
    ["", "host:30000", "ftp://host", "http://", "http://user:x@host", "http://host?q=1", "unix:relative", "http://h:x"],
)
async def test_a_malformed_url_is_refused_with_what_is_allowed(url):
    with pytest.raises(SettingsError, match="allowed"):
        await opened(url)


async def test_no_url_at_all_is_refused():
    with pytest.raises(SettingsError, match="no URL"):
        await opened()


async def test_one_string_in_place_of_urls_is_refused():
    with pytest.raises(SettingsError, match="a sequence of URLs"):
        async with open_sglang_servers("http://127.0.0.1:1"):
            pass


async def test_a_unix_socket(tmp_path):
    path = tmp_path / "sglang.sock"
    fake = FakeSGLang()
    listening = trio.socket.socket(trio.socket.AF_UNIX)
    await listening.bind(str(path))
    listening.listen()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(trio.serve_listeners, fake.serve, [trio.SocketListener(listening)])
        async with open_sglang_servers([f"unix:{path}"], settings=SETTINGS) as servers:
            async with trio.open_nursery() as burst:
                for _ in range(20):
                    burst.start_soon(servers.generate, PROMPT, FIVE)
            assert await servers.health() == {f"unix:{path}": True}
        nursery.cancel_scope.cancel()
    assert len(fake.generates) == 20


def has_ipv6() -> bool:
    try:
        with socket.socket(socket.AF_INET6) as probe:
            probe.bind(("::1", 0))
    except OSError:
        return False
    return True


@pytest.mark.skipif(not has_ipv6(), reason="this machine has no IPv6")
async def test_ipv6():
    fake = FakeSGLang()
    async with trio.open_nursery() as nursery:
        (listener,) = await nursery.start(partial(trio.serve_tcp, fake.serve, 0, host="::1"))
        url = f"http://[::1]:{listener.socket.getsockname()[1]}"
        async with open_sglang_servers([url], settings=SETTINGS) as servers:
            assert (await servers.generate(PROMPT, FIVE)).output_ids.tolist() == EXPECTED
        nursery.cancel_scope.cancel()


async def test_a_prefix_stands_before_every_route(autojump_clock):
    fake = FakeSGLang(prefix="/base")
    async with (
        open_sim_net({"http://fake:1/base": fake.serve}, rng=random.Random(0), link=PROMPT_LINK) as net,
        open_sglang_servers(["http://fake:1/base/"], connect=net.connect, settings=SETTINGS) as servers,
    ):
        assert (await servers.generate(PROMPT, FIVE)).output_ids.tolist() == EXPECTED
        assert await servers.health() == {"http://fake:1/base": True}


async def test_an_api_key_goes_with_every_call_and_into_no_repr():
    headers = []
    async with open_fake_sglang() as fake:
        settings = ServerSettings(vocab_size=99, api_key="s3cret")
        async with open_sglang_servers([fake.url], settings=settings) as servers:
            await servers.generate(PROMPT, FIVE)
            await servers.health()
        headers = [seen.headers.get("authorization") for seen in fake.seen]
    assert set(headers) == {"Bearer s3cret"}
    assert len(headers) >= 3
    assert "s3cret" not in repr(settings)


# --- routers


@pytest.mark.parametrize("shape", ["workers", "urls"])
async def test_f044_a_routers_workers_are_found_and_talked_to_directly(shape):
    async with open_fake_sglang() as one, open_fake_sglang() as two, open_fake_sglang() as router:
        if shape == "workers":
            body = {"workers": [{"url": one.url}, {"url": two.url}], "total": 2}
            router.plan = {"/workers": [Reply(body=body)]}
        else:
            router.plan = {"/workers": [Reply(status=404)], "/list_workers": [Reply(body={"urls": [one.url, two.url]})]}
        async with open_sglang_servers(router=router.url, settings=SETTINGS) as servers:
            for _ in range(4):
                await servers.generate(PROMPT, FIVE)
        assert (len(one.generates), len(two.generates)) == (2, 2)
        assert router.generates == []


@pytest.mark.parametrize(
    ("action", "words"),
    [(Reply(body={"workers": []}), "no workers"), (Reply(status=404), "404"), (Fault.CLOSE, "closed")],
)
async def test_a_router_without_workers_is_named(action, words):
    async with open_fake_sglang({"/workers": [action] * 2, "/list_workers": [action]}) as router:
        with pytest.raises(ServerError, match=words) as caught:
            async with open_sglang_servers(router=router.url, settings=SETTINGS):
                pass
        assert router.url in str(caught.value)


# --- prompts


async def test_without_a_tokenizer_text_goes_to_the_server_as_it_is(autojump_clock):
    async with memory_world() as run:
        turn = await run.servers.generate(run.servers.encode(Prompt(id="1", text="hi")), FIVE)
        assert turn.prompt_ids.tolist() == [ord("h"), ord("i")]
        assert run.fake.seen[-1].body["text"] == "hi"


async def test_without_a_tokenizer_messages_are_refused_with_a_sentence(autojump_clock):
    async with memory_world() as run:
        with pytest.raises(RequestRejected, match="no tokenizer"):
            run.servers.encode(Prompt(id="1", messages=[{"role": "user", "content": "hi"}]))


async def test_ids_outside_the_vocabulary_are_refused_when_they_are_encoded(autojump_clock):
    async with memory_world() as run:
        assert run.servers.encode(Prompt(id="1", input_ids=[5, 6])).tolist() == [5, 6]
        with pytest.raises(RequestRejected, match="1000"):
            run.servers.encode(Prompt(id="1", input_ids=[5, 1000]))


# --- the vocabulary's size


@pytest.mark.parametrize("config", [{"vocab_size": 50}, {"text_config": {"vocab_size": 50}}])
async def test_the_vocabularys_size_is_read_where_the_model_lies(tmp_path, config):
    (tmp_path / "config.json").write_text(json.dumps(config))
    plan = {"/model_info": [Reply(body={"model_path": str(tmp_path), "weight_version": "default"})]}
    async with socket_world(plan, settings=ServerSettings()) as run:
        with pytest.raises(RequestRejected, match="50"):
            await run.servers.generate([50], FIVE)
        await run.servers.generate([49], SamplingParams(max_new_tokens=1))


@pytest.mark.parametrize("content", [None, "{", "[]", '{"vocab_size": "many"}'])
async def test_an_unknown_vocabulary_is_one_warning(tmp_path, content, caplog):
    if content is not None:
        (tmp_path / "config.json").write_text(content)
    plan = {"/model_info": [Reply(body={"model_path": str(tmp_path), "weight_version": "default"})]}
    async with socket_world(plan, settings=ServerSettings()) as run:
        for _ in range(3):
            await run.servers.generate([10**6], FIVE)
    assert caplog.text.count("vocabulary's size is unknown") == 1


# --- the context's length


async def test_f033_no_more_is_asked_for_than_fits_behind_the_prompt():
    """Limit 100: a prompt of 98 gets two tokens, one of 100 is never sent."""
    async with socket_world({"/server_info": [Reply(body={"context_length": 100, "max_req_input_len": 500})]}) as run:
        turn = await run.servers.generate([1] * 98, FIVE)
        assert run.fake.seen[-1].body["sampling_params"]["max_new_tokens"] == 2
        assert (len(turn.output_ids), turn.stop) == (2, Stop.LENGTH)
        await run.servers.generate([1] * 95, FIVE)
        assert run.fake.seen[-1].body["sampling_params"]["max_new_tokens"] == 5
        with pytest.raises(RequestRejected, match=r"100 tokens leave no room.*100"):
            await run.servers.generate([1] * 100, FIVE)
        assert len(run.fake.generates) == 2


@pytest.mark.parametrize(
    ("info", "limit"),
    [
        (Reply(body={"context_length": None, "max_req_input_len": 94}), 100),
        (Reply(body={"context_length": 100}), 100),
        (Reply(body={"context_length": 900, "max_req_input_len": 94}), 100),
        (Reply(body={"context_length": True}), None),
        (Reply(status=404), None),
        (Fault.CLOSE, None),
    ],
)
async def test_the_contexts_length_is_what_the_server_says_of_itself(info, limit):
    async with socket_world({"/server_info": [info] * 2, "/get_server_info": [info]}) as run:
        assert run.servers._fleet.requests.context_length == limit


async def test_the_contexts_length_in_the_settings_wins():
    settings = ServerSettings(vocab_size=1000, context_length=50)
    async with socket_world({"/server_info": [Reply(body={"context_length": 100})]}, settings=settings) as run:
        assert run.servers._fleet.requests.context_length == 50


# --- servers that are paused already


async def test_a_server_that_is_paused_at_the_start_gets_no_work_until_its_owner_resumes_it(autojump_clock, caplog):
    async with memory_world((), lambda seen: None) as run:
        run.fakes[1].pause("retract")
        async with open_sglang_servers(
            [fake.url for fake in run.fakes], settings=SETTINGS, connect=run.net.connect
        ) as late:
            for _ in range(4):
                await late.generate(PROMPT, FIVE)
            assert run.fakes[1].generates == []
            assert run.fakes[1].url in caplog.text
            assert not any(seen.path == "/continue_generation" for seen in run.fakes[1].seen)
            run.fakes[1].resume()
            await trio.sleep(5)
            assert all(server.usable for server in late.statistics().servers)


async def test_a_server_that_is_paused_at_the_start_is_resumed_if_the_settings_say_so(autojump_clock):
    settings = ServerSettings(vocab_size=1000, resume_at_start=True)
    async with memory_world() as run:
        run.fake.pause("abort")
        async with open_sglang_servers([run.fake.url], settings=settings, connect=run.net.connect) as late:
            await late.generate(PROMPT, FIVE)
        assert not run.fake.paused


# --- settings


@pytest.mark.parametrize(
    "wrong",
    [
        {"vocab_size": 0},
        {"abort": 0},
        {"control": -1},
        {"connect": float("inf")},
        {"probe": None},
        {"max_idle": -1},
        {"idle": "x"},
    ],
)
def test_settings_out_of_range_name_field_value_and_range(wrong):
    (field, value), *_ = wrong.items()
    with pytest.raises((SettingsError, ValueError), match=field if not isinstance(value, str) else value):
        ServerSettings(**wrong)


# --- https


async def test_https_does_what_http_does():
    """Large requests and answers, reuse, streams, aborts: the same path over TLS."""
    settings = ServerSettings(vocab_size=1000, ca_file=str(CERTIFICATE))
    async with tls_fake() as fake, open_sglang_servers([fake.url], settings=settings) as servers:
        assert (await servers.generate(PROMPT, FIVE)).output_ids.tolist() == EXPECTED
        large = await servers.generate([7] * 200_000, SamplingParams(max_new_tokens=50_000))
        assert len(large.output_ids) == 50_000
        streamed = await servers.generate(PROMPT, FIVE, on_progress=lambda: None)
        assert streamed.output_ids.tolist() == EXPECTED
        fake.plan = lambda seen: Run() if seen.path == "/generate" else None
        async with trio.open_nursery() as nursery:
            nursery.start_soon(servers.generate, PROMPT, FIVE)
            await fake.until(lambda: fake.in_flight == 1)
            nursery.cancel_scope.cancel()
        assert fake.in_flight == 0
        assert set(fake.aborts) == {fake.generates[-1]}  # more than one if the handshake took half a second
        assert fake.accepted == 3  # control, generate, abort


async def test_https_with_a_certificate_of_an_unknown_authority_is_refused():
    async with tls_fake() as fake:
        with pytest.raises(ServerError, match="CERTIFICATE_VERIFY_FAILED"):
            await opened(fake.url)
        assert fake.seen == []
