"""The way to an OpenAI-compatible server: proxies, stored credentials, and servers that are half up."""

import asyncio

import pytest
from aiohttp import web

from marl.config.errors import ConfigError
from marl.preflight.checks import check_endpoints
from marl.rollout.endpoint import EndpointError
from tests.asking import act, client_of, one, setup_of
from tests.judge import KEY, Judge, serving


@pytest.fixture(autouse=True)
def environment(monkeypatch, tmp_path):
    """No proxy, and credentials for every host of these tests in the user's own file."""
    for name in ("http_proxy", "HTTP_PROXY", "https_proxy", "HTTPS_PROXY", "no_proxy", "NO_PROXY", "REQUEST_METHOD"):
        monkeypatch.delenv(name, raising=False)
    hosts = ("127.0.0.1", "judge.invalid")
    (tmp_path / "netrc").write_text("".join(f"machine {host} login ann password stored\n" for host in hosts))
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    monkeypatch.setenv("JUDGE_KEY", KEY)


@pytest.mark.parametrize(("name", "sent"), [("JUDGE_KEY", f"Bearer {KEY}"), (None, None)])
def test_stored_credentials_are_not_sent(name, sent):
    judge = Judge()
    with serving(judge) as address:
        client = client_of(address, api_key_env=name)
        asyncio.run(act(client))
        if name:
            assert asyncio.run(client.server.models()) == ["m-1", "m-2"]
    assert judge.headers[0].get("Authorization") == sent


@pytest.mark.parametrize(
    ("user", "sent"), [("", None), ("ann:pass%20word@", "Basic YW5uOnBhc3Mgd29yZA==")]
)  # ann:pass word
def test_a_proxy_of_the_environment_is_asked(monkeypatch, user, sent):
    judge = Judge()
    with serving(judge) as address:
        host = address.removeprefix("http://").removesuffix("/v1")
        for proxy in (f"http://{user}{host}", f"{user}{host}"):
            monkeypatch.setenv("http_proxy", proxy)
            asyncio.run(act(client_of("http://judge.invalid/v1")))
    for headers in judge.headers:
        assert headers["Host"] == "judge.invalid" and headers.get("Proxy-Authorization") == sent
        assert "Authorization" not in headers
    assert len(judge.bodies) == 2


def test_a_host_without_proxy_is_asked_directly(monkeypatch):
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:1")
    with pytest.raises(EndpointError, match="Connect"):
        one(Judge(), max_attempts=1)
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    assert one(Judge()).text == "4"


def test_a_proxys_password_is_in_no_error(monkeypatch):
    with serving(Judge()) as address:
        monkeypatch.setenv("https_proxy", address.replace("http://", f"http://ann:{KEY}@"))
        with pytest.raises(EndpointError, match="ClientHttpProxyError") as caught:  # it tunnels nothing
            asyncio.run(act(client_of("https://judge.invalid/v1", max_attempts=1)))
    assert KEY not in str(caught.value)


class Listing(Judge):
    """Answers a request for its models as given."""

    def __init__(self, status, text):
        super().__init__()
        self.status, self.text = status, text

    async def models(self, request):
        return web.Response(status=self.status, text=self.text)


@pytest.mark.parametrize(
    ("status", "text", "words"),
    [
        (502, "upstream is down", r"policy 'judge'.*HTTP 502: upstream is down; start it"),
        (503, "", "HTTP 503: nothing"),
        (403, "not yours", "HTTP 403: not yours; set policies.judge.endpoint.api_key_env"),
        (200, "x" * (1 << 20), "an answer of more than 131072 bytes"),
    ],
)
def test_a_server_without_a_working_model_ends_the_run_before_it_starts(monkeypatch, status, text, words):
    monkeypatch.setattr("marl.rollout.endpoint.LARGEST_BODY", 1 << 17)
    with serving(Listing(status, text)) as address, pytest.raises(ConfigError, match=words):
        check_endpoints(setup_of(client_of(address)))


@pytest.mark.parametrize("status", [200, 404, 405])
def test_a_server_may_list_no_models(status):
    with serving(Listing(status, "no such page")) as address:
        check_endpoints(setup_of(client_of(address)))
