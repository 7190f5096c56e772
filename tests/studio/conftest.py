"""A studio of the tiny run, and a server of it."""

import http.client
import json
import threading

import pytest

from namm.studio.server import Server
from namm.studio.studio import Studio


@pytest.fixture(scope="session")
def studio(whole_run):
    made = Studio(whole_run)
    yield made
    made.close()


@pytest.fixture(scope="session")
def server(whole_run):
    with Server(Studio(whole_run)) as running:
        thread = threading.Thread(target=running.serve_forever, daemon=True)
        thread.start()
        yield running
        running.shutdown()
        thread.join()


@pytest.fixture
def request_to(server):
    """Send one request: status, headers and body, which is what JSON holds where it is JSON."""

    def send(method, path, body=None, *, token=None, **headers):
        token = server.token if token is None else token
        given = {"X-Namm-Token": token, "Content-Type": "application/json", **headers}
        content = json.dumps(body).encode() if isinstance(body, dict) else body
        connection = http.client.HTTPConnection(*server.server_address, timeout=60)
        try:
            connection.request(method, path, content, {name.replace("_", "-"): value for name, value in given.items()})
            answer = connection.getresponse()
            text = answer.read().decode()
        finally:
            connection.close()
        is_json = answer.headers["Content-Type"] == "application/json"
        return answer.status, answer.headers, json.loads(text) if is_json else text

    return send
