"""What the studio's server answers, and what it refuses, to whom and in which words."""

import http.client
import socket

import pytest

from namm.errors import UsageError
from namm.studio import answers
from namm.studio import server as serving
from namm.studio.server import LARGEST_BODY, Server


def test_the_page_and_its_files_need_no_token_and_allow_nothing_else(request_to):
    for path, kind, content in (
        ("/", "text/html", "<title>namm studio</title>"),
        ("/studio.css", "text/css", "color-scheme"),
        ("/studio.js", "text/javascript", "use strict"),
    ):
        status, headers, text = request_to("GET", path, token="")
        assert status == 200
        assert headers["Content-Type"].startswith(kind)
        assert content in text
        policy = headers["Content-Security-Policy"]
        assert "default-src 'none'" in policy
        assert "unsafe" not in policy
        assert headers["X-Content-Type-Options"] == "nosniff"
    html = request_to("GET", "/")[2]
    assert "http://" not in html
    assert "https://" not in html


def test_it_listens_on_this_machine_alone(server):
    assert server.server_address[0] == "127.0.0.1"
    assert server.url == f"http://127.0.0.1:{server.server_port}/#{server.token}"
    assert len(server.token) >= 32


def test_a_question_is_answered_by_the_studio(request_to, studio):
    status, _, told = request_to("POST", "/api/perturb", {"index": 3, "sigma": 0.05, "seed": 1})
    assert status == 200
    assert told["returned"]["distances"] == studio.perturb(3, 0.05, 1).returned.distances.tolist()
    status, _, polished = request_to("POST", "/api/polish", {"key": told["returned"]["key"]})
    assert status == 200
    assert polished["images"]["distances"][0] < polished["before"][0]


@pytest.mark.parametrize("token", ["wrong", "ü", "Bearer"])
def test_without_its_token_no_question_is_answered(request_to, token):
    token = token.encode().decode("latin-1")
    for method, path in (("POST", "/api/about"), ("POST", "/api/stop"), ("GET", "/api/state"), ("POST", "/api/no")):
        status, _, told = request_to(method, path, {} if method == "POST" else None, token=token)
        assert status == 401
        assert "open the address that the terminal shows" in told["error"]


@pytest.mark.parametrize("host", ["evil.example", "127.0.0.1", "localhost:1", "127.0.0.1.evil.example"])
def test_another_name_that_leads_here_is_refused(request_to, host):
    for path in ("/", "/studio.js", "/api/state"):
        status, _, told = request_to("GET", path, Host=host)
        assert status == 403
        assert "not the address of the studio" in told["error"]


def test_its_own_names_and_origin_are_accepted(request_to, server):
    for host in server.hosts:
        assert request_to("GET", "/api/state", Host=host, Origin=f"http://{host}")[0] == 200


@pytest.mark.parametrize("origin", ["http://evil.example", "null", "https://127.0.0.1"])
def test_another_page_is_refused(request_to, origin):
    status, _, told = request_to("POST", "/api/about", {}, Origin=origin)
    assert status == 403
    assert "another page asked" in told["error"]


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("GET", "/favicon.ico"),
        ("GET", "/../studio.py"),
        ("GET", "/page/studio.js"),
        ("GET", "/?x"),
        ("POST", "/"),
        ("POST", "/api/"),
        ("POST", "/api/__init__"),
        ("POST", "/api/draw/"),
    ],
)
def test_what_is_not_there_is_404(request_to, method, path):
    status, _, told = request_to(method, path, {} if method == "POST" else None)
    assert status == 404
    assert told["error"].startswith("there is no such")


@pytest.mark.parametrize(
    ("body", "status", "said"),
    [
        (b"{", 400, "not JSON that can be read"),
        (b"\xff\xfe", 400, "not JSON that can be read"),
        (b"[" * 100_000, 400, "not JSON that can be read"),
        (b"[1]", 400, "must be a JSON object"),
        (b'{"n": ' + b"9" * 5000 + b"}", 400, "not JSON that can be read"),
        (b'{"n": 1e999}', 400, "n must be a whole number from 1 to 16"),
        (b'{"n": NaN}', 400, "n must be a whole number from 1 to 16"),
        (b'{"n": 17}', 400, "n must be a whole number from 1 to 16, not 17."),
        (b'{"steps": "many"}', 400, "steps must be a whole number from 2 to 200, not many."),
        (b'{"self": 1}', 400, "draw takes seed, steps, n"),
        (b'{"colour": 1}', 400, "draw takes seed, steps, n"),
    ],
)
def test_what_cannot_be_asked_is_a_sentence(request_to, body, status, said):
    found, _, told = request_to("POST", "/api/draw", body)
    assert found == status
    assert said in told["error"]
    assert "Traceback" not in told["error"]


def test_masks_and_keys_are_checked(request_to):
    for path, body, said in (
        ("/api/posterior", {"index": 0, "mask": "1" * 63, "noise": 0.1}, "mask must be 64 characters 0 or 1"),
        ("/api/posterior", {"index": 0, "mask": [1], "noise": 0.1}, "mask must be 64 characters 0 or 1"),
        ("/api/posterior", {"index": 0, "mask": "0" * 64, "noise": 0.1}, "nothing is observed"),
        ("/api/polish", {"key": ["draw"]}, "no longer kept"),
        ("/api/polish", {}, "polish takes key"),
    ):
        status, _, told = request_to("POST", path, body)
        assert (status, said in told["error"]) == (400, True), told


def test_bodies_are_bounded_and_of_one_kind(request_to, server):
    assert request_to("POST", "/api/draw", {}, Content_Type="text/plain")[0] == 415
    for length, status in ((str(LARGEST_BODY + 1), 413), ("-1", 411), ("²", 411), ("9" * 30, 411)):
        with socket.create_connection(server.server_address, timeout=10) as connection:
            head = f"POST /api/draw HTTP/1.0\r\nHost: {server.hosts[0]}\r\nX-Namm-Token: {server.token}\r\n"
            head += f"Content-Type: application/json\r\nContent-Length: {length}\r\n\r\n"
            connection.sendall(head.encode())
            assert f" {status} " in connection.makefile("rb").readline().decode()


def test_other_methods_are_refused(server):
    for method in ("PUT", "DELETE", "OPTIONS", "HEAD"):
        connection = http.client.HTTPConnection(*server.server_address, timeout=10)
        connection.request(method, "/api/draw", headers={"X-Namm-Token": server.token})
        assert connection.getresponse().status == 501
        connection.close()


def test_a_second_question_is_told_what_the_studio_is_busy_with(request_to, server):
    with server.studio.work.doing("drawing samples"):
        server.studio.work.expect(5)
        server.studio.work.tick()
        assert request_to("GET", "/api/state")[2] == {"doing": "drawing samples", "done": 1, "total": 5}
        status, _, told = request_to("POST", "/api/perturb", {})
        assert status == 409
        assert told["error"] == "the studio is drawing samples: wait until that is done, or stop it."
        assert request_to("POST", "/api/stop", {})[0] == 200
        with pytest.raises(Exception, match="stopped after 1 of 5 steps"):
            server.studio.work.tick()
    assert request_to("POST", "/api/perturb", {})[0] == 200


def test_what_nobody_intended_is_a_sentence_and_shown_in_the_terminal(request_to, monkeypatch, capfd):
    def fail(studio):
        raise LookupError("a bug\nin two lines")

    monkeypatch.setitem(answers.QUESTIONS, "curve", answers.QUESTIONS["curve"]._replace(method=fail))
    status, _, told = request_to("POST", "/api/curve", {})
    assert status == 500
    assert told["error"] == "LookupError: a bug. The terminal shows where it happened."
    assert "in fail" in capfd.readouterr().err


def test_a_port_that_is_taken_is_a_sentence(server, studio):
    with pytest.raises(UsageError, match=f"port {server.server_port} of 127.0.0.1 cannot be listened on"):
        Server(studio, server.server_port)


def test_the_files_of_the_page_are_in_the_package():
    assert {name for name, _ in serving.PAGE.values()} == {"index.html", "studio.css", "studio.js"}
    for name, _ in serving.PAGE.values():
        assert serving._file(name)
