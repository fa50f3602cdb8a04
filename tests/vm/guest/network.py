"""Other addresses and ways into the network, by the drop-ins of the docs. The docs' addresses are put on the loopback interface."""

from __future__ import annotations

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from tests.vm import documents
from tests.vm.guest import clients, credentials, service
from tests.vm.guest.checks import check, expect
from tests.vm.guest.service import SOCKET, UNIT, page, run, shell, show, systemctl


class _Server(ThreadingHTTPServer):
    """Remembers the paths of its requests, with their bodies. Answers as a server of the OpenAI API that has the model m."""

    def __init__(self, host: str, port: int) -> None:
        self.seen: list[tuple[str, dict[str, str], bytes]] = []
        super().__init__((host, port), _Answers)
        threading.Thread(target=self.serve_forever, daemon=True).start()


class _Answers(BaseHTTPRequestHandler):
    server: _Server

    def do_GET(self) -> None:
        self._say({"object": "list", "data": [{"id": "m", "object": "model"}]})

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        self.server.seen.append((self.path, {name.lower(): value for name, value in self.headers.items()}, body))
        message = {"role": "assistant", "content": "from the other server"}
        choices = [{"index": 0, "message": message, "finish_reason": "stop"}]
        usage = {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2}
        self._say({"id": "x", "object": "chat.completion", "created": 1, "model": "m", "choices": choices, "usage": usage})

    def _say(self, what: object) -> None:
        text = json.dumps(what).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    def log_message(self, *_: object) -> None:
        pass


def _has_address(address: str) -> None:
    run("ip", "address", "replace", f"{address}/32", "dev", "lo")


def _socket_drop_in() -> tuple[str, str]:
    """(text of the drop-in, the command after it)."""
    shown = documents.block(page("operations.md"), "ListenStream=10.0.0.5:8000")
    return documents.typed_after(shown, "systemctl edit hearthd.socket"), documents.commands(shown)[-1]


@check("another address by the socket's drop-in of operations.md: refused without keys, served with them", restarts=True)
def address() -> str:
    _has_address("10.0.0.5")
    text, command = _socket_drop_in()
    service.write_drop_in(text, SOCKET)
    cursor = service.journal_end()
    shell(command, code=None)
    service.wait_for("the start is refused", lambda: show("ActiveState") == "failed")
    expect(
        "can be reached from other machines and no keys are set" in service.told_since(cursor), service.told_since(cursor)[-500:]
    )
    key = credentials.make_keys(0o640)
    service.write_settings('keys_file = "/etc/hearthd/keys.toml"\n')
    systemctl("reset-failed", UNIT, SOCKET, code=None)
    shell(command)
    service.wait_active()
    status, body = clients.chat(host="10.0.0.5", headers={"Authorization": f"Bearer {key}"})
    expect(status == 200, (status, body))
    try:
        clients.request("GET", "/healthz")
    except OSError:
        return show("Listen", SOCKET)
    raise AssertionError("127.0.0.1 still answers: the empty line took nothing away")


@check(
    "a second socket unit for metrics and status page, made as operations.md says, and asked for no key on this machine",
    restarts=True,
)
def admin() -> str:
    told = documents.spans(page("operations.md"), "`hearthd-admin.socket`, with the same content but")
    name, service_line = (next(one for one in told if one.startswith(head)) for head in ("FileDescriptorName=", "Service="))
    unit = Path("/usr/local/lib/systemd/system", SOCKET).read_text()
    unit = unit.replace("FileDescriptorName=http", f"{name}\n{service_line}").replace("127.0.0.1:8000", "127.0.0.1:8001")
    (service.UNITS / "hearthd-admin.socket").write_text(unit)
    systemctl("daemon-reload")
    systemctl("stop", UNIT, SOCKET)
    systemctl("start", "hearthd-admin.socket", SOCKET, UNIT)
    service.wait_active()
    status, text = clients.request("GET", "/metrics", port=8001)
    expect(status == 200 and "hearth_" in text, (status, text[:200]))
    elsewhere = clients.request("GET", "/metrics")[0]
    expect(elsewhere == 404, f"the first address still has /metrics: {elsewhere}")
    expect(clients.chat()[0] == 200, "no chat on the first address")
    systemctl("restart", UNIT)
    service.wait_active()
    expect(clients.request("GET", "/metrics", port=8001)[0] == 200, "after a restart")
    return ""


@check("a model of another server, by the drop-in of upstream.md: that address is reached, no other one", restarts=True)
def upstream() -> str:
    for one in ("10.0.0.7", "10.0.0.8"):
        _has_address(one)
    with open("/etc/hosts", "a") as hosts:
        hosts.write("10.0.0.7 gpu2\n")  # the name of operations.md's example
    near, far = _Server("10.0.0.7", 8000), _Server("10.0.0.8", 8000)
    cursor = service.journal_end()
    service.write_drop_in(documents.block(page("reference/upstream.md"), "IPAddressAllow="))
    service.write_settings('[models.near]\nupstream = "http://gpu2:8000/v1"\n[models.far]\nupstream = "http://10.0.0.8:8000/v1"\n')
    systemctl("restart", UNIT)
    service.wait_active()
    try:
        status, body = clients.chat("near")
        expect(status == 200 and "from the other server" in json.dumps(body), (status, body))
        refused, told = clients.chat("far")
        expect(refused == 503 and not far.seen, f"10.0.0.8, which is not allowed: {refused} {told}")
        expect(clients.chat()[0] == 200, "no chat with a model of this node")
    finally:
        near.shutdown()
        far.shutdown()
    expect("invalid" not in service.told_since(cursor).lower(), service.told_since(cursor)[-500:])
    return f"IPAddressAllow={show('IPAddressAllow')}; the other one: {told['error']['code']}"


@check("traces to a collector, by the drop-in of operations.md, with a header from a credential", restarts=True)
def traces() -> str:
    collector = _Server("127.0.0.1", 4318)
    text = page("operations.md")
    network = [
        one for one in documents.spans(text, "The unit gives the service no network.") if one.startswith(("Private", "Restrict"))
    ]
    settings = documents.block(text, 'headers_file = "credential:traces"')
    Path("/etc/hearthd/traces.headers").write_text("x-secret: 42\n")
    credential = "LoadCredential=traces:/etc/hearthd/traces.headers"
    expect("LoadCredential=traces:…" in settings, settings)
    service.write_drop_in("\n".join(["[Service]", *network, credential, ""]))
    service.write_settings(
        settings.replace("http://collector:4318", "http://127.0.0.1:4318").replace("sample = 0.1", "sample = 1.0")
    )
    systemctl("restart", UNIT)
    service.wait_active()
    try:
        clients.chat()
        service.wait_for("a trace", lambda: any(path == "/v1/traces" for path, _, _ in collector.seen))
        _, headers, body = collector.seen[0]
        expect(headers.get("x-secret") == "42", headers)
        expect(b"chat fast" in body, body[:300])
    finally:
        collector.shutdown()
    return " ".join(network)


@check(
    "an environment variable by the drop-in of operations.md (HEARTHD_CPU_FEATURES); an unknown name stops the start", restarts=True
)
def environment() -> str:
    told = documents.spans(page("operations.md"), "`HEARTHD_CPU_FEATURES=-amx` in the environment")
    setting = next(one for one in told if one.startswith("Environment="))
    service.write_drop_in(f"[Service]\n{setting}\n")
    systemctl("restart", UNIT)
    pid = service.wait_active()
    environ = Path(f"/proc/{pid}/environ").read_text().split("\0")
    expect("HEARTHD_CPU_FEATURES=-amx" in environ, "it is not in the environment")
    service.write_drop_in(f"[Service]\n{setting.replace('-amx', '-nonsense')}\n")
    cursor = service.journal_end()
    systemctl("restart", UNIT, code=None)
    service.wait_for("the start is refused", lambda: show("ActiveState") == "failed")
    lines = [line for line in service.told_since(cursor).splitlines() if "nonsense" in line]
    expect(lines, service.told_since(cursor)[-500:])
    return lines[0]
