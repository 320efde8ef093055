"""The guard denies: every route of the app, taken from the app itself, under every request that must not pass."""

import dataclasses
import http.client
import json
import secrets
import socket
from unittest import mock

import pytest

from attemper import errors
from attemper_lab.page.server import guard, limits, serve
from attemper_lab.page.server.app import make
from attemper_lab.page.server.serve import Bound, bind
from attemper_lab.page.server.worker import Computing, answer
from page.served import PATIENCE, serving

PATHS = {"name": "page/page.css", "run": "0" * 16}
BODIES = {"/heads": {"text": "a"}, "/heads/logits": {"text": "a", "layer": 0, "head": 0},
          "/flow": {"text": "a", "layer": 0, "head": 0}, "/runs": {"rules": ["none"], "steps": 15}}  # fmt: skip
ROUTES = [
    (method, route.path_format, route.path_format.format(**PATHS))
    for route in make(["127.0.0.1:1"], "t").inner.routes
    for method in sorted(route.methods)
]


def ask(live, route, **headers):
    method, template, path = route
    return live.ask(method, path, BODIES.get(template), **headers)


def secured(headers):
    assert {name: headers.get(name) for name in guard.HEADERS} == guard.HEADERS
    assert not any(name.startswith("access-control-") for name in headers)
    assert "server" not in headers


def refused(answer, status=403):
    code, headers, content = answer
    assert code == status, (code, content)
    secured(headers)
    assert set(json.loads(content)) == {"error"}
    assert "set-cookie" not in headers


def test_a_person_reads_a_refusal_as_a_page_and_a_program_as_json(live):
    for options in ({"token": False}, {"Sec_Fetch_Site": "cross-site"}, {"Host": "evil.example"}):
        status, headers, content = live.ask("GET", "/", Accept="text/html,application/xhtml+xml", **options)
        assert status in (403, 421)
        assert headers["content-type"].startswith("text/html")
        assert b"attemper serve" in content
        secured(headers)
        assert "set-cookie" not in headers
        refused(live.ask("GET", "/", Accept="*/*", **options), status)


def test_an_address_of_an_earlier_run_says_so(live):
    for options in (
        {"Sec_Fetch_Site": "none"},
        {"Sec_Fetch_Site": "same-origin"},
        {},
    ):  # typed, reloaded, an old browser
        status, _, content = live.ask("GET", "/earlier-run/", token=False, Accept="text/html", **options)
        assert status == 403
        assert b"the server was started again" in content
        assert b"other sites" not in content


def test_a_forwarded_port_is_told_which_to_forward(live):
    status, _, content = live.ask("GET", "/", Host=f"127.0.0.1:{live.port + 1}")
    assert status == 421
    assert f"ssh -L {live.port}:127.0.0.1:{live.port}" in json.loads(content)["error"]


def test_the_matrix_has_every_route():
    assert {path for _, path, _ in ROUTES} == {
        "/", "/page.js", "/page.css", "/about", "/data", "/heads", "/heads/logits", "/flow", "/runs", "/runs/{run}/events",
        "/runs/{run}", "/record/events",
    }  # fmt: skip
    assert all(type(route).__name__ == "APIRoute" for route in make(["127.0.0.1:1"], "t").inner.routes)


@pytest.mark.parametrize("route", ROUTES, ids=lambda route: f"{route[0]} {route[1]}")
def test_every_route_denies(live, route):
    port = live.port
    wrong = [
        *("evil.example", f"evil.example:{port}", f"127.0.0.1.evil.example:{port}", f"localhost.evil.example:{port}"),
        *(
            f"127.0.0.1:{port}@evil.example",
            f"localhost.:{port}",
            "127.0.0.1",
            "localhost",
            f"127.0.0.1:{port + 1}",
            "",
        ),
        *(f"[::1]:{port}", f"LOCALHOST:{port}", f"127.1:{port}", f"0.0.0.0:{port}", f"2130706433:{port}"),
    ]
    for host in wrong:
        refused(ask(live, route, Host=host), 421)
    for origin in ("https://evil.example", "null", f"http://127.0.0.1:{port + 1}", f"https://{live.host}", "",
                   f"http://{live.host}.evil.example", f"http://evil.example:{port}", f"http://localhost:{port}"):  # fmt: skip
        refused(ask(live, route, Origin=origin))
    for site in ("cross-site", "same-site", "anything"):
        refused(ask(live, route, Sec_Fetch_Site=site))
    refused(ask(live, route, token=False))
    for given in ("", "x", live.token[:-1], live.token + "x", live.token.swapcase(), secrets.token_urlsafe(32)):
        refused(ask(live, route, Authorization=f"Bearer {given}"))
        refused(ask(live, route, token=False, Cookie=f"attemper-{port}={given}"))
    refused(ask(live, route, token=False, Cookie=f"attemper-{port + 1}={live.token}; other={live.token}"))
    for method in ("OPTIONS", "HEAD", "PUT", "PATCH", "TRACE", "BREW"):
        code, headers, _ = live.ask(method, route[2])
        assert code == 405
        secured(headers)


@pytest.mark.parametrize("route", ROUTES, ids=lambda route: f"{route[0]} {route[1]}")
def test_every_route_answers_its_own_page(live, route):
    """With the token, the right Host and Origin: whatever the answer is, it comes from the route and not from the guard."""
    if route[1].endswith("events"):
        expected = {404}  # no such run, no record
    else:
        expected = {200} if route[0] != "DELETE" else {404}
        expected |= {201, 409} if route[1] == "/runs" else set()
    for headers in ({"Origin": f"http://{live.host}"}, {"Sec_Fetch_Site": "same-origin"}, {}):
        code, answered, _ = ask(live, route, **headers)
        assert code in expected
        secured(answered)
    code, _, _ = ask(live, route, token=False, Cookie=f"a=b; attemper-{live.port}={live.token}")
    assert code in expected


def sent(live, request):
    """Status, headers and content of what comes back for bytes as they are."""
    with socket.create_connection(("127.0.0.1", live.port), timeout=PATIENCE) as client:
        client.sendall(request)
        with http.client.HTTPResponse(client) as answer:
            answer.begin()
            return answer.status, {name.lower(): value for name, value in answer.getheaders()}, answer.read()


def test_what_is_no_http_is_refused_like_everything_else(live):
    """uvicorn refuses it before the guard sees it; the headers are the guard's all the same."""
    token = f"Authorization: Bearer {live.token}\r\n"
    for request in (
        f"GET / HTTP/1.1\r\nHost: {live.host}\r\nHost: evil.example\r\n{token}\r\n",
        f"GET / HTTP/1.1\r\nHost: {live.host}\r\nX: a\0b\r\n{token}\r\n",
        f"GET / HTTP/1.1\r\nHost : {live.host}\r\n{token}\r\n",
        f"GET /\xff HTTP/1.1\r\nHost: {live.host}\r\n{token}\r\n",
        f"POST / HTTP/1.1\r\nHost: {live.host}\r\n{token}Transfer-Encoding: identity\r\n\r\n",
        "GET /data\r\n\r\n",
        "\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n",
    ):
        refused(sent(live, request.encode("latin-1")), 400)


def test_more_connections_than_there_may_be_are_refused_like_everything_else(live, monkeypatch):
    monkeypatch.setattr(limits, "CONNECTIONS", 0)
    refused(sent(live, b""), 503)
    monkeypatch.undo()
    assert live.ask("GET", "/data")[0] == 200


def test_no_host_is_none(live):
    with socket.create_connection(("127.0.0.1", live.port), timeout=PATIENCE) as client:
        client.sendall(f"GET / HTTP/1.0\r\nAuthorization: Bearer {live.token}\r\n\r\n".encode())
        assert client.recv(4096).split(b"\r\n")[0].split()[1] in (b"400", b"421")


def test_the_token_becomes_a_cookie(live):
    code, headers, content = live.ask("GET", f"/?token={live.token}", token=False, Sec_Fetch_Site="none")
    assert (code, headers["location"], content) == (303, f"{live.server.served.guarded.home}/", b"")
    cookie, *attributes = headers["set-cookie"].split("; ")
    assert cookie == f"attemper-{live.port}={live.token}"
    assert set(attributes) == {f"Path={live.server.served.guarded.home}/", "HttpOnly", "SameSite=Strict"}
    secured(headers)
    code, headers, page = live.ask("GET", "/", token=False, Cookie=cookie)
    assert code == 200
    assert live.token.encode() not in page
    assert live.token not in str(headers)


def test_a_ticket_opens_once(live):
    """What a browser's command line holds is worth nothing when the page is open."""
    ticket = live.server.served.guarded.ticket()
    assert ticket != live.token
    refused(live.ask("GET", "/data", token=False, Authorization=f"Bearer {ticket}"))
    code, headers, _ = live.ask("GET", f"/?token={ticket}", token=False, Sec_Fetch_Site="none")
    assert (code, headers["location"]) == (303, f"{live.server.served.guarded.home}/")
    assert headers["set-cookie"].startswith(f"attemper-{live.port}={live.token};")
    refused(live.ask("GET", f"/?token={ticket}", token=False), 403)


def test_the_browser_is_given_a_ticket_and_a_warning_is_for_others_alone(monkeypatch):
    """`serve()` as the command calls it, without serving."""
    opened, said, noted = [], [], []
    monkeypatch.setattr(serve.StoppableServer, "run", lambda self, sockets: None)
    monkeypatch.setattr(serve.threading, "Timer", lambda wait, action, given: opened.append(given[0]) or mock.Mock())
    serve.serve("localhost", allow_remote=True, say=said.append, note=noted.append)
    assert opened[0].partition("=")[0] == said[0].partition("=")[0]
    assert opened != said
    assert not any("WARNING" in words for words in noted)
    monkeypatch.setattr(serve, "Bound", lambda *given: dataclasses.replace(Bound(*given), local=False))
    serve.serve(browser=False, say=said.append, note=noted.append)
    assert any("WARNING" in words for words in noted)


def test_a_wrong_token_opens_nothing(live):
    for query in ("token=x", f"token={live.token}x", f"token={live.token}&token={live.token}", f"TOKEN={live.token}",
                  "next=//evil.example", f"a=1&b=2&c=3&d=4&e=5&token={live.token}", "token=" + "a" * 2000):  # fmt: skip
        refused(live.ask("GET", f"/?{query}"), 403)
    refused(live.ask("GET", f"/?token={live.token}", Sec_Fetch_Site="cross-site"))
    refused(live.ask("GET", f"/?token={live.token}", Origin="https://evil.example"))
    refused(live.ask("POST", f"/?token={live.token}", {}), 405)
    refused(live.ask("GET", f"/data?token={live.token}"), 400)
    refused(live.ask("GET", f"/data?token={live.token}", token=False))


def test_every_run_has_its_own_token():
    first, second = bind(), bind()
    try:
        assert first.token != second.token
        assert len(first.token) >= 43
    finally:
        first.socket.close()
        second.socket.close()


def test_no_websocket(live):
    code, headers, _ = live.ask(
        "GET", "/data", Connection="Upgrade", Upgrade="websocket", Sec_WebSocket_Key="x", Sec_WebSocket_Version="13"
    )
    assert code != 101
    secured(headers)
    closed = []

    async def asked():
        return {"type": "websocket.connect"}

    async def sent(message):
        closed.append(message)

    guarded = make(["127.0.0.1:1"], "t").guarded(
        {"type": "websocket", "headers": [(b"host", b"127.0.0.1:1")], "path": "/"}, asked, sent
    )
    with pytest.raises(StopIteration):
        guarded.send(None)
    assert closed == [{"type": "websocket.close", "code": 1008}]


def test_it_listens_on_loopback_alone(live):
    assert live.bound.socket.getsockname()[0] == "127.0.0.1"
    for host in ("0.0.0.0", "::", "::ffff:0.0.0.0"):
        with pytest.raises(errors.InputError, match="every address"):
            bind(host)
        with pytest.raises(errors.InputError, match="every address"):
            bind(host, allow_remote=True)
    with pytest.raises(errors.InputError, match="Add --allow-remote"):
        bind("192.0.2.1")
    with pytest.raises(errors.InputError, match="an address of this machine"):
        bind("evil.example")
    with pytest.raises(errors.InputError, match="Choose another --port"):
        bind(port=live.port)
    mapped = bind("::ffff:127.0.0.1")
    mapped.socket.close()
    assert mapped.hosts[0].startswith("127.0.0.1:")


def test_a_failure_says_nothing_of_this_machine(live):
    code, headers, content = live.ask("POST", "/heads", {"text": "fails"})
    assert code == 500
    secured(headers)
    assert b"secret" not in content
    assert b"/" not in content


def test_a_model_that_is_not_there_is_told_in_the_terminal_and_its_folder_to_nobody(tmp_path):
    with pytest.raises(errors.InputError, match="there is no folder"):
        serve.serve(model=str(tmp_path / "missing"), browser=False)
    folder = tmp_path / "it's <here>"
    folder.mkdir()
    status, content = answer(Computing(str(folder)), "load", {})
    words = content.decode()
    assert status == 422
    assert "it's <here>" in words
    assert tmp_path.name not in words
    assert str(tmp_path.parent) not in words


def test_a_failure_of_the_server_itself_is_secured_too(capfd):
    with serving() as live:
        live.server.served.inner.router.routes.clear()

        async def broken(scope, receive, send):
            raise RuntimeError("a secret: /etc/passwd")

        live.server.served.guarded.app = broken
        code, headers, content = live.ask("GET", "/data")
        assert code == 500
        secured(headers)
        assert b"secret" not in content
    assert "a secret" in capfd.readouterr().err  # for whoever runs it
