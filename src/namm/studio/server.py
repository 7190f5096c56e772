"""The studio's page and its questions over HTTP, for the person at this machine and nobody else.

GET /                  the page, studio.css and studio.js: files of the package, without anything of the run
POST /api/QUESTION     arguments and answer as JSON, by `namm.studio.answers`
GET /api/state         what is being computed
POST /api/stop         stop that

Who can reach a port of this machine is not yet its user: a page of the web can send requests to it, and a name of the
web can be made to lead to it. So the server listens on the loopback interface alone; it answers to its own address in
`Host` and, where there is one, `Origin`; and whatever begins with /api needs the token in a header, which no other page
can send. The token is the fragment of the address that the terminal prints, which no browser passes on. The page's
security policy allows it nothing but these files and questions.
"""

import hmac
import json
import secrets
import traceback
from collections.abc import Callable
from functools import cache
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.resources import files
from typing import Any

from namm.errors import NammError, UsageError, explain
from namm.studio.answers import QUESTIONS, answer
from namm.studio.studio import Studio
from namm.studio.work import Busy

ADDRESS = "127.0.0.1"
TOKEN = "X-Namm-Token"
PAGE = {
    "/": ("index.html", "text/html; charset=utf-8"),
    "/studio.css": ("studio.css", "text/css; charset=utf-8"),
    "/studio.js": ("studio.js", "text/javascript; charset=utf-8"),
}
LARGEST_BODY = 2**20
"""Bytes of a question; a mask has one for each pixel."""
PATIENCE = 30.0
"""Seconds that a connection may say nothing."""
HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cache-Control": "no-store",
}


class Refused(NammError):
    """A request that is not answered, with the status that says so."""

    def __init__(self, status: HTTPStatus, message: str) -> None:
        super().__init__(message)
        self.status = status


class Server(ThreadingHTTPServer):
    """Serves one studio on the loopback interface; close it, or use it in a `with`.

    Args:
        studio: What answers.
        port: 0 takes a free one.
    """

    daemon_threads = True
    block_on_close = False

    def __init__(self, studio: Studio, port: int = 0) -> None:
        self.studio, self.token = studio, secrets.token_urlsafe(24)
        try:
            super().__init__((ADDRESS, port), Handler)
        except OSError as error:
            raise UsageError(
                f"port {port} of {ADDRESS} cannot be listened on ({error.strerror}): choose another with --port, or "
                "leave it out for a free one."
            ) from error

    @property
    def hosts(self) -> tuple[str, str]:
        """What this server is called."""
        return f"{ADDRESS}:{self.server_port}", f"localhost:{self.server_port}"

    @property
    def url(self) -> str:
        """Where the page is, with the token that its questions need."""
        return f"http://{self.hosts[0]}/#{self.token}"

    def __exit__(self, *error: Any) -> None:
        """Listen no longer, and close the studio."""
        super().__exit__(*error)
        self.studio.close()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Say nothing: a browser may close a connection whenever it likes."""


class Handler(BaseHTTPRequestHandler):
    """Answers one request."""

    server: Server
    server_version, sys_version = "namm", ""
    timeout = PATIENCE

    def do_GET(self) -> None:
        """The page, or what is being computed."""
        self._answer(self._get)

    def do_POST(self) -> None:
        """A question."""
        self._answer(self._post)

    def _get(self) -> tuple[bytes, str]:
        if self.path in PAGE:
            name, kind = PAGE[self.path]
            return _file(name), kind
        if self.path != "/api/state":
            raise Refused(HTTPStatus.NOT_FOUND, "there is no such page.")
        self._require_token()
        return _json(self.server.studio.work.state)

    def _post(self) -> tuple[bytes, str]:
        self._require_token()
        name = self.path.removeprefix("/api/")
        if name == "stop":
            self.server.studio.work.stop()
            return _json({})
        if f"/api/{name}" != self.path or name not in QUESTIONS:
            raise Refused(HTTPStatus.NOT_FOUND, f"there is no such question; there are {', '.join(QUESTIONS)}.")
        return _json(answer(self.server.studio, name, self._arguments()))

    # What is refused

    def _require_own_name(self) -> None:
        """Refuse a request that another site's page or name has led here."""
        hosts, origin = self.server.hosts, self.headers.get("Origin")
        if self.headers.get("Host") not in hosts:
            raise Refused(HTTPStatus.FORBIDDEN, "this is not the address of the studio: open the one that it printed.")
        if origin is not None and origin not in {f"http://{host}" for host in hosts}:
            raise Refused(HTTPStatus.FORBIDDEN, "another page asked: the studio answers its own alone.")

    def _require_token(self) -> None:
        given = self.headers.get(TOKEN, "")
        if not hmac.compare_digest(given.encode(), self.server.token.encode()):
            raise Refused(
                HTTPStatus.UNAUTHORIZED, "the token is missing or old: open the address that the terminal shows."
            )

    def _arguments(self) -> dict[str, Any]:
        """The body of a question."""
        if self.headers.get_content_type() != "application/json":
            raise Refused(HTTPStatus.UNSUPPORTED_MEDIA_TYPE, "questions are JSON, application/json.")
        length = self.headers.get("Content-Length", "")
        if not (length.isascii() and length.isdecimal() and len(length) < 20):
            raise Refused(HTTPStatus.LENGTH_REQUIRED, "a question must say how long it is, by Content-Length.")
        if int(length) > LARGEST_BODY:
            raise Refused(
                HTTPStatus.REQUEST_ENTITY_TOO_LARGE, f"a question has at most {LARGEST_BODY} bytes, not {length}."
            )
        try:
            found = json.loads(self.rfile.read(int(length)))
        except (ValueError, RecursionError) as error:
            raise Refused(HTTPStatus.BAD_REQUEST, "the question is not JSON that can be read.") from error
        if not isinstance(found, dict):
            raise Refused(HTTPStatus.BAD_REQUEST, "the question must be a JSON object of arguments by name.")
        return found

    # What is sent

    def _answer(self, make: Callable[[], tuple[bytes, str]]) -> None:
        try:
            self._require_own_name()
            status, (content, kind) = HTTPStatus.OK, make()
        except Exception as error:
            status = _status(error)
            content, kind = _json({"error": _sentence(error, status)})
        self.send_response(status)
        for name, value in {**HEADERS, "Content-Type": kind, "Content-Length": str(len(content))}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *_: object) -> None:
        """Say nothing: the terminal is for the person, and the page says what went wrong."""


def _status(error: Exception) -> HTTPStatus:
    if isinstance(error, Refused):
        return error.status
    if isinstance(error, Busy):
        return HTTPStatus.CONFLICT
    if isinstance(error, UsageError):
        return HTTPStatus.BAD_REQUEST
    return HTTPStatus.UNPROCESSABLE_ENTITY if isinstance(error, NammError) else HTTPStatus.INTERNAL_SERVER_ERROR


def _sentence(error: Exception, status: HTTPStatus) -> str:
    """What the page says of an error; where it was nobody's intention the terminal shows where it happened."""
    if status is HTTPStatus.INTERNAL_SERVER_ERROR:
        traceback.print_exception(error)
    return explain(error, resumes=False)[0].replace("--debug shows", "The terminal shows")


def _json(value: Any) -> tuple[bytes, str]:
    return json.dumps(value, allow_nan=False).encode(), "application/json"


@cache
def _file(name: str) -> bytes:
    return files("namm.studio").joinpath("page", name).read_bytes()
